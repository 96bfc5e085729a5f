"""A run folder made up for tests: plausible numbers, no training. `make_run(...)` writes one and returns its path.

To look at the page: python tests/report/conftest.py FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

LAYERS = {"stage3.0.conv1": (16, 8), "stage3.0.conv2": (8, 8)}
"""Name → side of the layer's input and output grid."""
HEADS, TEST_IMAGES = 9, 360


def fabricate(
    folder: Path,
    *,
    gate: str = "linear",
    control: bool = True,
    epochs: int = 10,
    seed: int = 0,
    gain: float = 0.4,
    rows: bool = True,
    attention: bool = True,
    verify: bool = True,
) -> Path:
    """Write a run folder; `gain` is the recast model's top-1 minus the fine-tuned parent's, in points."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    parent, finetuned = 95.6, 96.8
    reached = finetuned + gain if epochs else parent
    recipe: dict[str, Any] = {
        "model": {"name": "recast_resnet_small", "checkpoint": None, "pretrained": False, "num_classes": 10},
        "data": {"name": "digits", "img_size": 32, "batch_size": 128},
        "recast": {"gate": gate, "alpha": 1.0, "lambda_init": 1.0, "backend": "auto"},
        "where": ["last_stage"],
        "optim": {"opt": "adamw", "lr": 1e-4, "weight_decay": 0.05},
        "epochs": epochs,
        "control": control,
        "seed": seed,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    _json(folder / "plan.json", _plan(gate, recipe["recast"]))
    _json(
        folder / "environment.json",
        {"recast": "0.1.0", "torch": "2.15.0", "timm": "1.0.31", "python": "3.11.9", "platform": "Linux-x86_64"}
        | {"device": "cpu", "cpu_count": 2, "date": "2026-11-21", "seconds": 83.4}
        | {"command": "recast train --data.name digits --epochs 10 <&>"},
    )
    if verify:
        exact = gate == "linear"
        _json(
            folder / "verify.json",
            {"images": 1797, "max_relative_error": 0.0 if exact else 0.79, "bitwise": exact}
            | {"argmax_agreement": 1.0 if exact else 0.4, "backend": "split", "layers": dict.fromkeys(LAYERS, 0.0)},
        )
    start = parent if gate == "linear" else 38.0
    _metrics(folder / "metrics.jsonl", random, epochs, start, reached, gate)
    if control:
        (folder / "finetuned").mkdir()
        _metrics(folder / "finetuned" / "metrics.jsonl", random, epochs, parent, finetuned, None)
    if rows:
        accuracies = {"parent": parent, "recast": reached} | ({"finetuned": finetuned} if control else {})
        _rows(folder / "rows.csv", random, accuracies)
    if attention:
        np.savez(folder / "attention.npz", **_attention(random, gate))
    return folder


def _json(path: Path, found: object) -> None:
    path.write_text(json.dumps(found, indent=1), encoding="utf-8")


def _plan(gate: str, config: dict[str, Any]) -> dict[str, Any]:
    steps = [
        {
            "name": name,
            "rule": "Conv2d",
            "kernel": [3, 3],
            "stride": [2 if side != out else 1] * 2,
            "padding": [1, 1, 1, 1],
            "padding_mode": "zeros",
            "dilation": [1, 1],
            "groups": 1,
            "input": [64, side, side],
            "output": [64, out, out],
            "heads": HEADS,
            "queries": out * out,
            "keys": (side + 2) ** 2,
            "before": {"parameters": 36_864, "macs": 36_864 * out * out, "activation_bytes": 64 * side * side * 4},
            "after": {"parameters": 49_203, "macs": 6_912_345, "activation_bytes": 901_120},
            "exact": gate == "linear",
        }
        for name, (side, out) in LAYERS.items()
    ]
    left = [{"name": f"stage{i}.0.conv1", "reason": f"too many tokens: {1156 * i:,} of 1,024"} for i in (1, 2)]
    left += [{"name": f"stage{i}.0.shortcut", "reason": "1×1 kernel: nothing to attend to"} for i in (2, 3)]
    left.append({"name": "head", "reason": "Linear is not a convolution"})
    return {
        "version": 1,
        "config": config,
        "model": "ResNet",
        "steps": steps,
        "left": left,
        "edits": [],
        "totals": {
            "before": {"parameters": 175_258, "macs": 17_432_576, "activation_bytes": 1_245_184},
            "after": {"parameters": 199_936, "macs": 26_545_121, "activation_bytes": 2_949_120},
        },
    }


def _metrics(path: Path, random: np.random.Generator, epochs: int, start: float, end: float, gate: str | None) -> None:
    targets = {name: random.normal(0.04, 0.08, HEADS) for name in LAYERS}
    lines = []
    for epoch in range(epochs + 1):
        done = 1 - np.exp(-4 * epoch / epochs) if epoch < epochs else float(epochs > 0)
        top1 = start + (end - start) * done + (random.normal(0, 0.15) if 0 < epoch < epochs else 0)
        layers: dict[str, Any] = {}
        for name, target in targets.items() if gate else ():
            span = (1 + target * 3 * done).tolist()
            if gate == "linear":
                gates = {"gamma": (target * done).tolist(), "s": (-target[::-1] / 2 * done).tolist()}
            else:
                lam = 1 + 8 * target * done
                gates = {"lambda": lam.tolist(), "sigma": (1 / (1 + np.exp(-lam))).tolist()}
            layers[name] = {"gate": gate, **gates, "span": span}
        lines.append(
            {"epoch": epoch, "train_loss": 0.16 - 0.1 * done if epoch else None, "val_loss": (100 - top1) / 33}
            | {"val_top1": top1, "lr": 1e-4 if epoch else None, "gate_lr": 1e-3 if epoch else None}
            | {"seconds": 4.0, "layers": layers}
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _rows(path: Path, random: np.random.Generator, accuracies: dict[str, float]) -> None:
    lines = ["run,model,suite,dataset,metric,value,n,low,high"]
    for arm, top1 in accuracies.items():
        found = {"clean": {"top1": top1, "top5": min(99.9, top1 + 3), "loss": (100 - top1) / 33}}
        for suite, strength in (("fgsm", 14.0), ("pgd", 19.0)):
            found[suite] = {f"top1@{eps:g}": max(top1 - strength * eps, 0) for eps in (0.5, 1, 2, 4)}
        kinds = ("gaussian_noise", "blur", "contrast", "occlusion", "pixelate")
        basic = {
            f"top1/{kind}/{severity}": top1 - severity * (4 + 2 * number) + random.normal(0, 1)
            for number, kind in enumerate(kinds)
            for severity in range(1, 6)
        }
        found["basic"] = basic | {"top1/mean": float(np.mean(list(basic.values())))}
        recast = arm == "recast"
        costs = (199_936.0, 26_545_121.0, 1480.0) if recast else (175_258.0, 17_432_576.0, 2913.0)
        found["cost"] = dict(zip(("parameters", "macs", "images_per_second"), costs, strict=True))
        for suite, metrics in found.items():
            lines += [
                f"run,{arm},{suite},digits,{metric},{value!r},{TEST_IMAGES},," for metric, value in metrics.items()
            ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _attention(random: np.random.Generator, gate: str) -> dict[str, Any]:
    side, count = 32, 3
    rows, columns = np.mgrid[:side, :side]
    images = np.zeros((count, side, side, 3), np.uint8)
    for index in range(count):
        ring = np.abs(np.hypot(rows - 15.5, (columns - 15.5) * (1.2 + 0.3 * index)) - 9 - index) < 2.2
        images[index] = (ring * 225 + random.integers(0, 20, (side, side)))[..., None]
    arrays: dict[str, Any] = {
        "images": images,
        "labels": np.array([0, 6, 9]),
        "predictions": np.array([0, 6, 8]),
        "classes": np.array([str(digit) for digit in range(10)]),
        "layers": np.array(list(LAYERS)),
    }
    for number, (grid, _) in enumerate(LAYERS.values()):
        share = random.normal(0.04, 0.08, HEADS) if gate == "linear" else random.uniform(0.1, 0.5, HEADS)
        query = (grid // 2, grid // 2 - 1)
        mix = np.zeros((count, HEADS, grid, grid))
        pooled = images[..., 0].reshape(count, grid, side // grid, grid, side // grid).mean((2, 4)) / 60
        y, x = np.mgrid[:grid, :grid]
        for head in range(HEADS):
            tap = query[0] + head // 3 - 1, query[1] + head % 3 - 1
            shift = np.zeros((grid, grid))
            shift[tap] = 1
            if gate == "sigmoid":
                shift = np.exp(-((y - tap[0]) ** 2 + (x - tap[1]) ** 2))
                shift /= shift.sum()
            for index in range(count):
                logits = pooled[index] * random.normal(0.5, 0.6) + random.normal(0, 0.15, (grid, grid))
                content = np.exp(logits) / np.exp(logits).sum()
                mix[index, head] = (1 - share[head]) * shift + share[head] * content
        arrays |= {f"mix_{number}": mix.astype(np.float32), f"query_{number}": np.array(query)}
        arrays |= {f"gate_{number}": share.astype(np.float32), f"kernel_{number}": np.array([3, 3])}
    return arrays


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """`make_run(name="run", **options of fabricate)`."""
    return lambda name="run", **options: fabricate(tmp_path / name, **options)


if __name__ == "__main__":
    fabricate(Path(sys.argv[1]))
