"""`recast fold`: a run's network in its smallest form."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import recast
from recast.lab.evaluation.run_folder import open_run


def test_the_folded_network_computes_the_same(cli: Callable[..., Any], shared: Path, tmp_path: Path) -> None:
    saved = tmp_path / "folded.safetensors"
    result = json.loads(cli("fold", shared / "run", "--out", saved, "--json").out)
    assert (result["file"], len(result["layers"])) == (str(saved), 4)
    assert 0 < result["open"] <= result["heads"] == 36
    images = torch.rand(4, 3, 16, 16)
    with torch.no_grad():
        expected = open_run(shared / "run").models["recast"].eval()(images)
        assert recast.load(saved)(images).sub(expected).abs().max() < 1e-4
    assert cli("check", saved).code == 0


def test_what_cannot_be_folded(
    refused: Callable[..., str], cli: Callable[..., Any], shared: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "small.safetensors"
    assert cli("fold", shared / "run", "--tol", "100", "--out", saved).out.count("a convolution") == 4
    assert "has no GPSA layer" in refused("fold", saved)
    assert "is what is folded" in refused("fold", saved, "--out", saved)
    theirs = tmp_path / "theirs.safetensors"
    shutil.copyfile(shared / "weights.safetensors", theirs)
    assert "exists and is no file of recast fold" in refused("fold", shared / "run", "--out", theirs)
    assert theirs.read_bytes() == (shared / "weights.safetensors").read_bytes()
    assert cli("fold", shared / "run", "--tol", "100", "--out", saved).code == 0  # its own is replaced
    assert "does not exist" in refused("fold", saved, "--out", tmp_path / "nowhere" / "x.safetensors")
