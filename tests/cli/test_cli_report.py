"""`recast report --compare`: saved networks of one's own loop on the same images."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import recast

Cli = Callable[..., Any]
DIGITS = ("--data", "digits", "--img-size", "16")


def test_two_saved_networks_are_compared_on_the_same_images(
    cli: Cli, refused: Callable[..., str], shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    how = {"name": "timm:digits_resnet", "kwargs": {"num_classes": 10}}
    for name, seed in (("a", 0), ("b", 1)):
        torch.manual_seed(seed)
        recast.save(timm.create_model("digits_resnet", num_classes=10), tmp_path / f"{name}.safetensors", how)
    done = cli("report", "--compare", "a.safetensors", "a.safetensors", *DIGITS)
    assert done.code == 0, done.err
    assert done.out.startswith(
        "a.safetensors is not shown to differ from a.safetensors (95 % interval 0.0 to 0.0, 500 images)."
    )
    found = json.loads(cli("report", "--compare", "a.safetensors", "b.safetensors", *DIGITS, "--json").out)
    page = Path(found["report"]).read_text(encoding="utf-8")
    assert found["verdict"].split(" (")[0] in page
    assert page.count("<tr>") == 5  # heads, top-1, top-5, loss, calibration
    assert "takes two or three files" in refused("report", "--compare", "a.safetensors", *DIGITS)
    assert "--data-dir requires --compare" in refused("report", shared / "run", "--data-dir", "x")
    Path("mine.html").write_text("mine", encoding="utf-8")
    assert "mine.html" in refused(
        "report", "--compare", "a.safetensors", "b.safetensors", *DIGITS, "--out", "mine.html"
    )


def test_a_network_that_states_no_normalisation_gets_that_of_the_data(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    network = "nn.Sequential(nn.Conv2d(3, 10, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())"
    (tmp_path / "mine.py").write_text(f"from torch import nn\ndef build():\n    return {network}\n")
    monkeypatch.syspath_prepend(tmp_path)
    import mine  # type: ignore[import-not-found]

    recast.save(mine.build(), tmp_path / "own.safetensors", {"name": "mine:build"})
    how = {"name": "timm:digits_resnet", "kwargs": {"num_classes": 10}}
    recast.save(timm.create_model("digits_resnet", num_classes=10), tmp_path / "a.safetensors", how)
    done = cli("report", "--compare", "a.safetensors", "own.safetensors", *DIGITS, "--trust")
    assert done.code == 0, done.err
    assert "own.safetensors states no normalisation" in done.err
    assert "a.safetensors states" not in done.err
