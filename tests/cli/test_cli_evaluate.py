import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from torchvision.models import mobilenet_v3_small

import recast
from recast.lab.cli import evaluate
from recast.lab.evaluation import frontier
from recast.lab.folder.records import FrontierLine
from recast.lab.folder.tables import read_records
from recast.lab.open import open_run
from recast.surgery.scales import recalibrate_batch_norm_

DIGITS = ("--data", "digits", "--img-size", "16", "--num-images", "100")


@pytest.mark.filterwarnings("always:.*in another order")
def test_two_saved_networks_are_compared_on_the_same_images(
    cli: Callable[..., Any], refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    how = {"name": "timm:digits_resnet", "kwargs": {"num_classes": 10}}
    torch.manual_seed(0)
    recast.save(timm.create_model("digits_resnet", num_classes=10), tmp_path / "a.safetensors", how)
    foreign = {"name": "torchvision.models:mobilenet_v3_small", "kwargs": {"num_classes": 10}}
    recast.save(mobilenet_v3_small(num_classes=10), tmp_path / "own.safetensors", foreign)
    same = cli("evaluate", "a.safetensors", "a.safetensors", *DIGITS)
    assert (same.code, same.err) == (0, "")
    assert "+0.00" in same.out
    assert "parent" not in same.out
    agreement = cli("evaluate", "a.safetensors", "a.safetensors", *DIGITS, "--suite", "agreement")
    assert (agreement.out, "suite agreement" in agreement.err) == ("", True)
    words = ("evaluate", "a.safetensors", "own.safetensors", *DIGITS)
    assert "--trust" in refused(*words)
    done = cli(*words, "--trust", "--suite", "clean,fgsm", "--json")
    assert "own.safetensors states no normalisation" in done.err
    assert "a.safetensors states" not in done.err
    rows = {(row["model"], row["suite"], row["metric"]): row for row in json.loads(done.out)}
    assert rows["recast", "clean", "top1"]["n"] == 100
    assert ("finetuned", "fgsm", "top1@1") in rows
    reordered, digits = recast.load("a.safetensors"), [str(number) for number in reversed(range(10))]
    with torch.no_grad():
        for parameter in reordered.fc.parameters():
            parameter.copy_(parameter.flip(0))
    recast.save(reordered, tmp_path / "b.safetensors", how, classes=digits)
    done = cli("evaluate", "a.safetensors", "b.safetensors", *DIGITS)
    assert done.err.count("b.safetensors has the classes of digits in another order") == 1
    assert "+0.00" in done.out
    assert "two files of recast.save, got a.safetensors\n" in refused("evaluate", "a.safetensors", *DIGITS)
    recast.save(recast.load("a.safetensors"), "other.safetensors", how, classes=[*map(str, range(1, 10)), "zebra"])
    how["kwargs"] = {"num_classes": 3}
    recast.save(timm.create_model("digits_resnet", num_classes=3), "three.safetensors", how)
    for other, message in (
        ("other", "other.safetensors has the classes 1, 2, 3, 4, 5 and 5 more, the data 0, 1, 2, 3, 4"),
        ("three", "three.safetensors must give logits (1, 10) for digits, got (1, 3)"),
    ):
        assert message in refused("evaluate", "a.safetensors", f"{other}.safetensors", *DIGITS)


def test_the_images_of_two_files_are_named(cli: Callable[..., Any], tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / "photos" / str(number % 2)).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (30 * number,) * 3).save(tmp_path / "photos" / str(number % 2) / f"{number}.png")
    saved = tmp_path / "a.safetensors"
    how = {"name": "timm:digits_resnet", "kwargs": {"num_classes": 2}}
    recast.save(timm.create_model("digits_resnet", num_classes=2), saved, how)
    done = cli("evaluate", saved, saved, "--data-dir", tmp_path / "photos", "--img-size", "16")
    assert done.out.startswith("photos: 2 validation images, held out of 8 images\n")


def test_no_difference_is_a_negative_zero() -> None:
    assert evaluate._difference(50.0, 50.001, True, (-0.01, 3.0)) == "+0.00 (+0.0, +3.0)"


def test_the_folded_network_computes_the_same(cli: Callable[..., Any], shared: Path, tmp_path: Path) -> None:
    saved = tmp_path / "folded.safetensors"
    result = json.loads(cli("fold", shared / "run", "--out", saved, "--json").out)
    assert (result["file"], len(result["layers"])) == (str(saved), 2)
    assert 0 < result["open"] <= result["heads"] == 2
    assert f"{saved} keeps {result['open']} of 2 open heads" in cli("fold", shared / "run", "--out", saved).out
    images = torch.rand(4, 3, 16, 16)
    with torch.no_grad():
        expected = open_run(shared / "run").models["recast"].eval()(images)
        assert recast.load(saved)(images).sub(expected).abs().max() < 1e-4


def test_the_curve_and_a_point_of_it(
    cli: Callable[..., Any], refused: Callable[..., str], shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, small in {"SECONDS": 0.0, "BATCH": 2, "CHOSEN_ON": 16}.items():
        monkeypatch.setattr(frontier, name, small)
    run = shutil.copytree(shared / "run", tmp_path / "run")
    assert "measure it with recast fold" in refused("fold", run, "--heads", "3")
    done = cli("fold", run, "--frontier")
    assert done.code == 0, done.err
    lines = read_records(run / "analysis" / "frontier.csv", FrontierLine)
    path = [line for line in lines if line.model == "recast"]
    total = path[0].heads
    assert [line.heads for line in path] == list(range(total, -1, -1))
    assert {line.model for line in lines} == {"parent", "finetuned", "recast"}
    assert all(line.ms > 0 and 0 <= line.top1 <= 100 for line in lines)
    assert done.out.count("\n") == len(lines) + 2

    opened = open_run(run)

    def top1(model: torch.nn.Module) -> float:
        images, labels = opened.data.val.batch(range(20))
        with torch.no_grad():
            right = model((images - 0.5) / 0.5).argmax(1) == labels  # digits: mean and std 0.5
        return 100 * float(right.double().mean())

    for heads in (total, 1):
        summary = json.loads(cli("fold", run, "--heads", heads, "--json").out)
        assert (summary["heads"], summary["open"]) == (total, heads)
        assert top1(recast.load(summary["file"])) == pytest.approx(path[total - heads].top1)
    # BatchNorm's statistics are those of the same images in every network
    tuned = opened.models["finetuned"].eval()
    images, _ = frontier.training_images(opened.data, 16, torch.device("cpu"))
    recalibrate_batch_norm_(tuned, [images])
    (line,) = (line for line in lines if line.model == "finetuned")
    assert top1(tuned) == pytest.approx(line.top1)
    assert f"heads must be between 0 and {total} " in refused("fold", run, "--heads", "99")


def test_what_cannot_be_folded(
    refused: Callable[..., str], cli: Callable[..., Any], shared: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "small.safetensors"
    assert cli("fold", shared / "run", "--tol", "100", "--out", saved).out.count("a convolution") == 2
    assert "has no layer with gates" in refused("fold", saved)
    assert "require a run folder" in refused("fold", shared / "run" / "weights.safetensors", "--heads", "1")
    assert "require a run folder" in refused("fold", saved, "--frontier")
    assert "choose one" in refused("fold", shared / "run", "--tol", "1", "--frontier")
    assert "is the input" in refused("fold", saved, "--out", saved)
    theirs = Path(shutil.copy(shared / "weights.safetensors", tmp_path / "theirs.safetensors"))
    assert "exists and was not written by recast fold" in refused("fold", shared / "run", "--out", theirs)
    assert theirs.read_bytes() == (shared / "weights.safetensors").read_bytes()
    assert cli("fold", shared / "run", "--tol", "100", "--out", saved).code == 0  # its own is replaced
    assert "does not exist" in refused("fold", saved, "--out", tmp_path / "nowhere" / "x.safetensors")
