"""`recast evaluate A B`: saved networks of one's own loop on the same images."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import recast
from recast.lab.cli import evaluate

DIGITS = ("--data", "digits", "--img-size", "16", "--num-images", "100")


@pytest.mark.filterwarnings("always:.*in another order")
def test_two_saved_networks_are_compared_on_the_same_images(
    cli: Callable[..., Any], refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    how = {"name": "timm:digits_resnet", "kwargs": {"num_classes": 10}}
    torch.manual_seed(0)
    recast.save(timm.create_model("digits_resnet", num_classes=10), tmp_path / "a.safetensors", how)
    network = "nn.Sequential(nn.Conv2d(3, 10, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())"
    (tmp_path / "mine.py").write_text(f"from torch import nn\ndef build():\n    return {network}\n")
    monkeypatch.syspath_prepend(tmp_path)
    import mine  # type: ignore[import-not-found]

    recast.save(mine.build(), tmp_path / "own.safetensors", {"name": "mine:build"})
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
    assert "two files of recast.save" in refused("evaluate", "a.safetensors", *DIGITS)


def test_no_difference_is_a_negative_zero() -> None:
    assert evaluate._difference(50.0, 50.001, True, (-0.01, 3.0)) == "+0.00 (+0.0, +3.0)"
