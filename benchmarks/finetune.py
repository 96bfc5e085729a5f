"""A first look at fine-tuning: CIFAR-100 ResNet-20, last stage, one seed an arm. Not evidence: that takes seeds.

    RECAST_DATA=DIR python benchmarks/finetune.py --out runs/finetune        # all arms, or --arms linear_1e-3,clamped
    RECAST_DATA=DIR python benchmarks/finetune.py --out runs/finetune --collect

Needs $RECAST_DATA/cifar100/{train,test}.zip and $RECAST_DATA/weights/cifar100_resnet20_chenyaofo.safetensors. An arm
that is finished is left alone, one that was cut off goes on. `--collect` writes results/finetune_cifar100_resnet20.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from recast.config import DataConfig, ModelConfig, OptimConfig, RecastConfig, Recipe
from recast.training.run import train

RESULT = Path(__file__).parents[1] / "results" / "finetune_cifar100_resnet20.csv"
SIGMOID = RecastConfig(gate="sigmoid", alpha=1.0, lambda_init=1.0)


def base() -> Recipe:
    """What all arms share: AdamW at a rate meant not to hurt the parent, an epoch of warm-up, cosine, crop and flip."""
    weights = Path(os.environ["RECAST_DATA"]) / "weights" / "cifar100_resnet20_chenyaofo.safetensors"
    return Recipe(
        model=ModelConfig("cifar_resnet20", str(weights)),
        data=DataConfig("cifar100", batch_size=128, num_train=10_000),  # half of them: two CPU cores, an hour
        optim=OptimConfig(lr=1e-4),
        epochs=5,
        control=False,
    )


def arms() -> dict[str, Recipe]:
    """Every arm by name; the control is trained beside the first."""
    recipe = base()

    def gates(rate: float) -> OptimConfig:
        return replace(recipe.optim, gate_lr=rate)

    return {
        "linear_1e-3": replace(recipe, optim=gates(1e-3), control=True),
        "linear_1e-2": replace(recipe, optim=gates(1e-2)),
        "calibrated": replace(recipe, recast=SIGMOID, calibrate=1000),
        "paper": replace(recipe, recast=SIGMOID),
        "clamped_1e-2": replace(recipe, recast=RecastConfig(gate_range=(0.0, 1.0)), optim=gates(1e-2)),
    }


def collect(out: Path) -> None:
    """One row per arm and epoch; `gate` is γ, or 1−σ(λ): the share of content, over all heads of all layers."""
    rows: list[list[Any]] = []
    folders = {name: out / name for name in arms()} | {"parent fine-tuned": out / "linear_1e-3" / "finetuned"}
    for arm, folder in folders.items():
        path = folder / "metrics.jsonl"
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
            row = json.loads(line)
            content = [g for layer in row["layers"].values() for g in _content(layer)]
            spread = [s for layer in row["layers"].values() for s in layer.get("s", [])]
            statistics = [*_statistics(content), *_statistics(spread)]
            rows.append(
                [arm, row["epoch"], row["val_top1"], row["val_loss"], row["train_loss"], row["seconds"], *statistics]
            )
    RESULT.parent.mkdir(exist_ok=True)
    with RESULT.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = [f"{gate}_{what}" for gate in ("content", "spread") for what in ("mean", "min", "max")]
        writer.writerow(["arm", "epoch", "val_top1", "val_loss", "train_loss", "seconds", *names])
        writer.writerows(rows)
    print(RESULT)


def _content(layer: dict[str, Any]) -> list[float]:
    return layer["gamma"] if layer["gate"] == "linear" else [1 - sigma for sigma in layer["sigma"]]


def _statistics(values: list[float]) -> list[float | str]:
    return [round(v, 4) for v in (sum(values) / len(values), min(values), max(values))] if values else ["", "", ""]


def main() -> None:
    """Train the arms that are asked for, or collect their numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"))
    parser.add_argument("--arms", default=",".join(arms()))
    parser.add_argument("--collect", action="store_true")
    options = parser.parse_args()
    if not options.collect:
        for name in options.arms.split(","):
            folder = options.out / name
            train(
                arms()[name], folder, resume=(folder / "recipe.yaml").exists(), command=f"benchmarks/finetune.py {name}"
            )
    collect(options.out)


if __name__ == "__main__":
    main()
