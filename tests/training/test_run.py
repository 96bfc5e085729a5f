"""A whole run on a few digits: the files, both arms, what is refused, what is resumed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import digits_recipe
from torchvision.transforms.v2.functional import normalize

from recast.data import load_data
from recast.errors import RecastError
from recast.io import load
from recast.models.build import build
from recast.run.config import DataConfig, ModelConfig, OptimConfig, RecastConfig
from recast.run.recipe import load_recipe
from recast.surgery.apply import applied_plan
from recast.training import run as run_module
from recast.training.distributed import Interrupted
from recast.training.metrics import measure, read_metrics
from recast.training.run import train

pytest.importorskip("sklearn")

CPU = torch.device("cpu")
CtrlC = Callable[[str, int], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with both arms and its parent inside."""
    out = tmp_path_factory.mktemp("runs") / "digits"
    train(digits_recipe(where=["none"]), out / "parent", progress=False)
    weights = out / "parent" / "weights.safetensors"
    recipe = digits_recipe(model=ModelConfig("digits_resnet", checkpoint=str(weights)))
    assert train(recipe, out, progress=False, command="recast train x") == out
    return out


def test_a_run_has_every_file(run: Path) -> None:
    files = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    arm = {"metrics.jsonl", "weights.safetensors"}
    arm |= {f"resume/state-{epoch:05d}-00000000.pt" for epoch in (2, 3)}
    own = {"recipe.yaml", "environment.json", "classes.json", "plan.json", "verify.json"}
    parent = {f"parent/{name}" for name in arm | {"recipe.yaml", "environment.json", "classes.json"}}
    assert files == arm | own | {f"finetuned/{name}" for name in arm} | parent


def test_the_recast_network_starts_as_its_parent_and_both_arms_train(run: Path) -> None:
    verified = json.loads((run / "verify.json").read_text(encoding="utf-8"))
    assert verified["bitwise"]
    assert (verified["images"], verified["argmax_agreement"], verified["max_relative_error"]) == (30, 1.0, 0.0)
    recast, control = (read_metrics(folder / "metrics.jsonl") for folder in (run, run / "finetuned"))
    assert len(recast) == len(control) == 3
    assert recast[0]["val_loss"] == control[0]["val_loss"]
    assert recast[2]["val_loss"] != recast[0]["val_loss"]
    assert control[2]["val_loss"] != recast[2]["val_loss"]
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
    assert data.mean == (0.5, 0.5, 0.5)
    first, last = (read_metrics(moved / "metrics.jsonl")[i] for i in (0, -1))
    assert measure(build(recipe.model), data, recipe, CPU)[0] == pytest.approx(first["val_loss"], rel=1e-6)
    trained = load(moved / "weights.safetensors")
    assert measure(trained, data, recipe, CPU)[0] == pytest.approx(last["val_loss"], rel=1e-6)
    finetuned = load(moved / "finetuned" / "weights.safetensors")
    assert not hasattr(finetuned, "recast_plan")
    train(recipe, tmp_path / "again", progress=False)
    for arm in ("", "finetuned"):
        one, other = (load_file(folder / arm / "weights.safetensors") for folder in (run, tmp_path / "again"))
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_environment_says_what_ran(run: Path) -> None:
    found = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    assert found.keys() == {
        "recast", "torch", "timm", "python", "platform", "device", "processes", "cpu_count", "date", "command",
        "seconds",
    }  # fmt: skip
    assert found["command"] == "recast train x"
    assert found["torch"] == torch.__version__
    assert found["seconds"] > 0


def test_a_run_folder_in_use_is_refused_and_left_as_it_is(run: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with pytest.raises(RecastError, match=r"exists: choose another one with --out.*--resume"):
        train(digits_recipe(), run)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    (tmp_path / "thesis.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(RecastError, match=r"not empty \(thesis.txt\)"):
        train(digits_recipe(), tmp_path)
    with pytest.raises(RecastError, match="is a file"):
        train(digits_recipe(), tmp_path / "thesis.txt")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"where": ["layer9.*"]}, "layer9"),
        ({"budget": "tokens=1"}, "budget"),
        ({"model": ModelConfig("digits_resnett")}, "digits_resnet"),
        ({"model": ModelConfig("digits_resnet", num_classes=7)}, r"logits of shape \(1, 10\)"),
        ({"data": DataConfig("digit")}, "digits"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"optim": OptimConfig(opt="adamm")}, "adam"),
    ],
)
def test_mistakes_are_found_before_the_folder_is_made(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RecastError, match=message):
        train(digits_recipe(**fields), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_random_parent_is_kept_in_the_run(tmp_path: Path) -> None:
    train(digits_recipe(epochs=0, control=False), tmp_path / "run", progress=False)
    recipe = load_recipe(tmp_path / "run" / "recipe.yaml")
    assert recipe.model.checkpoint == str(tmp_path / "run" / "parent.safetensors")
    parent, child = build(recipe.model), load(tmp_path / "run" / "weights.safetensors")
    assert torch.equal(parent.layer3[0].conv1.weight, child.layer3[0].conv1.weight)
    assert not (tmp_path / "run" / "finetuned").exists()


@pytest.mark.parametrize("calls", [4, 10])  # 6 steps an arm: in the recast arm, and in the other
def test_an_interrupted_run_goes_on_where_it_stopped(ctrl_c: CtrlC, run: Path, tmp_path: Path, calls: int) -> None:
    out, recipe = tmp_path / "run", load_recipe(run / "recipe.yaml")
    with (
        ctrl_c("update", calls),
        pytest.raises(Interrupted, match=f"saved; continue with: recast train --resume {out}"),
    ):
        train(recipe, out, progress=False)
    seconds = json.loads((out / "environment.json").read_text(encoding="utf-8"))["seconds"]
    assert seconds > 0
    train(load_recipe(out / "recipe.yaml"), out, resume=True, progress=False)
    for arm in ("", "finetuned"):
        one, other = (load_file(folder / arm / "weights.safetensors") for folder in (run, out))
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert json.loads((out / "environment.json").read_text(encoding="utf-8"))["seconds"] > seconds


def test_a_run_that_stopped_before_training_starts_again(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(load_recipe(run / "recipe.yaml"), control=False, epochs=1)

    def pressed(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run_module, "verify", pressed)
        with pytest.raises(Interrupted):
            train(recipe, tmp_path / "run", progress=False)
    train(recipe, tmp_path / "run", resume=True, progress=False)
    assert (tmp_path / "run" / "verify.json").exists()
    assert (tmp_path / "run" / "weights.safetensors").exists()


def test_a_finished_run_is_left_alone(run: Path) -> None:
    weights = {path: path.stat().st_mtime_ns for path in run.rglob("*.safetensors")}
    metrics = (run / "metrics.jsonl").read_bytes()
    train(load_recipe(run / "recipe.yaml"), run, resume=True, progress=False)
    assert {path: path.stat().st_mtime_ns for path in weights} == weights
    assert (run / "metrics.jsonl").read_bytes() == metrics


def test_resume_refuses_another_recipe_and_a_folder_without_a_run(run: Path, tmp_path: Path) -> None:
    other = load_recipe(run / "recipe.yaml")
    other.optim.lr, other.seed = 0.5, 9
    with pytest.raises(RecastError, match=r"another optim\.lr \(0.001, now 0.5\), seed \(0, now 9\)"):
        train(other, run, resume=True)
    with pytest.raises(RecastError, match="no run to resume"):
        train(digits_recipe(), tmp_path, resume=True)


def test_a_calibrated_run_resumes_with_the_biases_it_was_given(ctrl_c: CtrlC, run: Path, tmp_path: Path) -> None:
    recipe = load_recipe(run / "recipe.yaml")
    recipe = replace(recipe, recast=RecastConfig(gate="sigmoid"), calibrate=30, epochs=1, control=False)
    straight, out = train(recipe, tmp_path / "straight", progress=False), tmp_path / "run"
    steps = json.loads((straight / "plan.json").read_text(encoding="utf-8"))["steps"]
    assert all(step["bias_added"] for step in steps)
    with ctrl_c("update", 2), pytest.raises(Interrupted):
        train(recipe, out, progress=False)
    train(recipe, out, resume=True, progress=False)
    one, other = (load_file(folder / "weights.safetensors") for folder in (straight, out))
    assert all(torch.equal(one[name], other[name]) for name in one)
    child = load(out / "weights.safetensors")
    assert all(child.get_submodule(step.name).bias is not None for step in applied_plan(child).steps)


def test_calibration_uses_as_many_plain_training_images_as_asked(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(load_recipe(run / "recipe.yaml"), recast=RecastConfig(gate="sigmoid"), calibrate=30, epochs=0)
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(run_module, "calibrate_", lambda _child, _parent, batches: seen.extend(batches))
    train(replace(recipe, control=False), tmp_path / "run", progress=False)
    assert [len(batch) for batch in seen] == [20, 10]
    data = load_data(recipe.data)
    known = normalize(data.train.plain().batch(range(60))[0], list(data.mean), list(data.std))
    assert all(any(torch.equal(image, one) for one in known) for image in torch.cat(seen))


def test_a_checkpoint_with_another_head_is_refused(run: Path, tmp_path: Path) -> None:
    weights = load_file(run / "parent" / "weights.safetensors")
    weights["fc.weight"], weights["fc.bias"] = torch.zeros(5, 64), torch.zeros(5)
    save_file(weights, tmp_path / "five.safetensors")
    with pytest.raises(RecastError, match="5 classes"):
        train(
            digits_recipe(model=ModelConfig("digits_resnet", checkpoint=str(tmp_path / "five.safetensors"))),
            tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()
