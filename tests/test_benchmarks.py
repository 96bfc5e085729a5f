"""`benchmarks/gpu` and `benchmarks/peers.py` rehearsed on the CPU, with `studies/evidence`: rates, runs, tables."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_model
from torch import nn

import recast.papers.networks
from recast.layers.gpsa import gpsa_layers

assert recast.papers.networks  # registers cifar_resnet20
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", BENCHMARKS / "gpu" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


rows = load("rows")


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def make_data(root: Path) -> Path:
    """What a study looks for: CIFAR-10 as archives of PNG files, and a network with 100 classes."""
    (root / "cifar10").mkdir(parents=True)
    names = [f"class{i}" for i in range(10)]
    (root / "cifar10" / "classes.txt").write_text("\n".join(names))
    for part, count in (("train", 10), ("test", 4)):
        with zipfile.ZipFile(root / "cifar10" / f"{part}.zip", "w") as archive:
            for i, pixels in enumerate(torch.randint(0, 256, (10 * count, 32, 32, 3), dtype=torch.uint8).numpy()):
                file = io.BytesIO()
                Image.fromarray(pixels).save(file, "PNG")
                archive.writestr(f"{names[i % 10]}/{i // 10:05}.png", file.getvalue())
    (root / "weights").mkdir()
    network = timm.create_model("cifar_resnet20", num_classes=100)
    save_model(network, str(root / "weights" / "cifar100_resnet20_chenyaofo.safetensors"))
    return root


def call(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "RECAST_DATA"}
    environment |= {"OMP_NUM_THREADS": "1", "NUMBA_DISABLE_JIT": "1"}  # a compiler for one of the corruptions: 3 s
    command = [sys.executable, str(BENCHMARKS / "gpu"), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not os.environ.get("RECAST_SLOW"), reason="half a minute: RECAST_SLOW=1, as make sweeps does")
def test_the_gpu_benchmarks_on_a_cpu(tmp_path: Path) -> None:
    """A part that fails leaves the next alone; what is finished is not done again; studies give tables."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "exactness.csv").write_text("of,another,version\n")
    first = call("--out", out, "--toy")
    assert first.returncode == 1, first.stderr
    assert "exactness.csv has other columns" in first.stdout
    parts = json.loads((out / "parts.json").read_text())["parts"]
    assert {part: found["state"] for part, found in parts.items()} == {
        "exactness": "failed", "speed": "passed", "evidence": "skipped",
    }  # fmt: skip
    speed = read(out / "speed.csv")
    assert {row["unit"].split("/")[0] for row in speed} == {"layer", "memory", "chunks", "network"}
    over_conv = [float(row["value"]) for row in speed if row["quantity"] == "over_conv" and "3 open" in row["arm"]]
    assert len(over_conv) == 2
    assert all(value > 1 for value in over_conv)

    (out / "exactness.csv").unlink()
    second = call("--out", out, "--toy", "--data", make_data(tmp_path / "data"))
    assert second.returncode == 0, second.stdout + second.stderr
    assert read(out / "speed.csv") == speed
    exactness = read(out / "exactness.csv")
    assert {row["unit"].split("/")[0] for row in exactness} == {"layer", "closed", "random", "network"}
    closed = [row for row in exactness if row["unit"] == "closed/3x3/fp32" and row["quantity"] == "output"]
    assert [row["note"] for row in closed] == ["bitwise", "bitwise"]

    folder = out / "evidence" / "a-cifar100-cifar10-4000"
    for arm, tuned in (("fine-tuned", "lr"), ("recast,_zero", "gate_lr")):
        trials = [json.loads(file.read_text()) for file in folder.glob(f"{arm}-100-*/result.json")]
        assert len(trials) == len({tuple(trial["job"][name] for name in ("lr", "gate_lr")) for trial in trials}) == 3
        best = max(trial["held_out_top1"] for trial in trials)
        finals = [json.loads((folder / f"{arm}-{seed}" / "result.json").read_text()) for seed in range(2)]
        assert [final["job"]["seed"] for final in finals] == [0, 1]
        chosen = {trial["job"][tuned] for trial in trials if trial["held_out_top1"] == best}
        assert finals[0]["job"][tuned] == finals[1]["job"][tuned]
        assert finals[0]["job"][tuned] in chosen
    scores = read(out / "evidence.csv")
    arms = {"fine-tuned", "recast, zero", "recast, zero, folded"}
    assert {row["arm"] for row in scores} == arms
    assert {row["heads"] for row in scores} == {"", "54"}
    differences = read(out / "evidence_differences.csv")
    assert {row["arm"] for row in differences} == arms - {"fine-tuned"}
    assert {"clean", "noise", "pgd@1"} <= {row["metric"] for row in differences}
    for row in differences:
        of = [
            [float(s["value"]) for s in scores if (s["arm"], s["metric"]) == (arm, row["metric"])]
            for arm in (row["arm"], "fine-tuned")
        ]
        assert float(row["difference"]) == pytest.approx(sum(of[0]) / 2 - sum(of[1]) / 2, abs=2e-3)
    assert all(row["study"] == "a-cifar100-cifar10-4000" for row in scores)
    with zipfile.ZipFile(out / "evidence_runs" / "a-cifar100-cifar10-4000.zip") as archive:
        assert {Path(name).name for name in archive.namelist()} == {"result.json", "right.npz", "folded.npz"}

    third = call("--out", out, "--toy")
    assert third.returncode == 0
    assert third.stdout.count("from an earlier call") == 3

    left = [*out.glob("evidence*.csv"), *out.glob("evidence_runs/*.zip")]
    kept = [path.read_bytes() for path in left]
    shutil.rmtree(out / "evidence")  # the machine is gone, the tables and their runs are not
    (out / "parts.json").unlink()
    again = call("--out", out, "--toy", "--parts", "evidence", "--data", tmp_path / "data")
    assert again.returncode == 0, again.stdout + again.stderr
    assert not list((out / "evidence").rglob("*.safetensors"))
    assert kept == [path.read_bytes() for path in left]
    assert len(left) == 3


def test_rows_that_passed_are_kept_and_others_measured_again(tmp_path: Path) -> None:
    path, calls, recovered = tmp_path / "rows.csv", [], []
    healthy = False

    def fragile() -> list[dict[str, Any]]:
        calls.append("fragile")
        if not healthy:
            raise ValueError("no\nluck")
        return [rows.row("arm", "error", 0.5, 1)]

    def steady() -> list[dict[str, Any]]:
        calls.append("steady")
        return [rows.row("arm", "error", math.nan if not healthy else 1.0, 1), rows.row("arm", "seconds", 3)]

    def sound() -> list[dict[str, Any]]:
        calls.append("sound")
        return [rows.row("arm", "error", 1e-9, 1e-8)]

    units = [("a", fragile), ("b", steady), ("c", sound)]
    assert rows.carry_out(path, units, 100, lambda: recovered.append(1)) == 1
    assert [(row["unit"], row["state"]) for row in read(path)] == [
        ("a", "failed"), ("b", "failed"), ("b", "passed"), ("c", "passed"),
    ]  # fmt: skip
    assert read(path)[0]["note"] == "ValueError: no luck"
    assert recovered == [1]
    healthy = True
    assert rows.carry_out(path, units, -1, lambda: None) == rows.UNFINISHED
    assert [row["unit"] for row in read(path)] == ["c"]
    calls.clear()
    assert rows.carry_out(path, units, 100, lambda: None) == 0
    assert calls == ["fragile", "steady"]
    assert {row["unit"] for row in read(path) if row["state"] == "passed"} == {"a", "b", "c"}


def test_a_part_is_ended_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rows", rows)
    end = load("__main__").call
    assert end([sys.executable, "-c", "raise SystemExit(3)"], 600, {}) == 3
    file = tmp_path / "child"
    child = f"import os, time, pathlib; pathlib.Path({str(file)!r}).write_text(str(os.getpid())); time.sleep(600)"
    parent = "import subprocess, sys, os; subprocess.run([sys.executable, '-c', os.environ['CHILD']])"
    assert end([sys.executable, "-c", parent], 10, {"CHILD": child}) is None
    status = Path("/proc") / file.read_text() / "status"
    while status.exists() and "State:\tZ" not in status.read_text():  # nobody may wait for it when it is dead
        time.sleep(0.05)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "rows", rows)
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        load("__main__").main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "no GPU that torch can use here: --toy rehearses on the CPU\n"
    assert not (tmp_path / "out").exists()


def test_the_peers_are_measured_beside_their_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`peers.py` rehearsed on tiny images: a row for each arm and pass, open gates, ratios to the parent."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    peers = importlib.import_module("peers")
    every, arms = peers.arms_of, ("resnet26t", "recast", "recast, folded", "non-local")
    models: dict[str, nn.Module] = {}

    def some(name: str, size: int) -> dict[str, Any]:
        models.update({arm: build() for arm, build in every(name, size).items() if arm in arms})
        return {arm: lambda arm=arm: models[arm] for arm in models}

    monkeypatch.setattr(peers, "arms_of", some)
    monkeypatch.setattr(peers, "SIZE", 64)
    monkeypatch.setattr(peers, "RESULT", tmp_path / "peers.csv")
    monkeypatch.setattr(sys, "argv", ["peers", "--family", "resnet26t", "--batch", "2", "--rounds", "2"])
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    peers.main()
    table = {(row["pass"], row["arm"]): row for row in read(tmp_path / "peers.csv")}
    assert set(table) == {(kind, arm) for kind in ("inference", "training step") for arm in arms}
    gates = [layer.gates()["gamma"][4].item() for layer in gpsa_layers(models["recast"]).values()]
    assert gates == pytest.approx([0.2, 0.2], rel=1e-3)
    for kind in ("inference", "training step"):
        gmacs = [float(table[kind, arm]["gmacs"]) for arm in arms]
        assert gmacs[0] == gmacs[2] < min(gmacs[1], gmacs[3])
        assert float(table[kind, "resnet26t"]["relative_speed"]) == 1
        assert all(float(table[kind, arm]["peak_mib"]) > 1 for arm in arms)
