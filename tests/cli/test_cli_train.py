import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import recast.lab.training.run as training
from recast.lab.cli import main, quickstart
from recast.lab.cli.train import _arms
from recast.lab.config import Recipe
from recast.lab.config.text import load_recipe
from recast.lab.folder.run import RunFolder
from recast.lab.training.metrics import read_metrics

Cli = Callable[..., Any]
Refused = Callable[..., str]


def test_a_recipe_is_a_name_or_a_file(shared: Path, cli: Cli, tmp_path: Path) -> None:
    before, after = ("--epochs", "0", "--no-control", "--json"), ("--where", "layer3.1.conv1")
    for number, words in enumerate(((shared / "tiny.yaml", *before, *after), (*before, shared / "tiny.yaml", *after))):
        out = tmp_path / str(number)
        done = cli("train", *words, "--out", out)
        assert done.code == 0
        summary = json.loads(done.out)
        assert (summary["run"], summary["last_epoch"]["recast"]["epoch"]) == (str(out), 0)
        recipe = load_recipe(out / "recipe.yaml")
        assert (recipe.epochs, recipe.control, recipe.data.num_train) == (0, False, 40)
        assert recipe.model.checkpoint == str((shared / "weights.safetensors").resolve())
        assert recipe.where == ["layer3.1.conv1"]


TRAINED = """
import timm

def trained(num_classes):
    return timm.create_model('digits_resnet', num_classes=num_classes)

def backwards(num_classes):
    names = [str(digit) for digit in reversed(range(num_classes))]
    return timm.create_model('digits_resnet', num_classes=num_classes, pretrained_cfg_overlay={"label_names": names})
"""


def test_the_weights_that_a_function_returns_are_not_called_random(
    cli: Cli, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trained_elsewhere.py").write_text(TRAINED, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    words = "--model trained_elsewhere:trained --trust --epochs 0 --no-control --where layer3.1.conv1".split()
    assert "--new-head requires --checkpoint or --pretrained" in refused("train", "digits", *words, "--new-head")
    own = ("train", "folder", "--data", "digits", *words)
    assert "does not take --pretrained: give its weights with --checkpoint FILE, or --no-pretrained" in refused(*own)
    assert cli(*own, "--no-pretrained", "--out", "own").code == 0  # whose recipe has a new classifier
    done = cli("train", "digits", *words, "--teacher", "parent", "--out", "run")
    assert done.code == 0, done.err
    assert "note: the parent has the weights that trained_elsewhere:trained returns" in done.err
    assert "random" not in done.err
    run = RunFolder(tmp_path / "run")
    assert not run.has_new_parent(run.recipe().model)
    assert run.returned_weights.is_file()
    for name, options in (("kept", "--no-new-head"), ("new", "--new-head")):
        done = cli("train", "digits", *words, "--checkpoint", str(run.returned_weights), options, "--out", name)
        assert done.code == 0, done.err
        again = RunFolder(tmp_path / name)
        assert again.has_new_parent(again.recipe().model) is (name == "new")
    words[1] = "trained_elsewhere:backwards"
    assert "its outputs are reordered" in cli("train", "digits", *words, "--out", "backwards").err


def test_the_results_of_the_arms_are_aligned(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recast.lab.folder.run.RunFolder.has_new_parent", lambda *_: True)
    lines = _arms(shared / "run").splitlines()
    assert lines[0].startswith("Parent before training: Top-1 ")
    assert len(lines) == 3
    assert {line.index("Top-1") for line in lines} == {24}


PRESSED = """
import os, signal, sys
from recast.lab.cli import main
from recast.lab.training.metrics import Journal
write = Journal.write
def pressed(journal, row):
    write(journal, row)
    if row.epoch == 1:
        for _ in range(6):
            os.kill(os.getpid(), signal.SIGINT)
Journal.write = pressed
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_interrupted_and_resumed(shared: Path, tmp_path: Path) -> None:
    out = tmp_path / "my run"
    words = ["train", str(shared / "tiny.yaml"), "--epochs", "3", "--no-control", "--out", str(out)]
    done = subprocess.run([sys.executable, "-c", PRESSED, *words], capture_output=True, encoding="utf-8")
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    command = done.stderr.splitlines()[-1].removeprefix(
        "recast train: interrupted: state saved; continue with: recast "
    )
    assert shlex.split(command) == ["train", "--resume", str(out)]
    assert not (out / "weights.safetensors").exists()
    assert main([*shlex.split(command), "--json"]) == 0
    assert (out / "weights.safetensors").is_file()
    assert [row["epoch"] for row in read_metrics(out / "metrics.jsonl")] == [0, 1, 2, 3]


def test_json_is_all_there_is_on_standard_output(shared: Path, cli: Cli) -> None:
    done = cli("evaluate", shared / "run", "--num-images", "20", "--suite", "clean,fgsm", "--eps", "0", "--json")
    rows = {(row["model"], row["suite"], row["metric"]): row["value"] for row in json.loads(done.out)}
    assert done.code == 0
    assert done.err == ""
    assert {model for model, _, _ in rows} == {"parent", "finetuned", "recast"}
    for model in ("parent", "finetuned", "recast"):
        assert rows[model, "fgsm", "top1@0"] == rows[model, "clean", "top1"]
    assert Path(json.loads(cli("report", shared / "run", "--json").out)["report"]).is_file()


def test_evaluate_refuses_what_is_not_finished_or_not_there(
    shared: Path, cli: Cli, refused: Refused, tmp_path: Path
) -> None:
    run = shutil.copytree(shared / "run", tmp_path / "run")
    (run / "finetuned" / "weights.safetensors").unlink()
    assert "without this control" in cli("evaluate", run, "--suite", "clean").err
    (run / "weights.safetensors").unlink()
    assert f"recast train --resume {run}" in refused("evaluate", run)


def test_the_quickstart_goes_on_after_every_phase(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, fit = training.train, mock.Mock(wraps=training.fit)

    def train_smaller(recipe: Recipe, *args: Any, **kwargs: Any) -> Path:
        data = recipe.data.replace(img_size=16, num_train=40, num_val=20, batch_size=20)
        return train(recipe.replace(data=data, epochs=1, device="cpu"), *args, **kwargs)

    monkeypatch.setattr(training, "train", train_smaller)
    monkeypatch.setattr(training, "fit", fit)
    monkeypatch.setattr(quickstart, "SUITES", ("clean",))
    out = tmp_path / "run"
    words = ("quickstart", "--out", out, "--seed", "3")
    fit.side_effect = [KeyboardInterrupt]
    first = cli(*words)
    assert (first.code, "run the same command again" in first.err.splitlines()[-1]) == (130, True)
    fit.side_effect = [mock.DEFAULT, mock.DEFAULT, KeyboardInterrupt]  # in the control arm
    assert cli(*words).code == 130
    assert (out / "weights.safetensors").is_file()
    assert cli("quickstart", "--out", out).code == 2  # of another seed
    fit.side_effect = None
    done = cli(*words, "--json")
    assert done.code == 0
    assert "continuing the interrupted quickstart" in done.err
    assert cli(*words).code == 2  # it is finished
    summary = json.loads(done.out)
    assert Path(summary["report"]).is_file()
    assert {row["model"] for row in summary["rows"]} == {"parent", "finetuned", "recast"}
    assert "5/5  report" in done.err
    assert all("seed: 3" in path.read_text(encoding="utf-8") for path in out.rglob("recipe.yaml"))


def test_the_quickstart_is_refused_before_anything_is_done(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    assert "is a file" in refused("quickstart", "--out", tmp_path / "file")
    assert "exists: delete it" in refused("quickstart", "--out", tmp_path)
    monkeypatch.setattr(quickstart, "find_spec", lambda name: None if name == "matplotlib" else object())
    assert "requires matplotlib: pip install matplotlib" in refused("quickstart", "--out", tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
