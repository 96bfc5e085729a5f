import json
import math
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from small import assert_same, changed_names, digits_recipe

from recast import PoolConfig, RecastConfig, RecastError, load, save
from recast.lab.config import (
    AugmentConfig,
    ClassifyConfig,
    DataConfig,
    OptimConfig,
    RegularizationConfig,
    ScheduleConfig,
)
from recast.lab.config.text import load_recipe
from recast.lab.data import load_data
from recast.lab.evaluation.run_folder import evaluate_run
from recast.lab.folder.records import Wakefulness
from recast.lab.folder.run import RunFolder
from recast.lab.open import open_run
from recast.lab.training import prepare
from recast.lab.training import run as run_module
from recast.lab.training.distributed import Interrupted
from recast.lab.training.metrics import read_metrics, validate
from recast.lab.training.run import train
from recast.layers.cmhsa import gated_layers
from recast.models.build import build, input_defaults
from recast.models.config import ModelConfig

pytest.importorskip("sklearn")

CtrlC = Callable[[str, int], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "digits"
    train(digits_recipe(where=["none"], epochs=8), out / "parent", progress=False)
    recipe = digits_recipe(model=trained(out))
    assert train(recipe, out, progress=False, command="recast train x") == out
    return out


def trained(run: Path, **fields: Any) -> ModelConfig:
    return ModelConfig("digits_resnet", str(run / "parent" / "weights.safetensors"), **fields)


def quick(out: Path, **fields: Any) -> Path:
    return train(digits_recipe(**{"epochs": 1, "control": False, **fields}), out, progress=False)


def resume(out: Path) -> Path:
    return train(load_recipe(out / "recipe.yaml"), out, resume=True, progress=False)


def content(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def snapshot(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def test_the_recast_network_starts_as_its_parent_and_both_arms_train(run: Path) -> None:
    verified = content(run, "verify.json")
    assert (verified["bitwise"], verified["images"], verified["max_relative_error"]) == (True, 30, 0.0)
    recast, control = (read_metrics(folder / "metrics.jsonl") for folder in (run, run / "finetuned"))
    assert [row["epoch"] for row in recast] == [row["epoch"] for row in control] == [0, 1, 2]
    assert recast[0]["val_loss"] == control[0]["val_loss"]
    assert len({recast[0]["val_loss"], recast[2]["val_loss"], control[2]["val_loss"]}) == 3
    steps = content(run, "plan.json")["steps"]
    assert list(recast[1]["layers"]) == [step["name"] for step in steps] == list(verified["layers"])
    assert all(row["layers"] == {} for row in control)


def test_the_recipe_is_complete_and_replays_from_anywhere(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = shutil.copytree(run, tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("moved/recipe.yaml")
    assert (recipe.model.num_classes, recipe.data.mean) == (10, (0.5, 0.5, 0.5))  # the network's normalisation
    assert recipe.model.checkpoint == str(moved / "parent" / "weights.safetensors")
    first, *_, last = read_metrics(moved / "metrics.jsonl")
    for model, row in ((build(recipe.model), first), (load(moved / "weights.safetensors"), last)):
        loss = validate(model, load_data(recipe.data), recipe.data, torch.device("cpu"))[0]
        assert loss == pytest.approx(row["val_loss"], rel=1e-6)
    assert not hasattr(load(moved / "finetuned" / "weights.safetensors"), "recast_plan")
    train(recipe, tmp_path / "again", progress=False)
    for arm in (".", "finetuned"):
        assert_same(run / arm, tmp_path / "again" / arm)


def test_queries_and_keys_from_the_images_start_awake_and_exact(run: Path, tmp_path: Path) -> None:
    out = quick(tmp_path / "woken", epochs=2, model=trained(run), recast=RecastConfig(query_key="images"))
    assert content(out, "verify.json")["bitwise"]
    first, *_, last = read_metrics(out / "metrics.jsonl")
    before = Wakefulness.of(first["layers"])
    assert before is not None
    assert before.entropy < 0.95
    shares = [share for layer in last["layers"].values() for share in layer["attention_share"]]
    assert before.awake == 0 < max(share for share in shares if share is not None)


def test_a_run_that_recasts_nothing(run: Path, tmp_path: Path) -> None:
    out = quick(tmp_path / "run", model=trained(run), where=["none"], control=True)
    assert not (out / "plan.json").exists()
    assert not (out / "finetuned").exists()
    assert list(open_run(out).models) == ["finetuned"]
    rows = evaluate_run(out, ["clean"], progress=False).rows
    expected = read_metrics(out / "metrics.jsonl")[-1]["val_top1"]
    assert next(row.value for row in rows if row.metric == "top1") == pytest.approx(expected)
    resume(out)  # finished: left alone


def test_the_stride_goes_and_no_attention_comes(run: Path, tmp_path: Path) -> None:
    """The control of the papers: the parent's own weights and shapes, on a map with four times as many positions."""
    fields = {
        "model": trained(run),
        "recast": RecastConfig("linear", stride="remove"),
        "schedule": ScheduleConfig("never"),
    }
    out = quick(tmp_path / "run", **fields, optim=OptimConfig(lr=0.0, min_lr=0.0))
    child, parent = load(out / "weights.safetensors"), load(run / "parent" / "weights.safetensors")
    assert not gated_layers(child)
    assert all("running" in name or "tracked" in name for name in changed_names(child, parent))
    large, small = (network.forward_features(torch.randn(2, 3, 8, 8)).shape[-1] for network in (child, parent))
    assert large == 2 * small
    assert evaluate_run(out, ["clean"], progress=False).rows
    with pytest.raises(RecastError, match=r"schedule\.kind never requires recast\.stride"):
        quick(tmp_path / "no", model=trained(run), schedule=ScheduleConfig("never"))


def test_a_kept_classifier_that_guesses_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = load_file(run / "parent" / "weights.safetensors")
    guesses = {name: value * (not name.startswith("fc.")) for name, value in weights.items()}
    save_file(guesses, tmp_path / "guesses.safetensors")
    for new_head in (False, True):
        model = ModelConfig("digits_resnet", checkpoint=str(tmp_path / "guesses.safetensors"), new_head=new_head)
        train(digits_recipe(model=model, where=["none"], epochs=0, control=False), tmp_path / f"run{new_head}")
        assert ("10.0 % by guessing" in capsys.readouterr().err) is not new_head
    monkeypatch.setattr("recast.lab.training.loop.is_at_chance", lambda *_: True)
    train(digits_recipe(model=model, where=["none"], epochs=0, control=False), tmp_path / "unlucky")
    assert "by guessing" not in capsys.readouterr().err


def test_a_recast_network_goes_on_with_a_new_classifier(run: Path, tmp_path: Path) -> None:
    saved, weights = run / "weights.safetensors", tmp_path / "run" / "weights.safetensors"
    frozen = {"where": ["none"], "regularization": RegularizationConfig(freeze="all_but_attention")}
    quick(tmp_path / "run", model=ModelConfig("digits_resnet", checkpoint=str(saved), new_head=True), **frozen)
    layers = gated_layers(load(weights))
    assert list(layers) == list(gated_layers(load(saved)))
    changed = changed_names(saved, weights)
    assert {"fc.weight", *(f"{name}.gamma" for name in layers)} <= changed
    assert all(name.startswith(("fc.", *(f"{layer}." for layer in layers))) for name in changed)
    with pytest.raises(RecastError, match="digits_resnet has no attention; take freeze=trunk"):
        quick(tmp_path / "no", **frozen)


def test_the_attention_of_a_recast_parent_is_kept_when_only_its_pooling_is_new(run: Path, tmp_path: Path) -> None:
    parent = ModelConfig("digits_resnet", checkpoint=str(run / "weights.safetensors"))
    fields = {"where": ["none"], "recast": RecastConfig(query_key="images"), "pool": PoolConfig("single")}
    out = quick(tmp_path / "pooled", model=parent, epochs=0, **fields)
    assert content(out, "verify.json")["max_relative_error"] < 1e-5


def test_a_checkpoint_in_another_order_of_classes_is_reordered_and_other_classes_are_refused(
    run: Path, tmp_path: Path
) -> None:
    parent = load(run / "parent" / "weights.safetensors")
    with torch.no_grad():
        for parameter in parent.fc.parameters():
            parameter.copy_(parameter.flip(0))
    digits = list(map(str, range(10)))
    save(parent, flipped := tmp_path / "flipped.safetensors", classes=digits[::-1])
    save(parent, no_digits := tmp_path / "no_digits.safetensors", classes=[f"no {digit}" for digit in digits])
    message = "the classes of digits in another order"
    with pytest.warns(UserWarning, match=message):
        out = quick(tmp_path / "run", model=ModelConfig("digits_resnet", str(flipped)), epochs=0)
    expected = read_metrics(run / "metrics.jsonl")[0]["val_loss"]
    assert read_metrics(out / "metrics.jsonl")[0]["val_loss"] == pytest.approx(expected, rel=1e-5)
    with pytest.warns(UserWarning, match=message):
        models = open_run(out).models
    assert not changed_names(models["parent"], run / "parent" / "weights.safetensors")
    foreign = ModelConfig("digits_resnet", str(no_digits))
    with pytest.raises(RecastError, match=r"the classes no 0, .*: set model\.new_head"):
        quick(tmp_path / "no", model=foreign)
    quick(tmp_path / "new", model=foreign.replace(new_head=True), where=["none"], epochs=0)


def test_a_run_folder_in_use_is_refused_and_left_as_it_is(run: Path) -> None:
    before = snapshot(run)
    with pytest.raises(RecastError, match="--resume"):
        train(digits_recipe(), run)
    assert snapshot(run) == before
    resume(run)  # finished: left alone
    changed = {path.name for path, state in snapshot(run).items() if state != before[path]}
    assert changed <= {"recipe.yaml", "classes.json", "environment.json"}


def test_mistakes_leave_no_folder(run: Path, tmp_path: Path) -> None:
    weights = load_file(run / "parent" / "weights.safetensors")
    weights["fc.weight"], weights["fc.bias"] = torch.zeros(5, 64), torch.zeros(5)
    save_file(weights, five := tmp_path / "five.safetensors")
    mistakes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"where": ["layer9.*"]}, "layer9"),
        ({"max_tokens": 1}, "max_tokens"),
        ({"model": ModelConfig("digits_resnett")}, "digits_resnet"),
        ({"model": ModelConfig("digits_resnet", num_classes=7)}, r"logits \(1, 10\)"),
        ({"data": DataConfig("digit")}, "digits"),
        ({"data": DataConfig("digits", num_train=20, batch_size=500)}, "larger than the training set of 20 images"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"optim": OptimConfig(opt="adamm")}, "adam"),
        ({"model": ModelConfig("digits_resnet", checkpoint=str(five))}, "5 classes"),
        ({"model": ModelConfig("digits_resnet", checkpoint=str(run / "weights.safetensors"))}, "--where none"),
        ({"model": trained(run), "papers": {"deit": {"layer_scale": 1e-4}}}, "overwrites the trained LayerScale"),
        ({"model": trained(run), "papers": {"deit": {"init_std": 0.02}}}, "init_std overwrites the trained weights"),
        ({"model": trained(run, new_head=True), "task": ClassifyConfig(teacher="parent")}, "a new, untrained class"),
    )
    for fields, message in mistakes:
        with pytest.raises(RecastError, match=message):
            quick(tmp_path / "run", **fields)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("channels", "count"), [(1, "1 channel"), (4, "4 channels")])
def test_a_network_of_other_channels_is_refused(channels: int, count: str) -> None:
    data = load_data(DataConfig("digits", img_size=8))
    with pytest.raises(RecastError, match=f"of {count}, but image 0 is read with 3: set model.in_chans={channels}"):
        prepare._outputs(torch.nn.Conv2d(channels, 10, 3), data, "net")


def test_a_run_that_failed_before_its_first_state_leaves_nothing_and_a_killed_one_goes_on(
    run: Path, tmp_path: Path
) -> None:
    out, fields = tmp_path / "run", {"model": trained(run, new_head=True), "epochs": 0}
    for error, has_folder in ((RecastError, False), (SystemExit, True)):
        with mock.patch.object(run_module, "fit", side_effect=error), pytest.raises(error):
            quick(out, **fields)
        assert out.exists() == has_folder
    (out / ".recipe.yaml.123.tmp").touch()
    (out / "metrics.jsonl").write_text('{"epoch": 0}\n', encoding="utf-8")
    with pytest.raises(RecastError, match="--resume"):
        quick(out, **fields)
    resume(out)
    assert not any(path.name.startswith(".") for path in out.iterdir())
    recipe = load_recipe(out / "recipe.yaml")
    assert recipe.model.checkpoint == str(out / "parent.safetensors")
    load(out / "weights.safetensors")
    train(recipe, tmp_path / "again")  # whose parent is known to be untrained, too
    again = RunFolder(tmp_path / "again")
    assert again.has_new_parent(again.recipe().model)
    with pytest.raises(RecastError, match="a new, untrained class"):
        train(recipe.replace(task=ClassifyConfig(teacher="parent")), tmp_path / "taught")


@pytest.mark.parametrize("name", ["classes.json", "recipe.yaml", "metrics.jsonl"])
def test_a_user_s_files_are_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine", encoding="utf-8")
    before = snapshot(tmp_path)
    with pytest.raises(RecastError, match=r"not empty|exists"):
        quick(tmp_path)
    assert snapshot(tmp_path) == before


def test_a_link_out_of_the_run_is_refused(run: Path, tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "run", tmp_path / "mine"
    for folder in (out, elsewhere):
        folder.mkdir()
    (out / "resume").symlink_to(elsewhere)
    shutil.copy(run / "recipe.yaml", out)
    with pytest.raises(RecastError, match="resume is a link"):
        resume(out)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("calls", [4, 10])  # 6 steps an arm: in the recast arm, and in the other
def test_an_interrupted_run_goes_on_where_it_stopped(ctrl_c: CtrlC, run: Path, tmp_path: Path, calls: int) -> None:
    out, recipe = tmp_path / "run", load_recipe(run / "recipe.yaml")
    with ctrl_c("update", calls), pytest.raises(Interrupted, match=f"saved; continue with: .* --resume {out}"):
        train(recipe, out, progress=False)
    seconds = content(out, "environment.json")["seconds"]
    resume(out)
    for arm in (".", "finetuned"):
        assert_same(run / arm, out / arm)
    assert content(out, "environment.json")["seconds"] > seconds > 0


def test_a_refused_resume_writes_nothing(ctrl_c: CtrlC, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with ctrl_c("update", 4), pytest.raises(Interrupted):
        quick(out, model=trained(run), epochs=2)
    (_, newest) = RunFolder(out).saved_states()
    torch.save(torch.load(newest, weights_only=True) | {"model": {"x": torch.zeros(1)}}, newest)
    classes = (out / "classes.json").read_text(encoding="utf-8")
    for text, message in (
        (classes, "state of a different model"),
        (classes.replace('"0"', '"0!"'), "trained on 10 classes, digits lacks 0! and adds 0"),
    ):
        (out / "classes.json").write_text(text, encoding="utf-8")
        before = snapshot(out)
        with pytest.raises(RecastError, match=message):
            resume(out)
        assert snapshot(out) == before


def test_what_the_folder_filled_in_is_no_difference_when_a_run_goes_on(run: Path, tmp_path: Path) -> None:
    sized = digits_recipe(model=ModelConfig("test_vit", input_size=32), where=["none"], epochs=0)
    sized = sized.replace(data=sized.data.replace(img_size=None))
    of_files = digits_recipe(data=photographs(tmp_path / "data"), model=trained(run, new_head=True), epochs=0)
    for name, recipe in (("sized", sized), ("of_files", of_files)):
        for goes_on in (False, True):
            train(recipe, tmp_path / name, resume=goes_on, progress=False)
    assert load_recipe(tmp_path / "sized" / "recipe.yaml").data.img_size == 32
    (tmp_path / "data" / "a").rename(tmp_path / "data" / "c")
    with pytest.raises(RecastError, match=r"the data .*: continue with the data"):
        train(of_files, tmp_path / "of_files", resume=True, progress=False)


def test_the_parent_teaches_its_child_and_the_control(run: Path, tmp_path: Path) -> None:
    alone = quick(tmp_path / "alone", model=trained(run), control=True)
    taught = quick(tmp_path / "taught", model=trained(run), control=True, task=ClassifyConfig(teacher="parent"))
    for arm in ("", "finetuned"):
        assert changed_names(alone / arm / "weights.safetensors", taught / arm / "weights.safetensors")
    # if all of the loss is the teacher's, the exact start has nothing to learn except augmentation
    only = ClassifyConfig(teacher={"kind": "parent", "teacher_weight": 1.0})
    frozen = RegularizationConfig(freeze="batch_norm")
    out = quick(tmp_path / "only", model=trained(run), task=only, regularization=frozen)
    assert read_metrics(out / "metrics.jsonl")[-1]["train_loss"] < 1e-2


def test_batch_norm_is_measured_again_after_the_recast(run: Path, tmp_path: Path) -> None:
    fields = {"model": trained(run), "recast": RecastConfig(gate="sigmoid"), "epochs": 0}
    runs = [quick(tmp_path / str(count), schedule={"recalibrate_bn": count}, **fields) for count in (0, 60)]
    assert (changed := changed_names(*(folder / "weights.safetensors" for folder in runs)))
    assert all("running" in name for name in changed)


def photographs(root: Path) -> DataConfig:
    for name, blue in (("a", 90), ("b", 200)):
        (root / name).mkdir(parents=True)
        for number in range(12):
            Image.new("RGB", (16, 16), (20 * number, 90, blue)).save(root / name / f"{number}.png")
    return DataConfig("folder", data_dir=str(root), img_size=16, batch_size=6, val_fraction=0.25)


@pytest.mark.parametrize("states_size", [False, True])
def test_files_are_seen_at_the_size_and_norm_that_the_network_states(
    states_size: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not states_size:
        monkeypatch.setattr("recast.lab.data.sources.input_defaults", lambda network: None)
    config = photographs(tmp_path / "data").replace(img_size=None)
    prepared = prepare.prepare(digits_recipe(data=config), RunFolder(tmp_path / "run"), False)
    side = input_defaults(prepared.parent).size[0] if states_size else 16
    assert (side == 16) != states_size
    data = prepared.data
    assert [prepared.recipe.data.img_size, data.train[0][0].shape[-1], data.test_size] == [side] * 3
    assert data.train.augment == load_data(config.replace(img_size=side), digits_recipe().augmentation).train.augment
    stated, unstated = ("(the network's; the files have 16;", "(the network's)"), ("(the files' own", "ImageNet's")
    assert all(line in prepared.pixels for line in (stated if states_size else unstated))


def test_unreadable_images_are_skipped_named_and_counted(run: Path, tmp_path: Path) -> None:
    config = photographs(tmp_path / "data").replace(bad_image="skip")
    data = load_data(config)
    for name in (data.train.image_name(0), data.train.image_name(1), data.val.image_name(0)):
        Path(name).write_bytes(b"no image")
    fields = {"model": trained(run, new_head=True), "augment": AugmentConfig(crop="none", flip=False)}
    with pytest.warns(UserWarning, match="cannot be read: ") as warned:
        out = quick(tmp_path / "run", data=config, schedule={"recalibrate_bn": 12}, **fields)
    messages = " ".join(str(warning.message) for warning in warned)
    assert "replaced by another image" in messages
    assert "skipped in validation" in messages
    row = read_metrics(out / "metrics.jsonl")[-1]
    assert (row["bad_images"], row["bad_val_images"]) == (2, 1)
    assert math.isfinite(row["train_loss"])
    with pytest.raises(RecastError, match=r"cannot read image .*\.png"):
        quick(tmp_path / "stops", data=config.replace(bad_image="stop"), **fields)
