"""Average or attention pooling, one map or one a class: CIFAR-100 ResNet-20, the same budget, several seeds.

    RECAST_DATA=DIR python benchmarks/pooling.py --out runs/pooling              # all arms and seeds, then the tables
    RECAST_DATA=DIR python benchmarks/pooling.py --out runs/pooling --collect    # only the tables

Needs $RECAST_DATA/cifar100/{train,test}.zip and $RECAST_DATA/weights/cifar100_resnet20_chenyaofo.safetensors. Every
arm starts from these weights and sees the same 5,000 images in the same order: AdamW 1e-4 (the pooling 1e-3), an epoch
of warm-up, cosine, crop and flip, batches of 128. In the arms called "quick" the trunk is frozen. A seed decides the
pooling's weights, which images, their order and augmentation. Accuracy is that of the 5,000 test images there. A
finished run is left alone.

results/pooling.csv: an arm and a seed in each row. results/pooling_differences.csv: paired over seeds, 95 % (Student).
results/pooling_start.csv: how far the swap alone moves the parent, by start: relative change of the logits, top-1,
share of images with the same prediction.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from timing import RESULTS, write_table
from torchvision.transforms.v2.functional import normalize
from trained import trained

from recast.data import Loader
from recast.run.config import DataConfig, ModelConfig, OptimConfig, PoolConfig, Recipe, RegularizationConfig
from recast.run.statistics import mean_interval
from recast.surgery.pooling.swap import attention_pool_
from recast.training.run import train

WEIGHTS = "cifar100_resnet20_chenyaofo"
FROZEN = RegularizationConfig(freeze="trunk")
ARMS = {
    "average": ("single", "finetuned"),
    "attention": ("single", ""),
    "per class": ("per-class", ""),
    "paper's start": ("paper", ""),
    "quick, average": ("quick-single", "finetuned"),
    "quick, attention": ("quick-single", ""),
    "quick, per class": ("quick-per-class", ""),
}
"""Arm → the run that trains it, and where in it; the average is the control of the run beside it."""
PAIRS = (
    ("attention", "average"), ("per class", "average"), ("per class", "attention"), ("paper's start", "average"),
    ("attention", "paper's start"), ("quick, attention", "quick, average"), ("quick, per class", "quick, average"),
)  # fmt: skip


def runs(options: argparse.Namespace, seed: int) -> dict[str, Recipe]:
    """Recipes by run."""
    root = Path(os.environ["RECAST_DATA"])
    recipe = Recipe(
        model=ModelConfig("cifar_resnet20", str(root / "weights" / f"{WEIGHTS}.safetensors")),
        data=DataConfig("cifar100", data_dir=str(root / "cifar100"), num_train=options.num_train),
        where=["none"],
        pool=PoolConfig("single"),
        optim=OptimConfig(lr=1e-4, pool_lr=1e-3),
        epochs=options.epochs,
        seed=seed,
        keep=1,
    )
    per_class = replace(recipe, pool=PoolConfig("per_class"), control=False)
    return {
        "single": recipe,
        "per-class": per_class,
        "quick-single": replace(recipe, regularization=FROZEN),
        "quick-per-class": replace(per_class, regularization=FROZEN),
        "paper": replace(recipe, pool=PoolConfig("single", start="paper"), control=False),
    }


def last_row(folder: Path) -> dict[str, Any] | None:
    """The last epoch's row of a finished run."""
    path = folder / "metrics.jsonl"
    if not (folder / "weights.safetensors").is_file() or not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    return found


def collect(options: argparse.Namespace) -> None:
    """The tables of the runs that are there."""
    rows: list[list[Any]] = []
    top1: dict[tuple[str, int], float] = {}
    for arm, (run, below) in ARMS.items():
        for seed in options.seeds:
            found = last_row(options.out / f"{run}-{seed}" / below)
            if found is None:
                continue
            top1[arm, seed] = found["val_top1"]
            rows.append([arm, seed, found["val_top1"], round(found["val_loss"], 4), round(found["train_loss"], 4)])
    write_table(RESULTS / "pooling.csv", ["arm", "seed", "val_top1", "val_loss", "train_loss"], rows)
    differences: list[list[Any]] = []
    for one, other in PAIRS:
        found = [top1[one, s] - top1[other, s] for s in options.seeds if (one, s) in top1 and (other, s) in top1]
        if len(found) < 2:
            continue
        mean, low, high = mean_interval(found)
        numbers = (mean, statistics.stdev(found), low, high)
        differences.append([one, other, *(round(v, 3) for v in numbers), len(found)])
    header = ["arm", "against", "top1_mean", "top1_std", "low", "high", "seeds"]
    write_table(RESULTS / "pooling_differences.csv", header, differences)


@torch.no_grad()
def start(options: argparse.Namespace) -> None:
    """How far the swap alone moves the parent."""
    parent, data = trained(WEIGHTS)
    pairs = [(normalize(x, list(data.mean), list(data.std)), y) for x, y in Loader(data.val, 500)]
    labels = torch.cat([y for _, y in pairs])
    expected = torch.cat([parent(x) for x, _ in pairs])
    rows: list[list[Any]] = [["its own", "none", 0.0, round(_top1(expected, labels), 2), 100.0]]
    for begin in ("average", "paper"):
        for kind in ("single", "per_class"):
            torch.manual_seed(0)
            model = attention_pool_(copy.deepcopy(parent), config=PoolConfig(kind, start=begin)).eval()  # type: ignore[arg-type]
            logits = torch.cat([model(x) for x, _ in pairs])
            moved = float((logits - expected).abs().max() / expected.abs().max())
            same = 100 * float((logits.argmax(1) == expected.argmax(1)).double().mean())
            rows.append([begin, kind, f"{moved:.2g}", round(_top1(logits, labels), 2), round(same, 2)])
    write_table(RESULTS / "pooling_start.csv", ["start", "pool", "relative_change", "top1", "same_predictions"], rows)


def _top1(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return 100 * float((logits.argmax(1) == labels).double().mean())


def main() -> None:
    """Train, collect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", nargs="+", help="only these runs")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--num-train", type=int, default=5000)
    parser.add_argument("--collect", action="store_true", help="only write the tables")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    for seed in () if options.collect else options.seeds:
        for name, recipe in runs(options, seed).items():
            out = options.out / f"{name}-{seed}"
            if options.runs and name not in options.runs:
                continue
            begin = time.time()
            train(recipe, out, resume=(out / "recipe.yaml").is_file(), progress=False)
            print(out, f"{time.time() - begin:.0f} s", flush=True)
    collect(options)
    start(options)


if __name__ == "__main__":
    main()
