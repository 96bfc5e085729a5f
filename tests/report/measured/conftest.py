"""A made-up run folder in which every suite was measured. `make_measured(...)` writes one.

To look at the page: python tests/report/conftest.py RUN; python tests/report/measured/conftest.py RUN
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recast.run.records import Difference, Row, write_differences, write_rows

IMAGES = 5000
ARMS = ("parent", "finetuned", "recast")
KINDS = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
}
SIZES = ("128x128", "160x160", "160x192", "192x192", "224x224", "256x256")
FREQUENCIES = (0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
LAYERS = ("stage3.0.conv1", "stage3.0.conv2")


def measure(folder: Path, *, gain: float = 1.2, seed: int = 0, blocks: int = 9) -> Path:
    """Turn a run folder into one that was evaluated with every suite; `gain` is what recast has more, in points."""
    random = np.random.default_rng(seed)
    _numbers(folder, gain, random)
    _made(folder)
    (folder / "analysis").mkdir()
    _fourier(folder / "analysis" / "fourier.csv", blocks)
    _heads(folder / "analysis" / "heads.csv", random)
    _cka(folder / "analysis" / "cka.csv", blocks)
    _agreement(folder / "analysis" / "agreement.csv", random)
    return folder


def _numbers(folder: Path, gain: float, random: np.random.Generator) -> None:
    clean = {"parent": 74.2, "finetuned": 75.1, "recast": 75.1 + gain}
    found: dict[tuple[str, str], dict[str, float]] = {}

    def add(suite: str, metric: str, drop: float, more: float = 0.0) -> None:
        noise = random.normal(0, 0.3, 3)
        found[suite, metric] = {
            arm: max(clean[arm] - drop + (more if arm == "recast" else 0) + float(n), 0.5)
            for arm, n in zip(ARMS, noise, strict=True)
        }

    found["clean", "top1"] = clean
    add("clean", "top5", -18)
    found["clean", "loss"] = {arm: (100 - top1) / 25 for arm, top1 in clean.items()}
    found["clean", "ece"] = {"parent": 4.1, "finetuned": 3.6, "recast": 2.9}
    for suite, strength in (("fgsm", 17.0), ("pgd", 18.0), ("autoattack", 18.4)):
        for eps in (0.5, 1, 2, 4):
            add(suite, f"top1@{eps:g}", min(strength * eps, 72), 1.5)
    for suite in ("imagenet-c", "basic"):
        kinds = KINDS if suite == "imagenet-c" else {"": ("blur", "contrast", "occlusion")}
        for category, names in kinds.items():
            for kind in names:
                for severity in range(1, 6):
                    add(suite, f"top1/{kind}/{severity}", 9 * severity, 0.4 * severity)
            if category:
                add(suite, f"top1/{category}", 27, 1.2)
        add(suite, "top1/mean", 27, 1.2)
    for severity in range(1, 6):
        add("imagenet-c", f"top1/mean/{severity}", 9 * severity, 0.4 * severity)
    found["imagenet-c", "mce"] = {"parent": 71.0, "finetuned": 69.8, "recast": 67.1}
    for name, drop in (("a", 60.0), ("r", 35.0), ("v2", 12.0), ("sketch", 48.0), ("real", -7.0)):
        add(f"imagenet-{name}", "top1", drop)
    for place, size in enumerate(SIZES):
        add("resolution", f"top1@{size}", 9 - 2 * place)
    for k in (1, 5, 10, 20):
        add("knn", f"top1@{k}", 10 - k / 5)
    for edge in FREQUENCIES:
        add("frequency", f"low@{edge:g}", 65 * (1 - edge))
        add("frequency", f"high@{edge:g}", 72 * edge)
    rows, differences = [], []
    for (suite, metric), values in found.items():
        half = 0.01 if metric == "loss" else 1.2
        data = suite if suite.startswith("imagenet-") else "digits"
        rows += [Row("run", arm, suite, data, metric, v, IMAGES, v - half, v + half) for arm, v in values.items()]
        for model, against in (("recast", "parent"), ("recast", "finetuned"), ("finetuned", "parent")):
            gap, near = values[model] - values[against], 0.6 * half
            ends = (gap - near, gap + near)
            differences.append(Difference("run", model, against, suite, data, metric, gap, *ends, IMAGES))
    costs = {"parameters": (25.6e6, 30.3e6), "macs": (4.1e9, 5.0e9), "images_per_second": (812.0, 640.0)}
    for metric, (before, after) in (costs | {"peak_memory": (3.1e9, 3.9e9)}).items():
        rows += [Row("run", arm, "cost", "digits", metric, after if arm == "recast" else before, 64) for arm in ARMS]
    (folder / "rows.csv").unlink(missing_ok=True)
    write_rows(folder / "rows.csv", rows)
    write_differences(folder / "differences.csv", differences)


def _made(folder: Path) -> None:
    suites = ("clean", "fgsm", "pgd", "imagenet-c", "resolution", "knn", "frequency", "cost", "fourier", "heads")
    found = {
        suite: {
            "command": f"recast evaluate runs/mine --suite {suite}",
            "date": "2026-11-21T14:03:11",
            "seconds": 31.5,
            "device": "cuda",
            "machine": "Linux-x86_64, 16 CPUs",
            "versions": {"recast": "0.1.0", "torch": "2.15.0", "timm": "1.0.31"},
            "dataset": "digits",
            "images": IMAGES,
            "options": {"eps": [0.5, 1.0, 2.0, 4.0], "steps": 5, "random_start": False, "step_size": None},
        }
        for suite in suites
    }
    (folder / "evaluation.json").write_text(json.dumps({"suites": found}), encoding="utf-8")


def write_table(path: Path, columns: str, rows: Iterable[Iterable[Any]]) -> None:
    """A CSV file as the evaluation writes it."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns.split(","))
        writer.writerows(rows)


def _fourier(path: Path, blocks: int) -> None:
    rows = []
    for number, arm in enumerate(ARMS):
        for index in range(blocks):
            for step in range(9):
                share, depth = step / 8, index / (blocks - 1)
                delta = -share * (6 - 2.5 * depth + 0.4 * number * depth + np.sin(2 * depth))
                rows.append([arm, f"stage{index // 3 + 1}.{index % 3}", index, depth, share, delta, "true", 200])
    write_table(path, "model,block,index,depth,frequency,delta_log_amplitude,mode,n", rows)


def _heads(path: Path, random: np.random.Generator) -> None:
    rows: list[list[Any]] = []
    for epoch in (0, 5, 10):  # kept checkpoints, and the weights as trained
        for place, layer in enumerate(LAYERS):
            for head in range(9):
                closed = epoch == 0 or head == 4
                far = 1.0 if closed else 1 + (place + 1) * epoch / 6 * random.uniform(0.5, 1.5)
                gate, entropy = (0.0, 0.0) if closed else (random.uniform(0, 0.4), random.uniform(1, 4))
                span = "" if closed else 1.02
                row = [layer, head, head // 3, head % 3, gate, span, far, 0.8 * far, entropy, closed, 200]
                rows.append(["recast", "" if epoch == 10 else epoch, *row])
    names = "tap_row,tap_column,gate,span,distance,nonlocality,entropy,is_convolution,n"
    write_table(path, f"model,epoch,layer,head,{names}", rows)


def _cka(path: Path, blocks: int) -> None:
    names = [f"stage{index // 3 + 1}.{index % 3}" for index in range(blocks)]
    rows = [
        ["parent", a, "recast", b, 1 - 0.08 * abs(i - j) - 0.01 * j, 200]
        for i, a in enumerate(names)
        for j, b in enumerate(names)
    ]
    write_table(path, "model_a,layer_a,model_b,layer_b,cka,n", rows)


def _agreement(path: Path, random: np.random.Generator) -> None:
    rows = []
    for index in range(400):
        label = str(index % 10)
        said = [label if random.random() < 0.9 else str((index + 1) % 10) for _ in ARMS]
        rows.append([index, f"digits/{index:04}", label, *said])
    write_table(path, "index,image,label,parent,finetuned,recast", rows)


@pytest.fixture
def make_measured(make_run: Callable[..., Path]) -> Callable[..., Path]:
    """`make_measured(name="run", gain=1.2, seed=0, **options of make_run)`."""

    def make(name: str = "run", gain: float = 1.2, seed: int = 0, **options: Any) -> Path:
        return measure(make_run(name, seed=seed, **options), gain=gain, seed=seed)

    return make


if __name__ == "__main__":
    measure(Path(sys.argv[1]), **{key: json.loads(value) for key, _, value in (x.partition("=") for x in sys.argv[2:])})
