"""What a recipe can ask of `fit` and `train`, each through the whole loop."""

from __future__ import annotations

import copy
import json
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from small import digits_recipe
from torch import nn

from recast.data import Data, load_data
from recast.errors import RecastError
from recast.evaluation.run_folder import evaluate_run, open_run
from recast.io import load
from recast.run.config import (
    AugmentConfig,
    DataConfig,
    DistillConfig,
    ModelConfig,
    RecastConfig,
    Recipe,
    RegularizationConfig,
)
from recast.run.recipe import load_recipe
from recast.surgery.apply import gpsa_layers
from recast.training import loop as fit_module
from recast.training.loop import fit
from recast.training.metrics import measure
from recast.training.run import train

MakeChild = Callable[..., nn.Module]
MakeRecipe = Callable[..., Recipe]
CPU = torch.device("cpu")


def one_epoch(**fields: Any) -> Recipe:
    return digits_recipe(**{"epochs": 1, **fields})


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A parent that knows some digits."""
    pytest.importorskip("sklearn")
    out = tmp_path_factory.mktemp("parent") / "run"
    train(one_epoch(where=["none"], epochs=8), out, progress=False)
    return out / "weights.safetensors"


@pytest.fixture
def of_parent(weights: Path) -> Callable[..., Recipe]:
    def make(**fields: Any) -> Recipe:
        return one_epoch(model=ModelConfig("digits_resnet", str(weights)), **fields)

    return make


def test_accumulated_parts_give_the_gradient_of_the_whole_batch(
    parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    parent[3] = nn.Identity()  # no dropout: it is drawn anew for every part
    models = [parent, copy.deepcopy(parent), copy.deepcopy(parent)]
    frozen = RegularizationConfig(freeze_bn=True)
    sgd = {"opt": "sgd", "lr": 0.1, "weight_decay": 0.0}
    for parts, model in zip((1, 2, 4), models, strict=True):
        recipe = make_recipe(sgd, regularization=frozen, accumulate=parts)
        fit(model, data, recipe, tmp_path / str(parts), progress=False)
    for name, value in models[0].state_dict().items():
        for model in models[1:]:
            assert torch.allclose(value.double(), model.state_dict()[name].double(), rtol=1e-5, atol=1e-6), name


def test_frozen_batch_norm_keeps_its_statistics_and_learns_its_weights(
    parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    before = {name: value.clone() for name, value in parent[1].state_dict().items()}
    fit(parent, data, make_recipe(regularization=RegularizationConfig(freeze_bn=True)), tmp_path, progress=False)
    after = parent[1].state_dict()
    assert torch.equal(before["running_mean"], after["running_mean"])
    assert not torch.equal(before["weight"], after["weight"])


def test_channels_last_is_the_same_network(
    make_child: MakeChild, data: Data, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    child = make_child()
    child[3] = nn.Identity()  # dropout is drawn in the order in memory
    other = copy.deepcopy(child)
    losses: dict[str, list[float]] = {"nchw": [], "nhwc": []}
    for (name, found), model in zip(losses.items(), (child, other), strict=True):
        recipe = make_recipe(channels_last=name == "nhwc")
        fit(model, data, recipe, tmp_path / name, progress=False, on_step=lambda _e, _s, loss, f=found: f.append(loss))
    assert other[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert losses["nhwc"] == pytest.approx(losses["nchw"], rel=1e-4)


def test_recomputed_activations_change_nothing(data: Data, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = timm.create_model("test_resnet", num_classes=3)
        recipe = make_recipe(
            grad_checkpointing=recompute, epochs=1, regularization=RegularizationConfig(freeze_bn=True)
        )
        found.append(fit(model, data, recipe, tmp_path / str(recompute), progress=False)[-1]["val_loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_a_network_that_cannot_recompute_says_so(
    parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    with pytest.raises(RecastError, match="leave grad_checkpointing out"):
        fit(parent, data, make_recipe(grad_checkpointing=True), tmp_path, progress=False)


@pytest.mark.skipif(not os.environ.get("RECAST_SLOW"), reason="torch.compile takes a minute")
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_run_is_the_same_run(
    make_child: MakeChild, data: Data, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    child = make_child()
    other = copy.deepcopy(child)
    child[3], other[3] = nn.Identity(), nn.Identity()  # a compiled dropout draws its own numbers
    rows = fit(child, data, make_recipe(), tmp_path / "eager", progress=False)
    again = fit(other, data, make_recipe(compile=True), tmp_path / "compiled", progress=False)
    assert [row["val_loss"] for row in again] == pytest.approx([row["val_loss"] for row in rows], rel=1e-3)


def test_tensorboard_gets_the_numbers_of_every_epoch(
    make_child: MakeChild, data: Data, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    rows = fit(make_child(), data, make_recipe(trackers=["tensorboard"]), tmp_path, progress=False)
    found = events.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [round(event.value, 4) for event in found.Scalars("val_loss")] == [round(row["val_loss"], 4) for row in rows]
    assert [event.step for event in found.Scalars("train_loss")] == [1, 2, 3]
    assert "gates/4/gamma" in found.Tags()["scalars"]


def test_a_tracker_that_is_not_installed_is_named(
    parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(RecastError, match=r"pip install .recast-vision\[wandb\]"):
        fit(parent, data, make_recipe(trackers=["wandb"]), tmp_path, progress=False)


def test_the_row_says_how_long_was_waited_for_data(
    parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    import time

    batch = type(data.train).batch

    def slow(self: Any, *args: Any) -> Any:
        time.sleep(0.05)
        return batch(self, *args)

    monkeypatch.setattr(type(data.train), "batch", slow)
    monkeypatch.setattr("recast.training.metrics.WORTH_SECONDS", 0.0)
    rows = fit(parent, data, make_recipe(epochs=1), tmp_path, progress=True)
    assert rows[0]["data_wait"] is None
    assert rows[1]["data_wait"] > 0.5
    assert 0 < rows[1]["images_per_second"] < 40 / 0.25
    assert "waiting for data: set data.workers (now 0;" in capsys.readouterr().err


def test_the_parent_teaches_its_child_and_the_control(of_parent: Callable[..., Recipe], tmp_path: Path) -> None:
    alone = train(of_parent(), tmp_path / "alone", progress=False)
    taught = train(of_parent(distill=DistillConfig("parent")), tmp_path / "taught", progress=False)
    for arm in ("", "finetuned"):
        one, other = (load(folder / arm / "weights.safetensors") for folder in (alone, taught))
        assert any(not torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    # all of the loss the teacher's: the exact start has nothing to learn, up to augmentation and BatchNorm's batches
    only = DistillConfig("parent", teacher_weight=1.0)
    recipe = of_parent(distill=only, regularization=RegularizationConfig(freeze_bn=True), control=False)
    out = train(recipe, tmp_path / "only", progress=False)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows[1]["train_loss"] < 1e-2


def test_features_come_first_and_move_the_recast_layers_only(
    of_parent: Callable[..., Recipe], tmp_path: Path, weights: Path
) -> None:
    recipe = of_parent(
        recast=RecastConfig(gate="sigmoid"), distill=DistillConfig("parent", feature_epochs=1.0), control=False
    )
    out = train(recipe, tmp_path / "run", progress=False)
    child, parent = load(out / "weights.safetensors"), load(weights)
    recast = tuple(f"{name}." for name in gpsa_layers(child))
    before, after = dict(parent.named_parameters()), dict(child.named_parameters())
    assert all(torch.equal(before[name], value) for name, value in after.items() if not name.startswith(recast))
    assert any(not torch.equal(before[name], value) for name, value in after.items() if name in before)


def test_features_without_a_parent_or_compiled_are_refused(
    make_child: MakeChild, data: Data, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    features = DistillConfig(feature_epochs=1.0)
    with pytest.raises(RecastError, match=r"pass fit\(parent=\.\.\.\)"):
        fit(make_child(), data, make_recipe(distill=features), tmp_path, progress=False)


def test_batch_norm_is_measured_again_after_the_recast(of_parent: Callable[..., Recipe], tmp_path: Path) -> None:
    soft = RecastConfig(gate="sigmoid")
    found = []
    for count in (0, 60):
        out = train(
            of_parent(recast=soft, recalibrate_bn=count, epochs=0, control=False), tmp_path / str(count), progress=False
        )
        found.append(load(out / "weights.safetensors").state_dict())
    moved = [name for name in found[0] if not torch.equal(found[0][name], found[1][name])]
    assert moved
    assert all("running" in name for name in moved)


def test_a_run_that_recasts_nothing(of_parent: Callable[..., Recipe], tmp_path: Path) -> None:
    out = train(of_parent(where=["none"]), tmp_path / "run", progress=False)
    assert not (out / "plan.json").exists()
    assert not (out / "finetuned").exists()
    assert list(open_run(out).models) == ["finetuned"]
    rows = evaluate_run(out, ["clean"], progress=False).rows
    last = json.loads((out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert next(row.value for row in rows if row.metric == "top1") == pytest.approx(last["val_top1"])
    train(load_recipe(out / "recipe.yaml"), out, resume=True, progress=False)  # finished: left alone


def test_layer_scale_does_not_wipe_trained_weights(of_parent: Callable[..., Recipe], tmp_path: Path) -> None:
    with pytest.raises(RecastError, match="would wipe the trained LayerScale"):
        train(of_parent(regularization=RegularizationConfig(layer_scale=1e-4)), tmp_path / "run", progress=False)


def photographs(root: Path) -> DataConfig:
    for name in "ab":
        (root / name).mkdir(parents=True)
        for number in range(12):
            Image.new("RGB", (16, 16), (20 * number, 90, 90 if name == "a" else 200)).save(
                root / name / f"{number}.png"
            )
    return DataConfig("folder", data_dir=str(root), img_size=16, batch_size=4, val_fraction=0.25)


def test_an_unreadable_image_is_skipped_named_and_counted(tmp_path: Path) -> None:
    config = replace(photographs(tmp_path / "data"), bad_image="skip", batch_size=6)
    for path in load_data(config).train.paths[:2]:  # type: ignore[attr-defined]
        Path(path).write_bytes(b"no image")
    recipe = one_epoch(data=config, where=["none"], augment=AugmentConfig(crop="none", flip=False))
    with pytest.warns(UserWarning, match=r"\.png cannot be read: another image took its place"):
        out = train(recipe, tmp_path / "run", progress=False)
    row = json.loads((out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert row["bad_images"] == 2
    assert math.isfinite(row["train_loss"])
    with pytest.raises(RecastError, match=r"cannot read image .*\.png"):
        train(replace(recipe, data=replace(config, bad_image="stop")), tmp_path / "stops", progress=False)


def test_a_batch_that_the_data_cannot_fill(tmp_path: Path) -> None:
    config = replace(photographs(tmp_path / "data"), batch_size=500)
    with pytest.raises(RecastError, match="a batch of 500 is larger than the training set of 18 images"):
        train(one_epoch(data=config, where=["none"]), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_validation_has_its_own_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(photographs(tmp_path / "data"), test_size=24)
    sizes: dict[str, set[int]] = {"train": set(), "val": set()}

    def watched(model: nn.Module, data: Data, *args: Any) -> tuple[float, float]:
        sizes["val"] |= {image.shape[-1] for image, _ in (data.val[i] for i in range(len(data.val)))}
        sizes["train"] |= {data.train[0][0].shape[-1]}
        return measure(model, data, *args)

    monkeypatch.setattr(fit_module, "measure", watched)
    train(one_epoch(data=config, where=["none"]), tmp_path / "run", progress=False)
    assert sizes == {"train": {16}, "val": {24}}


def test_unreadable_images_do_not_stop_the_comparison_with_the_parent(tmp_path: Path, weights: Path) -> None:
    config = replace(photographs(tmp_path / "data"), bad_image="skip", batch_size=6)
    found = load_data(config)
    for part in (found.train, found.val):
        Path(part.paths[0]).write_bytes(b"no image")  # type: ignore[attr-defined]
    model = ModelConfig("digits_resnet", str(weights), new_head=True)
    recipe = digits_recipe(data=config, model=model, epochs=1, control=False, recalibrate_bn=12)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        out = train(recipe, tmp_path / "run", progress=False)
    assert any("it is left out of the validation" in str(warning.message) for warning in told)
    row = json.loads((out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert (row["bad_images"], row["bad_val_images"]) == (1, 1)


def test_a_mistake_found_late_leaves_the_folder_free(of_parent: Callable[..., Recipe], tmp_path: Path) -> None:
    impossible = of_parent(grad_checkpointing=True)
    with pytest.raises(RecastError, match="leave grad_checkpointing out"):
        train(impossible, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
    train(replace(impossible, grad_checkpointing=False, epochs=0), tmp_path / "run", progress=False)


def test_a_size_taken_from_the_network_is_no_difference_when_a_run_goes_on(tmp_path: Path) -> None:
    recipe = one_epoch(model=ModelConfig("test_vit", input_size=32), where=["none"], epochs=0)
    recipe = replace(recipe, data=replace(recipe.data, img_size=None))
    out = train(recipe, tmp_path / "run", progress=False)
    assert load_recipe(out / "recipe.yaml").data.img_size == 32
    train(recipe, out, resume=True, progress=False)


def test_second_order_optimisers_are_refused(
    parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    with pytest.raises(RecastError, match="adahessian needs second derivatives"):
        fit(parent, data, make_recipe({"opt": "adahessian"}), tmp_path, progress=False)


def test_a_parent_with_a_new_head_teaches_nothing(tmp_path: Path, weights: Path) -> None:
    config = photographs(tmp_path / "data")
    model = ModelConfig("digits_resnet", str(weights), new_head=True)
    with pytest.raises(RecastError, match="the parent's classifier is a new one"):
        train(one_epoch(data=config, model=model, distill=DistillConfig("parent")), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_the_same_command_goes_on_where_the_run_houses_its_parent(tmp_path: Path, weights: Path) -> None:
    recipe = one_epoch(
        data=photographs(tmp_path / "data"), model=ModelConfig("digits_resnet", str(weights), new_head=True), epochs=0
    )
    train(recipe, tmp_path / "run", progress=False)
    train(recipe, tmp_path / "run", resume=True, progress=False)


def test_a_run_s_files_have_the_rights_of_the_user_s_others(of_parent: Callable[..., Recipe], tmp_path: Path) -> None:
    out = train(of_parent(epochs=0, control=False), tmp_path / "run", progress=False)
    (tmp_path / "plain").touch()
    rights = {path.stat().st_mode for path in (tmp_path / "plain", *out.rglob("*.*")) if path.is_file()}
    assert len(rights) == 1


def test_a_warm_up_that_takes_most_of_the_run_is_noted(
    parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(parent, data, make_recipe({"warmup_epochs": 2.0}), tmp_path, progress=True)
    assert "the warm-up takes 10 of 15 updates" in capsys.readouterr().err
