import copy
import math
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from small import assert_same, small_child, small_data, small_fit, small_parent, small_recipe
from torch import nn

from recast import RecastError, load
from recast.lab.config import RegularizationConfig
from recast.lab.folder.files import read_lines
from recast.lab.folder.run import RunFolder
from recast.lab.training import loop
from recast.lab.training.loop import fit
from recast.lab.training.metrics import validate
from recast.layers.cmhsa import gated_layers
from recast.layers.config import PAPERS_LAYER

CPU = torch.device("cpu")
AVERAGED = RegularizationConfig(ema_decay=0.5)


def measured(model: nn.Module) -> tuple[float, float]:
    return validate(model, small_data(), small_recipe().data, CPU)


def test_a_recast_arm_has_every_row_and_every_file(tmp_path: Path) -> None:
    before, child = measured(small_parent()), small_child(gate="linear", **PAPERS_LAYER)
    rows = small_fit(tmp_path, child)
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3]
    assert (rows[0]["val_loss"], rows[0]["val_top1"]) == pytest.approx(before, rel=1e-12)
    assert rows[0]["train_loss"] is rows[0]["lr"] is rows[0]["gate_lr"] is None
    assert rows[0]["layers"]["4"]["gamma"] == [0.0] * 9
    keys = "gate backend gamma s span entropy distance content_share attention_share"
    assert rows[3]["layers"]["4"].keys() == set(keys.split())
    assert rows[0]["layers"]["4"]["attention_share"] == [0.0] * 9
    assert any(rows[3]["layers"]["4"]["gamma"])
    assert rows[3]["val_loss"] < rows[0]["val_loss"]
    assert (rows[3]["lr"], rows[3]["gate_lr"]) == (pytest.approx(1e-6), pytest.approx(1e-5))
    assert read_lines(tmp_path / "metrics.jsonl") == (list(enumerate(rows, start=1)), [])
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "metrics.jsonl",
        "state-00003-00000000.pt",
        "state-00004-00000000.pt",
        "weights.safetensors",
    ]
    assert not child.training
    loaded = load(tmp_path / "weights.safetensors", parent=small_parent())
    assert_same(child, loaded)
    assert measured(loaded) == pytest.approx((rows[3]["val_loss"], rows[3]["val_top1"]), rel=1e-6)


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    for folder, seed in (("first", 3), ("second", 3), ("other", 4)):
        model, generator = small_parent(), torch.get_rng_state()
        small_fit(tmp_path / folder, model, seed=seed, epochs=1)
        assert torch.equal(torch.get_rng_state(), generator), "the user's own generator is left alone"
        torch.rand(1)  # and does not matter
    assert_same(tmp_path / "first", tmp_path / "second")
    with pytest.raises(AssertionError):
        assert_same(tmp_path / "first", tmp_path / "other")


def test_the_average_is_what_is_measured_and_saved(tmp_path: Path) -> None:
    rows = small_fit(tmp_path, child := small_child(gate="linear", **PAPERS_LAYER), regularization=AVERAGED)
    state = torch.load(RunFolder(tmp_path).saved_states()[-1], weights_only=True)
    saved = load_file(tmp_path / "weights.safetensors")
    assert torch.equal(saved["0.weight"], state["ema"]["0.weight"])
    assert not torch.equal(saved["0.weight"], state["model"]["0.weight"])
    assert rows[-1]["layers"]["4"]["gamma"] == saved["4.gamma"].tolist()
    assert measured(child)[0] == pytest.approx(rows[-1]["val_loss"])


@pytest.mark.parametrize("averaged", [RegularizationConfig(), AVERAGED])
def test_gate_l1_closes_heads_at_exactly_zero(tmp_path: Path, averaged: RegularizationConfig) -> None:
    child = small_child(gate="linear", **PAPERS_LAYER)
    layer = gated_layers(child)["4"]
    with torch.no_grad():
        layer.gamma.fill_(0.05)
        layer.spread[0] = 6.0  # too far from 0 to get there
    gates = small_fit(tmp_path, child, optim={"gate_l1": 5.0}, regularization=averaged)[-1]["layers"]["4"]
    assert gates["gamma"] == [0.0] * 9
    assert gates["s"][1:] == [0.0] * 8
    assert gates["s"][0] > 1
    assert layer.open_maps() == ((0,), ())


@pytest.mark.parametrize("averaged", [RegularizationConfig(), AVERAGED])
def test_the_head_beside_a_convolution_has_its_row_and_closes(tmp_path: Path, averaged: RegularizationConfig) -> None:
    rows = small_fit(tmp_path / "open", child := small_child(), regularization=averaged)
    assert (rows[0]["val_loss"], rows[0]["val_top1"]) == pytest.approx(measured(small_parent()), rel=1e-12)
    assert rows[3]["layers"]["4"].keys() == {
        "gate",
        "backend",
        "gamma",
        "entropy",
        "distance",
        "content_share",
        "attention_share",
    }
    assert (rows[0]["layers"]["4"]["gate"], rows[0]["layers"]["4"]["gamma"]) == ("beside", [0.0])
    assert rows[3]["layers"]["4"]["gamma"] == [child[4].gamma.abs().max().item()] != [0.0]
    with torch.no_grad():
        (child := small_child())[4].gamma.fill_(0.05)
    rows = small_fit(tmp_path / "closed", child, optim={"gate_l1": 5.0}, regularization=averaged)
    assert rows[3]["layers"]["4"]["gamma"] == [child[4].gamma.abs().max().item()] == [0.0]


def test_accumulated_parts_give_the_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    parent = small_parent()
    parent[3] = nn.Identity()  # type: ignore[operator]  # no dropout: it is drawn anew for every part
    models = [copy.deepcopy(parent) for _ in range(3)]
    sgd, frozen = {"opt": "sgd", "lr": 0.1, "weight_decay": 0.0}, RegularizationConfig(freeze="batch_norm")
    for parts, model in zip((1, 2, 4), models, strict=True):
        small_fit(tmp_path / str(parts), model, optim=sgd, regularization=frozen, accumulate=parts)
    for model in models[1:]:
        for name, value in models[0].state_dict().items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("mode", ["default", pytest.param("reduce-overhead", marks=pytest.mark.slow)])
def test_a_compiled_training_has_the_losses_of_an_eager_one(mode: str, tmp_path: Path) -> None:
    losses: dict[str, list[float]] = {"off": [], mode: []}
    for name, values in losses.items():
        model = small_child()
        model.get_submodule("3").p = 0.0  # a compiled network draws other numbers
        small_fit(tmp_path / name, model, losses=values, epochs=1, accumulate=2, compile=name)
    assert losses[mode] == pytest.approx(losses["off"], rel=1e-4)


def test_a_loss_that_is_not_finite_names_epoch_step_and_the_newest_state(tmp_path: Path) -> None:
    losses = [torch.tensor(1.0)] * 7 + [torch.tensor(math.nan)]  # of the 8th training batch of 5 an epoch
    message = r"loss is nan at epoch 2, step 3.*newest state is .*00002-00000002.pt"
    with mock.patch.object(loop.Update, "__call__", side_effect=losses), pytest.raises(RecastError, match=message):
        small_fit(tmp_path, save_steps=2)
    state = torch.load(RunFolder(tmp_path).saved_states()[-1], weights_only=True)
    assert (state["position"]["epoch"], state["position"]["step"]) == (2, 2)
    assert all(value.isfinite().all() for value in state["model"].values())
    assert not (tmp_path / "weights.safetensors").exists()


@pytest.mark.parametrize(
    ("calls", "message", "newest"),
    [
        (5, "validation loss is nan after epoch 1", "state-00001-00000004.pt"),
        (3, r"4\.weight is not finite after epoch 1, step 3.*state-00001-00000002", "state-00001-00000002.pt"),
    ],
)
def test_weights_that_blew_up_are_never_saved(calls: int, message: str, newest: str, tmp_path: Path) -> None:
    parent = small_parent()

    def explode(epoch: int, step: int, _loss: float) -> None:
        if (epoch, step) == (1, calls):
            parent.get_parameter("4.weight").data.fill_(math.nan)

    with pytest.raises(RecastError, match=message):
        fit(parent, small_data(), small_recipe(save_steps=1), tmp_path, progress=False, on_step=explode)
    assert RunFolder(tmp_path).saved_states()[-1].name == newest


def test_a_refused_training_leaves_no_folder(tmp_path: Path) -> None:
    for fields, message in (
        ({"amp": "fp16"}, "fp16.*CUDA"),
        ({"optim": {"opt": "adahessian"}}, "second derivatives"),
    ):
        with pytest.raises(RecastError, match=message):
            small_fit(tmp_path / "run", **fields)
    with pytest.raises(RecastError, match=r"logits \(8, 4\)"):
        small_fit(tmp_path / "other", data=replace(small_data(), classes=list("abcd")))
    parent = small_parent()
    parent.register_buffer("mask", torch.ones(1).expand(2))  # trains, but neither its average nor its state loads
    with pytest.raises(RecastError, match=r"mask is an expanded tensor.*clone"):
        small_fit(tmp_path / "last", parent)
    assert not any(tmp_path.iterdir())
