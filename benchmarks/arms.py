"""Recast or not, and how: CIFAR-100 ResNet-20, several arms and seeds, paired differences with 95 % intervals.

    RECAST_DATA=DIR python benchmarks/arms.py --out runs/arms            # all arms and seeds; hours on one CPU core
    RECAST_DATA=DIR python benchmarks/arms.py --out runs/arms --sweep    # learning rates of the gates, one seed
    RECAST_DATA=DIR python benchmarks/arms.py --out runs/arms --collect  # only the tables

Needs $RECAST_DATA/cifar100/{train,test}.zip and $RECAST_DATA/weights/cifar100_resnet20_chenyaofo.safetensors. The
last stage is recast and everything is trained on alike: AdamW 1e-4, an epoch of warm-up, cosine, crop and flip,
batches of 128. A seed decides W_qry, order, augmentation; all arms of a seed see the same images in the same order. A
run that is finished is left alone, one that was cut off goes on. Clean accuracy is that of the 5,000 test images
here, `basic` that of five corruptions at five severities on --num-corrupted of them, the same for all.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from timing import RESULTS, write_table

from recast.data import load_data
from recast.evaluation import evaluate
from recast.io import load
from recast.models.build import build
from recast.run.config import DataConfig, DistillConfig, ModelConfig, OptimConfig, RecastConfig, Recipe
from recast.training.run import train

SIGMOID = RecastConfig(gate="sigmoid")
PARENT = DistillConfig("parent")
GATE_RATES = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2)
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t for a two-sided 95 % interval, by number of seeds."""
PAIRS = (
    ("linear", "fine-tuned"), ("calibrated", "fine-tuned"), ("paper", "fine-tuned"), ("linear", "calibrated"),
    ("linear", "paper"), ("calibrated", "paper"), ("linear, distilled", "linear"),
    ("linear, distilled", "fine-tuned, distilled"), ("fine-tuned, distilled", "fine-tuned"),
    ("paper, features first", "paper"), ("linear, distilled", "parent"), ("fine-tuned, distilled", "parent"),
)  # fmt: skip


def base(options: argparse.Namespace, seed: int) -> Recipe:
    """What all arms share."""
    root = Path(os.environ["RECAST_DATA"])
    weights = root / "weights" / "cifar100_resnet20_chenyaofo.safetensors"
    return Recipe(
        model=ModelConfig("cifar_resnet20", str(weights)),
        data=DataConfig("cifar100", data_dir=str(root / "cifar100"), num_train=options.num_train),
        optim=OptimConfig(lr=1e-4),
        epochs=options.epochs,
        control=False,
        seed=seed,
        keep=1,
    )


def arms(options: argparse.Namespace, seed: int) -> dict[str, Recipe]:
    """Recipes by arm; the two fine-tuned arms are the controls of the first and of the distilled one."""
    recipe = base(options, seed)
    return {
        "linear": replace(recipe, control=True),
        "calibrated": replace(recipe, recast=SIGMOID, calibrate=1000),
        "paper": replace(recipe, recast=SIGMOID),
        "linear, distilled": replace(recipe, distill=PARENT, control=True),
        "paper, features first": replace(recipe, recast=SIGMOID, distill=replace(PARENT, feature_epochs=1.0)),
    }


def folder(options: argparse.Namespace, arm: str, seed: int) -> Path:
    """Where an arm's run lies; a control lies in the run that trained it."""
    own = {"fine-tuned": "linear/finetuned", "fine-tuned, distilled": "linear, distilled/finetuned"}.get(arm, arm)
    top, _, below = own.partition("/")
    return options.out / f"{top.replace(', ', '-').replace(' ', '-')}-{seed}" / below


def run(recipe: Recipe, out: Path) -> None:
    """Train, go on, or do nothing if it is done."""
    print(out, flush=True)
    train(recipe, out, resume=(out / "recipe.yaml").is_file())


def measure(options: argparse.Namespace) -> None:
    """accuracy.json of every arm and seed: clean on all test images, corrupted on some."""
    recipe = base(options, 0)
    data = load_data(recipe.data)
    some = load_data(replace(recipe.data, num_val=options.num_corrupted))
    parent = build(recipe.model, num_classes=100)
    for seed in options.seeds:
        for arm in ("parent", "fine-tuned", *arms(options, seed), "fine-tuned, distilled"):
            out = folder(options, arm, seed) if arm != "parent" else options.out
            if (out / "accuracy.json").is_file() or (arm != "parent" and not (out / "weights.safetensors").is_file()):
                continue
            model = parent if arm == "parent" else load(out / "weights.safetensors", parent=parent)
            rows = evaluate({arm: model}, ["clean"], data, progress=False)
            rows += evaluate({arm: model}, ["basic"], some, progress=False)
            found = {f"{row.suite} {row.metric}": row.value for row in rows if row.metric.count("/") < 2}
            (out / "accuracy.json").write_text(json.dumps(found), encoding="utf-8")
            print(arm, seed, found, flush=True)


def collect(options: argparse.Namespace) -> None:
    """The two tables."""
    rows: list[list[Any]] = []
    values: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for seed in options.seeds:
        for arm in ("parent", "fine-tuned", *arms(options, seed), "fine-tuned, distilled"):
            out = folder(options, arm, seed) if arm != "parent" else options.out
            if not (out / "accuracy.json").is_file():
                continue
            found = json.loads((out / "accuracy.json").read_text(encoding="utf-8"))
            if arm != "parent":
                lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
                first, last = json.loads(lines[0]), json.loads(lines[-1])
                found |= {"top1 before training": first["val_top1"], "train loss": last["train_loss"]} | _gates(last)
            for metric, value in found.items():
                rows.append([arm, seed, metric, round(value, 5)])
                values[arm, metric][seed] = value
    write_table(RESULTS / "arms.csv", ["arm", "seed", "metric", "value"], rows)
    differences = []
    for one, other in PAIRS:
        for metric in ("clean top1", "basic top1/mean"):
            a, b = values[one, metric], values[other, metric]
            if len({*a} & {*b}) in T_95:
                differences.append([one, other, metric, *paired_difference(a, b)])
    write_table(
        RESULTS / "arms_differences.csv",
        ["arm", "against", "metric", "seeds", "difference", "low_95", "high_95", "verdict"],
        differences,
    )


def paired_difference(a: dict[int, float], b: dict[int, float]) -> list[Any]:
    """Seeds, mean of a − b over the seeds that both have, its 95 % interval, and what that allows to say."""
    paired = [a[seed] - b[seed] for seed in a if seed in b]
    half = T_95[len(paired)] * statistics.stdev(paired) / math.sqrt(len(paired))
    mean = statistics.fmean(paired)
    verdict = "no difference shown" if abs(mean) <= half else "higher" if mean > 0 else "lower"
    return [len(paired), *(round(v, 3) for v in (mean, mean - half, mean + half)), verdict]


def collect_sweep(options: argparse.Namespace) -> None:
    """One row per gate rate."""
    rows = []
    for rate in GATE_RATES:
        path = options.out / f"sweep-{rate:g}" / "metrics.jsonl"
        if path.is_file() and len(lines := path.read_text(encoding="utf-8").splitlines()) == options.epochs + 1:
            last = json.loads(lines[-1])
            gates = _gates(last)
            rows.append(
                [
                    rate,
                    last["val_top1"],
                    round(last["val_loss"], 4),
                    round(last["train_loss"], 4),
                    *(round(v, 4) for v in gates.values()),
                ]
            )
    write_table(
        RESULTS / "gate_rates.csv",
        ["gate_lr", "val_top1", "val_loss", "train_loss", "content_mean", "content_min", "content_max", "spread_mean"],
        rows,
    )


def _gates(row: dict[str, Any]) -> dict[str, float]:
    """Content's share over all heads (γ, or 1 − σ(λ)), and the mean spread."""
    layers = row["layers"].values()
    content = [g for layer in layers for g in (layer.get("gamma") or [1 - s for s in layer["sigma"]])]
    spread = [s for layer in layers for s in layer.get("s", [])] or [1.0]
    if not content:
        return {}
    return {
        "content mean": statistics.fmean(content),
        "content min": min(content),
        "content max": max(content),
        "spread mean": statistics.fmean(spread),
    }


def main() -> None:
    """Train, measure, collect."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--num-train", type=int, default=5000)
    parser.add_argument("--arms", nargs="+", help="only these arms")
    parser.add_argument("--num-corrupted", type=int, default=1000)
    parser.add_argument("--sweep", action="store_true", help="learning rates of the gates instead of the arms")
    parser.add_argument("--collect", action="store_true", help="only write the tables")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if options.sweep:
        for rate in () if options.collect else GATE_RATES:
            recipe = base(options, 0)
            run(replace(recipe, optim=replace(recipe.optim, gate_lr=rate)), options.out / f"sweep-{rate:g}")
        collect_sweep(options)
        return
    if not options.collect:
        for seed in options.seeds:
            for arm, recipe in arms(options, seed).items():
                if options.arms and arm not in options.arms:
                    continue
                run(recipe, folder(options, arm, seed))
        measure(options)
    collect(options)


if __name__ == "__main__":
    main()
