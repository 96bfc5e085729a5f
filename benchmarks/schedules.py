"""When should layers leave the convolution? CIFAR-100, a small C-MHSA transformer from random weights, several seeds.

    RECAST_DATA=DIR python benchmarks/schedules.py --out runs/schedules            # all arms and seeds; hours on a CPU
    RECAST_DATA=DIR python benchmarks/schedules.py --out runs/schedules --collect  # only the tables

Needs $RECAST_DATA/cifar100/{train,test}.zip. The network is `cmhsa_vit_3_tiny` (six blocks, 48 channels) on images of
24 × 24, so 6 × 6 tokens; 5,000 training images, 14 epochs. All arms start from the same random weights and see the same
images in the same order: AdamW 3e-3, one epoch of warm-up, one cosine over the whole training, crop and flip, batches
of 50. They differ in when, and as what, the mixers leave the convolution:

    conv               never: the control arm of `prs`
    start              before training, exactly (linear gate): attention from the start
    two-stage          all at once after half of the epochs, exactly
    prs                PRS, last layer first, exactly
    prs-learned        PRS's dates, at each the layer whose gates promise most (`recast.training.switches`), exactly
    learned            order and moments from the gates' gradients, at most one layer an epoch, exactly
    two-stage-cmhsa    as two-stage, with the papers' layer: softmax(QKᵀ/√D + B), M = 10
    prs-cmhsa          as prs, with the papers' layer
    two-stage-cmhsa-20, prs-cmhsa-20    the same with M = 20, where the layer is exact to 7e-7 and hardly learns
    prs-paper          as prs, with the soft start of T-CNN: sigmoid gate, α = λ = 1

schedules.csv: arm, seed, metric, value. schedules_curves.csv: one row per epoch of every run.
schedules_differences.csv: paired over seeds, with 95 % intervals (Student's t). Accuracy there is that of all test
images (5,000 in our copy), the curves' that of 500. A run that is finished is left alone, one that was cut off goes on.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from grafit import paired_difference
from timing import RESULTS, write_table

from recast.data import load_data
from recast.evaluation import evaluate
from recast.io import load
from recast.models.build import build
from recast.run.config import (
    AugmentConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RecastConfig,
    Recipe,
    ScheduleConfig,
)
from recast.training.run import train

CMHSA, CMHSA_20 = RecastConfig(gate="bias", bias_init=10.0), RecastConfig(gate="bias")
PAPER = RecastConfig(gate="sigmoid")
CONV = "conv"
PAIRS = (
    ("prs", "two-stage"), ("prs-cmhsa", "two-stage-cmhsa"), ("prs-learned", "prs"), ("prs-learned", "two-stage"),
    ("learned", "prs"), ("prs-paper", "prs"), ("prs-cmhsa", "prs"), ("prs", "start"), ("two-stage", "start"),
    ("prs", CONV), ("two-stage", CONV), ("start", CONV), ("prs-learned", CONV), ("learned", CONV),
    ("prs-cmhsa", CONV), ("two-stage-cmhsa", CONV), ("prs-cmhsa-20", CONV), ("prs-paper", CONV),
)  # fmt: skip


def base(options: argparse.Namespace, seed: int) -> Recipe:
    """What all arms share."""
    return Recipe(
        model=ModelConfig("cmhsa_vit_3_tiny"),
        data=DataConfig(
            "cifar100", data_dir=str(Path(os.environ["RECAST_DATA"]) / "cifar100"), num_train=options.num_train,
            num_val=500, batch_size=50, img_size=24,
        ),
        augment=AugmentConfig(crop="pad"),
        where=["blocks.*.mixer"],
        optim=OptimConfig(lr=3e-3),
        epochs=options.epochs,
        control=False,
        seed=seed,
        keep=1,
    )  # fmt: skip


def arms(options: argparse.Namespace, seed: int) -> dict[str, Recipe]:
    """Recipes by arm, in the order in which they are run."""
    recipe = base(options, seed)
    progressive = ScheduleConfig("progressive")
    half = ScheduleConfig("at_once", conv_epochs=options.epochs // 2)
    return {
        "prs": replace(recipe, schedule=progressive, control=True),
        "two-stage": replace(recipe, schedule=half),
        "start": replace(recipe, schedule=ScheduleConfig("at_once")),
        "prs-cmhsa": replace(recipe, schedule=progressive, recast=CMHSA),
        "two-stage-cmhsa": replace(recipe, schedule=half, recast=CMHSA),
        "prs-learned": replace(recipe, schedule=replace(progressive, order="learned")),
        "prs-paper": replace(recipe, schedule=progressive, recast=PAPER),
        "learned": replace(recipe, schedule=ScheduleConfig("learned")),
        "prs-cmhsa-20": replace(recipe, schedule=progressive, recast=CMHSA_20),
        "two-stage-cmhsa-20": replace(recipe, schedule=half, recast=CMHSA_20),
    }


def folder(options: argparse.Namespace, arm: str, seed: int) -> Path:
    """Where an arm's run lies."""
    return options.out / (f"prs-{seed}/finetuned" if arm == CONV else f"{arm}-{seed}")


def measure(options: argparse.Namespace, seed: int) -> None:
    """accuracy.json of every finished run: top-1, top-5 and loss on all test images."""
    recipe = base(options, seed)
    data = load_data(replace(recipe.data, num_val=None))
    network = build(recipe.model, num_classes=100)
    for arm in (CONV, *arms(options, seed)):
        out = folder(options, arm, seed)
        if (out / "accuracy.json").is_file() or not (out / "weights.safetensors").is_file():
            continue
        rows = evaluate({arm: load(out / "weights.safetensors", parent=network)}, ["clean"], data, progress=False)
        found = {row.metric: row.value for row in rows}
        (out / "accuracy.json").write_text(json.dumps(found), encoding="utf-8")
        print(arm, seed, found, flush=True)


def collect(options: argparse.Namespace) -> None:
    """The three tables."""
    rows: list[list[Any]] = []
    curves: list[list[Any]] = []
    values: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for seed in options.seeds:
        for arm in (CONV, *arms(options, seed)):
            out = folder(options, arm, seed)
            if not (out / "accuracy.json").is_file():
                continue
            lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            epochs = [json.loads(line) for line in lines]
            found = json.loads((out / "accuracy.json").read_text(encoding="utf-8"))
            found |= {"train loss": epochs[-1]["train_loss"], "seconds": sum(row["seconds"] for row in epochs)}
            dates = {}
            if (out / "schedule.json").is_file():
                schedule = json.loads((out / "schedule.json").read_text(encoding="utf-8"))
                dates = schedule["dates"]
                found |= {f"date {layer}": date for layer, date in dates.items()}
                drops = [s["after"]["val_loss"] - s["before"]["val_loss"] for s in schedule["switches"]]
                found["largest rise of the loss at a switch"] = max(drops, default=0.0)
            for metric, value in found.items():
                rows.append([arm, seed, metric, round(value, 5)])
                values[arm, metric][seed] = value
            for row in epochs:
                attention = sum(date <= row["epoch"] for date in dates.values())
                loss = None if row["train_loss"] is None else round(row["train_loss"], 4)
                curves.append([arm, seed, row["epoch"], attention, loss, round(row["val_loss"], 4), row["val_top1"]])
    write_table(RESULTS / "schedules.csv", ["arm", "seed", "metric", "value"], rows)
    write_table(
        RESULTS / "schedules_curves.csv",
        ["arm", "seed", "epoch", "attention_layers", "train_loss", "val_loss_500", "val_top1_500"],
        curves,
    )
    write_table(
        RESULTS / "schedules_differences.csv",
        ["arm", "against", "metric", "seeds", "difference", "low_95", "high_95", "verdict"],
        differences(values),
    )


def differences(values: dict[tuple[str, str], dict[int, float]]) -> list[list[Any]]:
    """Mean paired difference of every pair, and what its interval allows to say."""
    found = []
    for one, other in PAIRS:
        for metric in ("top1", "loss"):
            a, b = values[one, metric], values[other, metric]
            paired = [a[seed] - b[seed] for seed in a if seed in b]
            if len(paired) >= 3:  # of two seeds an interval says next to nothing
                found.append([one, other, metric, *paired_difference(paired)])
    return found


def main() -> None:
    """Train, measure, collect."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--num-train", type=int, default=5000)
    parser.add_argument("--arms", nargs="+", help="only these arms")
    parser.add_argument("--collect", action="store_true", help="only write the tables")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    for seed in () if options.collect else options.seeds:
        for arm, recipe in arms(options, seed).items():
            if options.arms and arm not in options.arms:
                continue
            out = folder(options, arm, seed)
            print(out, flush=True)
            train(recipe, out, resume=(out / "recipe.yaml").is_file())
        measure(options, seed)
    collect(options)


if __name__ == "__main__":
    main()
