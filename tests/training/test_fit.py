from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small import small_recipe
from torch import nn

from recast.data import Data
from recast.errors import RecastError
from recast.io import load
from recast.run.config import Recipe, RegularizationConfig
from recast.surgery.apply import gpsa_layers
from recast.training import loop as fit_module
from recast.training.checkpoint import states
from recast.training.loop import fit
from recast.training.metrics import measure
from recast.training.step import Inputs

MakeChild = Callable[..., nn.Module]
MakeRecipe = Callable[..., Recipe]
CPU = torch.device("cpu")


def test_a_recast_arm_has_every_row_and_every_file(
    make_child: MakeChild, parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    before = measure(parent, data, small_recipe(), CPU)
    child = make_child()
    rows = fit(child, data, make_recipe(), tmp_path / "run", progress=False)
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3]
    assert (rows[0]["val_loss"], rows[0]["val_top1"]) == pytest.approx(before, rel=1e-12)
    assert rows[0]["train_loss"] is rows[0]["lr"] is rows[0]["gate_lr"] is None
    assert rows[0]["layers"]["4"]["gamma"] == [0.0] * 9
    assert all(abs(span - 1) < 1e-6 for span in rows[0]["layers"]["4"]["span"])
    assert rows[3]["layers"]["4"].keys() == {"gate", "backend", "gamma", "s", "span"}
    assert rows[3]["layers"]["4"]["backend"] in ("split", "merged")
    assert any(rows[3]["layers"]["4"]["gamma"])
    assert rows[3]["val_loss"] < rows[0]["val_loss"]
    assert rows[3]["lr"] == pytest.approx(1e-6)
    assert rows[3]["gate_lr"] == pytest.approx(1e-5)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == rows
    assert sorted(path.name for path in (tmp_path / "run").rglob("*") if path.is_file()) == [
        "metrics.jsonl", "state-00003-00000000.pt", "state-00004-00000000.pt", "weights.safetensors",
    ]  # fmt: skip
    saved = load_file(tmp_path / "run" / "weights.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in child.state_dict().items())
    assert not child.training


def test_saved_weights_give_the_last_row(
    make_child: MakeChild, parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    untouched = copy.deepcopy(parent)
    rows = fit(make_child(), data, make_recipe(), tmp_path, progress=False)
    again = measure(load(tmp_path / "weights.safetensors", parent=untouched), data, small_recipe(), CPU)
    assert again == pytest.approx((rows[-1]["val_loss"], rows[-1]["val_top1"]), rel=1e-6)


def test_a_plain_network_trains_the_same_way(
    parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    rows = fit(parent, data, make_recipe(), tmp_path, progress=False)
    assert all(row["layers"] == {} and row["gate_lr"] is None for row in rows)
    assert rows[-1]["val_loss"] < 0.9 * rows[0]["val_loss"]


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(
    parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    models = [copy.deepcopy(parent) for _ in range(3)]
    generator = torch.get_rng_state()
    for number, seed in enumerate((3, 3, 4)):
        fit(models[number], data, make_recipe(seed=seed, epochs=1), tmp_path / str(number), progress=False)
        torch.rand(1)  # the user's own generator must not matter
    weights = [model[0].weight for model in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    torch.set_rng_state(generator)
    fit(parent, data, make_recipe(epochs=1), tmp_path / "more", progress=False)
    assert torch.equal(torch.get_rng_state(), generator)


def test_no_epoch_measures_and_saves(parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    before = parent[0].weight.clone()
    rows = fit(parent, data, make_recipe(epochs=0), tmp_path, progress=False)
    assert [row["epoch"] for row in rows] == [0]
    assert torch.equal(load_file(tmp_path / "weights.safetensors")["0.weight"], before)


def test_the_average_is_what_is_measured_and_saved(
    make_child: MakeChild, data: Data, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    child = make_child()
    rows = fit(child, data, make_recipe(regularization=RegularizationConfig(ema_decay=0.9)), tmp_path, progress=False)
    state = torch.load(states(tmp_path)[-1], weights_only=True)
    saved = load_file(tmp_path / "weights.safetensors")
    assert torch.equal(saved["0.weight"], state["ema"]["0.weight"])
    assert not torch.equal(saved["0.weight"], state["model"]["0.weight"])
    assert rows[-1]["layers"]["4"]["gamma"] == saved["4.gamma"].tolist()
    assert measure(child, data, small_recipe(), CPU)[0] == pytest.approx(rows[-1]["val_loss"])


@pytest.mark.parametrize("averaged", [RegularizationConfig(), RegularizationConfig(ema_decay=0.5)])
def test_every_evaluation_skips_the_heads_that_are_closed_by_then(
    make_child: MakeChild,
    data: Data,
    make_recipe: MakeRecipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    averaged: RegularizationConfig,
) -> None:
    seen = []

    def watched(model: nn.Module, *args: Any) -> tuple[float, float]:
        seen.append(gpsa_layers(model)["4"].open_heads)
        return measure(model, *args)

    monkeypatch.setattr(fit_module, "measure", watched)
    fit(
        make_child(),
        data,
        make_recipe(regularization=averaged),
        tmp_path,
        progress=False,
    )
    assert seen == [(), *[tuple(range(9))] * 3]


@pytest.mark.parametrize("averaged", [RegularizationConfig(), RegularizationConfig(ema_decay=0.5)])
def test_gate_l1_closes_heads_at_exactly_zero(
    make_child: MakeChild, data: Data, make_recipe: MakeRecipe, tmp_path: Path, averaged: RegularizationConfig
) -> None:
    child = make_child()
    with torch.no_grad():
        child[4].gamma.fill_(0.05)
        child[4].spread[0] = 6.0  # too far from 0 to get there
    rows = fit(
        child,
        data,
        make_recipe({"gate_l1": 5.0}, regularization=averaged),
        tmp_path,
        progress=False,
    )
    gates = rows[-1]["layers"]["4"]
    assert gates["gamma"] == [0.0] * 9
    assert gates["s"][1:] == [0.0] * 8
    assert gates["s"][0] > 1
    assert gpsa_layers(child)["4"].open_heads == (0,)


def test_a_loss_that_is_not_finite_names_epoch_step_and_the_newest_state(
    make_child: MakeChild, data: Data, make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, call = [], Inputs.__call__

    def poison(self: Inputs, pixels: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(1)
        images, targets = call(self, pixels, labels)
        return images * (math.nan if len(calls) == 8 else 1), targets  # the 8th training batch of 5 an epoch

    monkeypatch.setattr(Inputs, "__call__", poison)
    with pytest.raises(RecastError, match=r"loss is nan at epoch 2, step 3.*the newest state is .*00002-00000002.pt"):
        fit(make_child(), data, make_recipe(save_steps=2), tmp_path, progress=False)
    state = torch.load(states(tmp_path)[-1], weights_only=True)
    assert (state["position"]["epoch"], state["position"]["step"]) == (2, 2)
    assert all(value.isfinite().all() for value in state["model"].values())
    assert not (tmp_path / "weights.safetensors").exists()


def test_weights_that_blew_up_in_the_last_step_of_an_epoch_are_not_kept(
    parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = fit_module.Update.__call__
    calls = []

    def explode(self, *args):  # type: ignore[no-untyped-def]
        loss = update(self, *args)
        calls.append(1)
        if len(calls) == 5:
            self.state.model[0].weight.data.fill_(math.nan)
        return loss

    monkeypatch.setattr(fit_module.Update, "__call__", explode)
    with pytest.raises(RecastError, match="validation loss is nan after epoch 1"):
        fit(parent, data, make_recipe(), tmp_path, progress=False)
    assert torch.load(states(tmp_path)[-1], weights_only=True)["model"]["0.weight"].isfinite().all()


def test_a_folder_with_a_training_is_refused(
    parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    fit(parent, data, make_recipe(epochs=0), tmp_path, progress=False)
    before = (tmp_path / "weights.safetensors").read_bytes()
    with pytest.raises(RecastError, match="already holds a training"):
        fit(parent, data, make_recipe(), tmp_path, progress=False)
    assert (tmp_path / "weights.safetensors").read_bytes() == before


def test_clipping_limits_the_step(parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    before = parent[0].weight.clone()
    optim = {"opt": "sgd", "lr": 1.0, "warmup_epochs": 0.0, "weight_decay": 0.0, "clip_grad": 1e-4}
    fit(parent, data, make_recipe(optim, epochs=1), tmp_path, progress=False)
    moved = (parent[0].weight - before).norm()
    assert 0 < moved <= 5e-3  # at most 5 steps of norm 1e-4, momentum makes each up to 10 times as long


def test_bf16_trains(make_child: MakeChild, data: Data, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    rows = fit(make_child(), data, make_recipe(amp="bf16", epochs=1), tmp_path, progress=False)
    assert math.isfinite(rows[-1]["train_loss"])
    assert load_file(tmp_path / "weights.safetensors")["4.weight"].dtype == torch.float32


def test_fp16_without_cuda_is_refused(parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    with pytest.raises(RecastError, match=r"fp16.*CUDA"):
        fit(parent, data, make_recipe(amp="fp16"), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_head_of_another_size_is_refused(
    parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    with pytest.raises(RecastError, match=r"logits of shape \(8, 4\)"):
        fit(parent, replace(data, classes=list("abcd")), make_recipe(), tmp_path, progress=False)


def test_progress_is_a_line_per_epoch_on_stderr(
    parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(parent, data, make_recipe(epochs=2), tmp_path / "shown", progress=True, name="arm")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [line.split()[:3] for line in shown.err.splitlines()] == [["arm", "epoch", f"{e}/2"] for e in range(3)]
    fit(parent, data, make_recipe(epochs=1), tmp_path / "quiet", progress=False)
    assert capsys.readouterr() == ("", "")
