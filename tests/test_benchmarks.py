"""`benchmarks/gpu` keeps the rows that passed, and `benchmarks/peers.py` and `resume.py` are rehearsed on the CPU."""

import csv
import importlib
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recast.layers.cmhsa import gated_layers

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
rows = SimpleNamespace(**runpy.run_path(str(BENCHMARKS / "gpu" / "part.py")))


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_rows_that_passed_are_kept_and_others_measured_again(tmp_path: Path) -> None:
    path, calls, recovered = tmp_path / "rows.csv", [], []
    healthy = False

    def fragile() -> Any:
        calls.append("a")
        if not healthy:
            raise ValueError("no\nluck")
        return [rows.row("arm", "error", 0.5, 1)]

    def unsteady() -> Any:
        calls.append("b")
        return [rows.row("arm", "error", 1.0 if healthy else math.nan, 1), rows.row("arm", "seconds", 3)]

    def steady() -> Any:
        calls.append("c")
        return [rows.row("arm", "error", 1e-9, 1e-8)]

    units = [("a", fragile), ("b", unsteady), ("c", steady)]
    assert rows.carry_out(path, units, 100, lambda: recovered.append(1)) == 1
    assert [(row["unit"], row["state"]) for row in read(path)] == [
        ("a", "failed"),
        ("b", "failed"),
        ("b", "passed"),
        ("c", "passed"),
    ]
    assert read(path)[0]["note"] == "ValueError: no luck"
    assert recovered == [1]
    healthy = True
    assert rows.carry_out(path, units, -1, lambda: None) == rows.UNFINISHED
    assert [row["unit"] for row in read(path)] == ["c"]
    calls.clear()
    assert rows.carry_out(path, units, 100, lambda: None) == 0
    assert calls == ["a", "b"]
    assert {row["unit"] for row in read(path) if row["state"] == "passed"} == {"a", "b", "c"}


@pytest.mark.slow
def test_the_peers_are_measured_beside_their_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    peers = importlib.import_module("peers")
    arms = ("resnet26t", "recast", "recast, folded", "non-local")
    models = {arm: build() for arm, build in peers.arms_of("resnet26t", 64).items() if arm in arms}
    monkeypatch.setattr(peers, "arms_of", lambda *_: {arm: lambda arm=arm: models[arm] for arm in models})
    monkeypatch.setattr(peers, "SIZE", 64)
    monkeypatch.setattr(peers, "RESULT", tmp_path / "peers.csv")
    monkeypatch.setattr(sys, "argv", ["peers", "--family", "resnet26t", "--batch", "2", "--rounds", "2"])
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    peers.main()
    table = {(row["pass"], row["arm"]): row for row in read(tmp_path / "peers.csv")}
    assert set(table) == {(kind, arm) for kind in ("inference", "training step") for arm in arms}
    (parent, *_) = peers.measure({"resnet26t": models["resnet26t"]}, torch.zeros(1, 3, 64, 64), True, 2, "default")
    assert parent["pass"] == "training step, compiled"
    assert parent["gmacs"] == float(table["training step", "resnet26t"]["gmacs"])
    gates = [layer.gates()["gamma"].item() for layer in gated_layers(models["recast"]).values()]
    assert gates == pytest.approx([0.2, 0.2], rel=1e-3)
    for kind in ("inference", "training step"):
        gmacs = [float(table[kind, arm]["gmacs"]) for arm in arms]
        assert gmacs[0] == gmacs[2] < min(gmacs[1], gmacs[3])
        assert float(table[kind, "resnet26t"]["relative_speed"]) == 1
        assert all(float(table[kind, arm]["peak_mib"]) > 1 for arm in arms)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_killed_runs_end_with_the_same_bits(tmp_path: Path) -> None:
    words = ("--kills", "2", "--out", str(tmp_path / "resume.csv"))
    done = subprocess.run([sys.executable, str(BENCHMARKS / "resume.py"), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = read(tmp_path / "resume.csv")
    assert (row["kills"], row["bitwise_equal"], row["left_over"]) == ("2", "True", "0")


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("kind", [torch.nn.Conv2d, torch.nn.ConvTranspose2d])
def test_training_takes_three_times_the_products_also_of_groups(
    kind: Any, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    macs = importlib.import_module("timing").macs
    layer, x = kind(8, 16, 3, 2, 1, groups=groups), torch.randn(2, 8, 9, 9, requires_grad=True)
    assert macs(layer, x, training=True) == 3 * macs(layer, x, training=False)
