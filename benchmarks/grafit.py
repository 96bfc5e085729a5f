"""Fine classes of CIFAR-100 from its 20 coarse labels: cross-entropy, SNCA+, Grafit FC and Grafit over several seeds.

    RECAST_DATA=DIR python benchmarks/grafit.py --out runs/grafit                  # all arms and seeds, then the tables
    RECAST_DATA=DIR python benchmarks/grafit.py --out runs/rates --lr 0.2 --seeds 0 --held-out  # to choose settings
    RECAST_DATA=DIR python benchmarks/grafit.py --out runs/grafit --collect        # only the tables

Needs $RECAST_DATA/cifar100/{train,test}.zip. A tenth of train.zip is held out (2,000 of 20,000 images); an arm trains
on the rest with coarse labels and is measured with fine ones: the database is what it trained on, the queries are the
test images (with --held-out those held out, so that no setting is chosen on test images). All arms are recipes with one
small network, one schedule, one number of updates and the same images in the same order; Grafit sees --views of each. A
run that is finished is left alone, one that was cut off goes on.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from arms import T_95, paired_difference
from timing import RESULTS, write_table

from recast.data import Data, load_data
from recast.data.libraries import NORMS
from recast.evaluation import evaluate
from recast.evaluation.run_folder import open_run
from recast.recipes import make_recipe
from recast.run.config import AugmentConfig, DataConfig, ModelConfig, Recipe
from recast.run.config.evaluation import Options
from recast.training.run import train

ARMS = {"CE": "coarse_ce", "SNCA+": "snca_plus", "Grafit FC": "grafit_fc", "Grafit": "grafit"}
"""Arm → recipe."""
METRICS = ("top1", "map", "map/conditioned", "map/oracle")


def recipe_of(options: argparse.Namespace, arm: str, seed: int) -> Recipe:
    """The paper's recipe of an arm for a small network and 32 pixels."""
    recipe, (mean, std) = make_recipe(ARMS[arm]), NORMS["cifar100"]
    views = options.views if recipe.embedding.views > 1 else 1
    return replace(
        recipe,
        model=ModelConfig(options.model),
        data=DataConfig(
            "zip", str(Path(os.environ["RECAST_DATA"]) / "cifar100" / "train.zip"), mean=mean, std=std, labels="coarse",
            batch_size=options.batch_size, num_train=options.num_train, workers=options.workers,
        ),
        augment=AugmentConfig(crop="random", scale=(0.3, 1.0), auto_augment="rand-m9-mstd0.5-inc1", erasing=0.25),
        optim=replace(recipe.optim, lr=options.lr, weight_decay=options.weight_decay),
        embedding=replace(recipe.embedding, dim=128, hidden=512, views=views),
        epochs=options.epochs, amp="bf16" if options.device == "cuda" else "off", channels_last=False,
        device=options.device, save_steps=20, keep=1, seed=seed,
    )  # fmt: skip


def folder(options: argparse.Namespace, arm: str, seed: int) -> Path:
    return Path(options.out / f"{ARMS[arm]}-{seed}")


def queries(options: argparse.Namespace, recipe: Recipe) -> Data:
    """The training images of the arms with fine labels, and what is asked of them."""
    data = load_data(replace(recipe.data, labels="fine"), recipe.augment)
    if options.held_out:
        return data
    test = load_data(DataConfig("cifar100", str(Path(os.environ["RECAST_DATA"]) / "cifar100"), num_train=100))
    if test.classes != data.classes:
        raise SystemExit("train.zip and test.zip have other classes")
    return replace(data, val=test.val)


def measure(options: argparse.Namespace, arm: str, seed: int) -> None:
    """retrieval.json of a finished run: its rows on the test images, or on those held out."""
    out = folder(options, arm, seed)
    path = out / f"retrieval{'-held-out' if options.held_out else ''}.json"
    if path.is_file() or not (out / "weights.safetensors").is_file():
        return
    run = open_run(out)
    data = queries(options, run.recipe)
    rows = evaluate({arm: run.models["finetuned"]}, ["retrieval"], data, options=Options(labels="fine"), progress=False)
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    print(arm, seed, {row.metric: round(row.value, 2) for row in rows}, flush=True)


def collect(options: argparse.Namespace) -> None:
    """Every number with its interval over the images, and differences over the seeds: from CE, and by conditioning."""
    rows: list[list[Any]] = []
    values: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for seed in options.seeds:
        for arm in ARMS:
            path = folder(options, arm, seed) / "retrieval.json"
            for row in json.loads(path.read_text(encoding="utf-8")) if path.is_file() else ():
                rows.append([arm, seed, row["metric"], round(row["value"], 3), row["low"], row["high"], row["n"]])
                values[arm, row["metric"]][seed] = row["value"]
    write_table(RESULTS / "grafit.csv", ["arm", "seed", "metric", "value", "low_95", "high_95", "images"], rows)
    pairs = [((arm, metric), ("CE", metric)) for arm in ARMS if arm != "CE" for metric in METRICS]
    pairs += [((arm, metric), (arm, "map")) for arm in ARMS for metric in ("map/conditioned", "map/oracle")]
    differences = [
        [*one, *other, *paired_difference(values[one], values[other])]
        for one, other in pairs
        if len({*values[one]} & {*values[other]}) in T_95
    ]
    head = ["arm", "metric", "against", "its_metric", "seeds", "difference", "low_95", "high_95", "verdict"]
    write_table(RESULTS / "grafit_differences.csv", head, differences)


def main() -> None:
    """Train, measure, collect."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="only these arms")
    parser.add_argument("--model", default="cifar_resnet20")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--views", type=int, default=2, help="of Grafit; the paper: 8")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.1, help="for 256 images, scales with the batch")
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--num-train", type=int, help="fewer images: a rehearsal")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--held-out", action="store_true", help="measure on held-out training images, no tables")
    parser.add_argument("--collect", action="store_true", help="only write the tables")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    for seed in () if options.collect else options.seeds:
        for arm in options.arms:
            out = folder(options, arm, seed)
            print(out, flush=True)
            train(recipe_of(options, arm, seed), out, resume=(out / "recipe.yaml").is_file())
            measure(options, arm, seed)
    if not options.held_out:
        collect(options)


if __name__ == "__main__":
    main()
