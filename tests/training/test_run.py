"""A whole run on a few digits: the files, both arms, what is refused, what is resumed."""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from small import assert_same, digits_recipe

from recast.errors import RecastError
from recast.io import load
from recast.lab.analysis.records import Wakefulness
from recast.lab.config import (
    AugmentConfig,
    ClassifyConfig,
    DataConfig,
    OptimConfig,
    RegularizationConfig,
    ScheduleConfig,
)
from recast.lab.data import load_data
from recast.lab.evaluation.run_folder import evaluate_run, open_run
from recast.lab.recipe import load_recipe
from recast.lab.training import prepare
from recast.lab.training import run as run_module
from recast.lab.training.checkpoint import states
from recast.lab.training.distributed import Interrupted
from recast.lab.training.metrics import read_metrics, validate
from recast.lab.training.run import train
from recast.layers.config import RecastConfig
from recast.layers.gpsa import gpsa_layers
from recast.models.build import build
from recast.models.config import ModelConfig
from recast.surgery.plan import applied_plan

pytest.importorskip("sklearn")

CPU = torch.device("cpu")
CtrlC = Callable[[str, int], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with both arms, and its parent inside, which knows some digits."""
    out = tmp_path_factory.mktemp("runs") / "digits"
    train(digits_recipe(where=["none"], epochs=8), out / "parent", progress=False)
    recipe = digits_recipe(model=trained(out))
    assert train(recipe, out, progress=False, command="recast train x") == out
    return out


def trained(run: Path, **fields: Any) -> ModelConfig:
    return ModelConfig("digits_resnet", str(run / "parent" / "weights.safetensors"), **fields)


def quick(out: Path, **fields: Any) -> Path:
    """One epoch of the recast arm alone, unless told otherwise."""
    return train(digits_recipe(**{"epochs": 1, "control": False, **fields}), out, progress=False)


def last_row(out: Path) -> dict[str, Any]:
    return read_metrics(out / "metrics.jsonl")[-1]


# --- what a run is ----------------------------------------------------------------------------------------------------


def test_a_run_has_every_file(run: Path) -> None:
    files = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    arm = {"metrics.jsonl", "weights.safetensors"} | {f"resume/state-0000{epoch}-00000000.pt" for epoch in (2, 3)}
    own = {"recipe.yaml", "environment.json", "classes.json", "data.json", "plan.json", "verify.json"}
    assert {name for name in files if not name.startswith("parent/")} == arm | own | {f"finetuned/{n}" for n in arm}
    found = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    assert found.keys() == {
        "recast", "torch", "timm", "python", "platform", "device", "processes", "cpu_count", "threads", "date",
        "command", "seconds",
    }  # fmt: skip
    assert (found["command"], found["torch"]) == ("recast train x", torch.__version__)
    assert found["seconds"] > 0


def test_the_recast_network_starts_as_its_parent_and_both_arms_train(run: Path) -> None:
    verified = json.loads((run / "verify.json").read_text(encoding="utf-8"))
    assert verified["bitwise"]
    assert (verified["images"], verified["argmax_agreement"], verified["max_relative_error"]) == (30, 1.0, 0.0)
    recast, control = (read_metrics(folder / "metrics.jsonl") for folder in (run, run / "finetuned"))
    assert len(recast) == len(control) == 3
    assert recast[0]["val_loss"] == control[0]["val_loss"]
    assert len({recast[0]["val_loss"], recast[2]["val_loss"], control[2]["val_loss"]}) == 3
    steps = json.loads((run / "plan.json").read_text(encoding="utf-8"))["steps"]
    assert list(recast[1]["layers"]) == [step["name"] for step in steps] == list(verified["layers"])
    assert all(row["layers"] == {} for row in control)


def test_the_recipe_is_complete_and_replays_from_anywhere(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("moved/recipe.yaml")
    assert recipe.model.num_classes == 10
    assert recipe.model.checkpoint == str(moved / "parent" / "weights.safetensors")
    assert recipe.data.mean == (0.5, 0.5, 0.5)  # the network's own, not that of the digits
    data = load_data(recipe.data)
    first, last = (read_metrics(moved / "metrics.jsonl")[i] for i in (0, -1))
    for model, row in ((build(recipe.model), first), (load(moved / "weights.safetensors"), last)):
        assert validate(model, data, recipe, CPU)[0] == pytest.approx(row["val_loss"], rel=1e-6)
    assert not hasattr(load(moved / "finetuned" / "weights.safetensors"), "recast_plan")
    train(recipe, tmp_path / "again", progress=False)
    for arm in (".", "finetuned"):
        assert_same(run / arm, tmp_path / "again" / arm)


def test_queries_and_keys_from_the_images_start_awake_and_exact(run: Path, tmp_path: Path) -> None:
    told: list[str] = []
    recipe = digits_recipe(
        epochs=2, control=False, model=trained(run), recast=RecastConfig(query_key="images"), optim=OptimConfig(lr=1e-3)
    )
    train(recipe, tmp_path / "woken", progress=False, say=told.append)
    assert "queries and keys from the images: entropy of the content maps" in told[1]
    assert json.loads((tmp_path / "woken" / "verify.json").read_text(encoding="utf-8"))["bitwise"]
    first, *_, last = read_metrics(tmp_path / "woken" / "metrics.jsonl")
    before, after = (Wakefulness.of(row["layers"]) for row in (first, last))
    assert before is not None
    assert after is not None
    assert before.entropy < 0.95
    shares = [share for layer in last["layers"].values() for share in layer["attention_share"]]
    assert before.awake == 0 < max(share for share in shares if share is not None)


def test_a_random_parent_is_kept_in_the_run_and_its_files_have_the_user_s_rights(tmp_path: Path) -> None:
    out = quick(tmp_path / "run", epochs=0)
    recipe = load_recipe(out / "recipe.yaml")
    assert recipe.model.checkpoint == str(out / "parent.safetensors")
    parent, child = build(recipe.model), load(out / "weights.safetensors")
    assert torch.equal(parent.layer3[0].conv1.weight, child.layer3[0].conv1.weight)
    assert not (out / "finetuned").exists()
    (tmp_path / "plain").touch()
    rights = {path.stat().st_mode for path in (tmp_path / "plain", *out.rglob("*.*")) if path.is_file()}
    assert len(rights) == 1


def test_a_run_that_recasts_nothing(run: Path, tmp_path: Path) -> None:
    out = quick(tmp_path / "run", model=trained(run), where=["none"], control=True)
    assert not (out / "plan.json").exists()
    assert not (out / "finetuned").exists()
    assert list(open_run(out).models) == ["finetuned"]
    rows = evaluate_run(out, ["clean"], progress=False).rows
    assert next(row.value for row in rows if row.metric == "top1") == pytest.approx(last_row(out)["val_top1"])
    train(load_recipe(out / "recipe.yaml"), out, resume=True, progress=False)  # finished: left alone


def test_the_stride_goes_and_no_attention_comes(run: Path, tmp_path: Path) -> None:
    """The control of the papers: the parent's own weights and shapes, on a map with four times as many positions."""
    fields = {"model": trained(run), "recast": RecastConfig(stride="remove"), "schedule": ScheduleConfig("never")}
    out = quick(tmp_path / "run", **fields, optim=OptimConfig(lr=0.0, min_lr=0.0))
    child, parent = load(out / "weights.safetensors"), load(run / "parent" / "weights.safetensors")
    assert not gpsa_layers(child)
    one, other = child.state_dict(), parent.state_dict()
    changed = {name for name in one if not torch.equal(one[name], other[name])}
    assert all("running" in name or "tracked" in name for name in changed)
    x = torch.randn(2, 3, 8, 8)
    sizes = [tuple(network.forward_features(x).shape[2:]) for network in (child, parent)]
    assert sizes[0] == (2 * sizes[1][0], 2 * sizes[1][1])
    assert evaluate_run(out, ["clean"], progress=False).rows
    with pytest.raises(RecastError, match=r"schedule\.kind never requires recast\.stride"):
        quick(tmp_path / "no", model=trained(run), schedule=ScheduleConfig("never"))


def test_a_recast_network_goes_on_with_a_new_classifier(run: Path, tmp_path: Path) -> None:
    """Its attention and its trunk are what they were, its classifier is new, and only what may train does."""
    saved = run / "weights.safetensors"
    parent = ModelConfig("digits_resnet", checkpoint=str(saved), new_head=True)
    frozen = RegularizationConfig(freeze="all_but_attention")
    data = DataConfig("digits", img_size=8, batch_size=20, num_train=40, num_val=20)
    recipe = digits_recipe(model=parent, where=["none"], epochs=1, data=data)
    train(recipe.replace(regularization=frozen), tmp_path / "run", progress=False)
    before, after = load_file(saved), load_file(tmp_path / "run" / "weights.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    layers = gpsa_layers(load(tmp_path / "run" / "weights.safetensors"))
    assert list(layers) == list(gpsa_layers(load(saved)))
    assert {"fc.weight", *(f"{name}.gamma" for name in layers)} <= changed
    assert all(name.startswith(("fc.", *(f"{layer}." for layer in layers))) for name in changed)
    with pytest.raises(RecastError, match="digits_resnet has no attention; take freeze=trunk"):
        quick(tmp_path / "no", where=["none"], regularization=frozen)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_run_folder_in_use_is_refused_and_left_as_it_is(run: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with pytest.raises(RecastError, match="--resume"):
        train(digits_recipe(), run)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    train(load_recipe(run / "recipe.yaml"), run, resume=True, progress=False)  # finished: left alone
    changed = {path.name for path in before if path.is_file() and path.stat().st_mtime_ns != before[path]}
    assert changed <= {"recipe.yaml", "classes.json", "environment.json"}
    (tmp_path / "thesis.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(RecastError, match=r"not empty \(thesis.txt\)"):
        train(digits_recipe(), tmp_path)


def test_mistakes_leave_no_folder(run: Path, tmp_path: Path) -> None:
    weights = load_file(run / "parent" / "weights.safetensors")
    weights["fc.weight"], weights["fc.bias"] = torch.zeros(5, 64), torch.zeros(5)
    save_file(weights, five := tmp_path / "five.safetensors")
    scaled, drawn = {"deit": {"layer_scale": 1e-4}}, {"deit": {"init_std": 0.02}}
    mistakes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"where": ["layer9.*"]}, "layer9"),
        ({"budget": "tokens=1"}, "budget"),
        ({"model": ModelConfig("digits_resnett")}, "digits_resnet"),
        ({"model": ModelConfig("digits_resnet", num_classes=7)}, r"logits \(1, 10\)"),
        ({"data": DataConfig("digit")}, "digits"),
        ({"data": DataConfig("digits", num_train=20, batch_size=500)}, "larger than the training set of 20 images"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"optim": OptimConfig(opt="adamm")}, "adam"),
        ({"model": ModelConfig("digits_resnet", checkpoint=str(five))}, "5 classes"),
        ({"model": trained(run), "papers": scaled}, "would wipe the trained LayerScale"),
        ({"model": trained(run), "papers": drawn}, "init_std would wipe the trained weights"),
        ({"model": trained(run, new_head=True), "task": ClassifyConfig(teacher="parent")}, "classifier is a new one"),
    )
    for fields, message in mistakes:
        with pytest.raises(RecastError, match=message):
            quick(tmp_path / "run", **fields)
    assert not (tmp_path / "run").exists()


def test_a_run_that_failed_before_its_first_state_leaves_nothing_and_a_killed_one_goes_on(
    run: Path, tmp_path: Path
) -> None:
    out, fields = tmp_path / "run", {"model": trained(run, new_head=True), "epochs": 0}
    for error, left in ((RecastError, False), (SystemExit, True)):
        with mock.patch.object(run_module, "fit", side_effect=error), pytest.raises(error):
            quick(out, **fields)
        assert out.exists() == left
    (out / ".recipe.yaml.123.tmp").touch()
    (out / "metrics.jsonl").write_text('{"epoch": 0}\n', encoding="utf-8")
    with pytest.raises(RecastError, match="--resume"):
        quick(out, **fields)
    train(load_recipe(out / "recipe.yaml"), out, resume=True, progress=False)
    assert not any(path.name.startswith(".") for path in out.iterdir())
    assert load_recipe(out / "recipe.yaml").model.checkpoint == str(out / "parent.safetensors")
    load(out / "weights.safetensors")


@pytest.mark.parametrize("name", ["classes.json", "recipe.yaml", "metrics.jsonl", "checkpoints/epoch-0000.safetensors"])
def test_a_user_s_files_are_left_alone(tmp_path: Path, name: str) -> None:
    (path := tmp_path / name).parent.mkdir(exist_ok=True)
    path.write_text("mine", encoding="utf-8")
    with pytest.raises(RecastError, match=r"not empty|exists"):
        quick(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [path]
    assert path.read_text(encoding="utf-8") == "mine"


def test_a_link_out_of_the_run_is_refused(run: Path, tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "run", tmp_path / "mine"
    out.mkdir()
    elsewhere.mkdir()
    (out / "resume").symlink_to(elsewhere)
    shutil.copy(run / "recipe.yaml", out)
    with pytest.raises(RecastError, match="resume is a link"):
        train(load_recipe(run / "recipe.yaml"), out, resume=True, progress=False)
    assert list(elsewhere.iterdir()) == []


# --- what is resumed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [4, 10])  # 6 steps an arm: in the recast arm, and in the other
def test_an_interrupted_run_goes_on_where_it_stopped(ctrl_c: CtrlC, run: Path, tmp_path: Path, calls: int) -> None:
    out, recipe = tmp_path / "run", load_recipe(run / "recipe.yaml")
    with ctrl_c("update", calls), pytest.raises(Interrupted, match=f"saved; continue with: .* --resume {out}"):
        train(recipe, out, progress=False)
    seconds = json.loads((out / "environment.json").read_text(encoding="utf-8"))["seconds"]
    train(load_recipe(out / "recipe.yaml"), out, resume=True, progress=False)
    for arm in (".", "finetuned"):
        assert_same(run / arm, out / arm)
    assert json.loads((out / "environment.json").read_text(encoding="utf-8"))["seconds"] > seconds > 0


def test_a_refused_resume_writes_nothing(ctrl_c: CtrlC, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with ctrl_c("update", 4), pytest.raises(Interrupted):
        quick(out, model=trained(run), epochs=2)
    (_, newest) = states(out)
    content = torch.load(newest, weights_only=True)
    torch.save(content | {"model": {"x": torch.zeros(1)}}, newest)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.rglob("*") if path.is_file()}
    recipe = load_recipe(out / "recipe.yaml")
    with pytest.raises(RecastError, match="state of another model"):
        train(recipe, out, resume=True, progress=False)
    (out / "classes.json").write_text(json.dumps([f"{n}!" for n in range(10)]), encoding="utf-8")
    with pytest.raises(RecastError, match="class 0 was '0!'"):
        train(recipe, out, resume=True, progress=False)
    (out / "classes.json").write_bytes(before[out / "classes.json"][1])
    os.utime(out / "classes.json", ns=(before[out / "classes.json"][0],) * 2)
    now = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.rglob("*") if path.is_file()}
    assert now == before


def test_what_the_folder_filled_in_is_no_difference_when_a_run_goes_on(run: Path, tmp_path: Path) -> None:
    sized = digits_recipe(model=ModelConfig("test_vit", input_size=32), where=["none"], epochs=0)
    sized = sized.replace(data=sized.data.replace(img_size=None))
    kept = digits_recipe(data=photographs(tmp_path / "data"), model=trained(run, new_head=True), epochs=0)
    for name, recipe in (("sized", sized), ("kept", kept)):
        for resume in (False, True):
            train(recipe, tmp_path / name, resume=resume, progress=False)
    assert load_recipe(tmp_path / "sized" / "recipe.yaml").data.img_size == 32


def test_a_calibrated_run_resumes_with_the_biases_it_was_given(ctrl_c: CtrlC, run: Path, tmp_path: Path) -> None:
    recipe = load_recipe(run / "recipe.yaml")
    calibrated = {"recast": RecastConfig(gate="sigmoid"), "schedule": {"calibrate": 30}}
    recipe = recipe.replace(**calibrated, epochs=1, control=False)
    straight, out = train(recipe, tmp_path / "straight", progress=False), tmp_path / "run"
    steps = json.loads((straight / "plan.json").read_text(encoding="utf-8"))["steps"]
    assert all(step["bias_added"] for step in steps)
    with ctrl_c("update", 2), pytest.raises(Interrupted):
        train(recipe, out, progress=False)
    train(recipe, out, resume=True, progress=False)
    assert_same(straight, out)
    child = load(out / "weights.safetensors")
    assert all(child.get_submodule(step.name).bias is not None for step in applied_plan(child).steps)


# --- what a recipe asks for -------------------------------------------------------------------------------------------


def test_the_parent_teaches_its_child_and_the_control(run: Path, tmp_path: Path) -> None:
    alone = quick(tmp_path / "alone", model=trained(run), control=True)
    taught = quick(tmp_path / "taught", model=trained(run), control=True, task=ClassifyConfig(teacher="parent"))
    for arm in ("", "finetuned"):
        one, other = (load_file(folder / arm / "weights.safetensors") for folder in (alone, taught))
        assert any(not torch.equal(value, other[name]) for name, value in one.items())
    # all of the loss the teacher's: the exact start has nothing to learn, up to augmentation and BatchNorm's batches
    only = ClassifyConfig(teacher={"kind": "parent", "teacher_weight": 1.0})
    frozen = RegularizationConfig(freeze="batch_norm")
    out = quick(tmp_path / "only", model=trained(run), task=only, regularization=frozen)
    assert last_row(out)["train_loss"] < 1e-2


def test_batch_norm_is_measured_again_after_the_recast(run: Path, tmp_path: Path) -> None:
    fields = {"model": trained(run), "recast": RecastConfig(gate="sigmoid"), "epochs": 0}
    runs = (quick(tmp_path / str(count), schedule={"recalibrate_bn": count}, **fields) for count in (0, 60))
    one, other = (load_file(folder / "weights.safetensors") for folder in runs)
    assert (changed := [name for name in one if not torch.equal(one[name], other[name])])
    assert all("running" in name for name in changed)


def photographs(root: Path) -> DataConfig:
    for name, blue in (("a", 90), ("b", 200)):
        (root / name).mkdir(parents=True)
        for number in range(12):
            Image.new("RGB", (16, 16), (20 * number, 90, blue)).save(root / name / f"{number}.png")
    return DataConfig("folder", data_dir=str(root), img_size=16, batch_size=6, val_fraction=0.25)


def test_size_and_norm_of_files_where_the_network_states_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "input_defaults", lambda network: None)
    data = photographs(tmp_path / "data").replace(img_size=None)
    prepared = prepare.prepare(digits_recipe(data=data), tmp_path / "run", False)
    assert (prepared.recipe.data.img_size, prepared.data.train[0][0].shape[-1], prepared.data.test_size) == (16, 16, 16)
    assert (
        prepared.data.train.augment == load_data(data.replace(img_size=16), digits_recipe().augmentation).train.augment
    )
    assert "16x16 pixels (the files' own" in prepared.pixels
    assert "ImageNet's" in prepared.pixels


def test_unreadable_images_are_skipped_named_and_counted(run: Path, tmp_path: Path) -> None:
    config = photographs(tmp_path / "data").replace(bad_image="skip")
    found = load_data(config)
    for name in (found.train.image_name(0), found.train.image_name(1), found.val.image_name(0)):
        Path(name).write_bytes(b"no image")
    fields = {"model": trained(run, new_head=True), "augment": AugmentConfig(crop="none", flip=False)}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        out = quick(tmp_path / "run", data=config, schedule={"recalibrate_bn": 12}, **fields)
    said = [str(warning.message) for warning in told]
    assert any("another image took its place" in text for text in said)
    assert any("it is left out of the validation" in text for text in said)
    row = last_row(out)
    assert (row["bad_images"], row["bad_val_images"]) == (2, 1)
    assert math.isfinite(row["train_loss"])
    with pytest.raises(RecastError, match=r"cannot read image .*\.png"):
        quick(tmp_path / "stops", data=config.replace(bad_image="stop"), **fields)
