"""The quickstart over several seeds: scores of the arms, and of the recast one without each part of attention.

    for seed in 0 1 2; do recast quickstart --seed $seed --out runs/odd-$seed; done   # 3 minutes each
    python studies/odd_digit.py runs/odd-0 runs/odd-1 runs/odd-2                    # writes results/odd_digit.csv

Columns: arm, metric, then the value of every seed, and mean, low_95 and high_95 over seeds and images (of a single run
over its images). Arms: parent, finetuned, recast, on clean, attacked and corrupted images; `recast − finetuned`,
paired by seed; and the recast network, without further training, with uniform content maps (W_key = 0: a global mean)
and without content (γ = 0), on clean images; `heads awake`. odd_digit.csv is of the former default, one wide head (4 in
all), odd_digit_nine.csv of the one before it, nine heads with Gaussians and 5 epochs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from evidence.csv_files import RESULTS, write
from trainings import correct

import recast
from recast.lab.config.text import load_recipe
from recast.lab.data import load_data
from recast.lab.evaluation.image_values import ImageValues, over_seeds, read_images
from recast.lab.evaluation.intervals import Interval, interval
from recast.lab.folder.records import Wakefulness
from recast.lab.training.metrics import read_metrics
from recast.layers.cmhsa import gated_layers
from recast.models.build import build

METRICS = (("clean", "top1"), ("fgsm", "top1@1"), ("pgd", "top1@1"), ("basic", "top1/mean"))
ABLATIONS = {"uniform maps": "key", "no content": "gamma"}
GAIN = "recast − finetuned"


@torch.no_grad()
def ablated(run: Path) -> dict[str, ImageValues]:
    """Return which clean images are right without each part."""
    recipe = load_recipe(run / "recipe.yaml")
    data = load_data(recipe.data)
    pixels, labels = data.val.batch(range(len(data.val)))
    images = data.normalised(pixels, torch.device("cpu"))
    scores = {}
    for name, parameter in ABLATIONS.items():
        model = recast.load(run / "weights.safetensors", parent=build(recipe.model, num_classes=len(data.classes)))
        for layer in gated_layers(model).values():
            getattr(layer, parameter).zero_()
        scores[f"recast, {name}"] = ImageValues(100 * correct(model, images, labels).double().numpy(), True)
    return scores


def main() -> None:
    """Read the runs, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    runs = parser.parse_args().runs
    images = [read_images(run) for run in runs]
    values: dict[tuple[str, str], tuple[list[ImageValues], ...]] = {}
    for suite, metric in METRICS:
        arms = {arm: [each[suite, metric, arm] for each in images] for arm in ("parent", "finetuned", "recast")}
        values |= {(arm, f"{suite} {metric}"): (each,) for arm, each in arms.items()}
        values[GAIN, f"{suite} {metric}"] = arms["recast"], arms["finetuned"]
    without = [ablated(run) for run in runs]
    values |= {(arm, "clean top1"): ([each[arm] for each in without],) for arm in without[0]}
    header = ["arm", "metric", *(run.name for run in runs), "mean", "low_95", "high_95"]

    def row(key: tuple[str, str], seeds: list[float], line: Interval) -> dict[str, Any]:
        numbers = (round(value, 3) for value in (*seeds, line.mean, line.low, line.high))
        return dict(zip(header, [*key, *numbers], strict=True))

    rows = []
    for key, (ours, *theirs) in values.items():
        seeds = [each.values.mean() for each in ours]
        if theirs:
            seeds = [value - each.values.mean() for value, each in zip(seeds, theirs[0], strict=True)]
        line = over_seeds(ours, *theirs)
        assert line is not None, "the runs have other images"
        rows.append(row(key, seeds, line))
    awake = [Wakefulness.of(read_metrics(run / "metrics.jsonl")[-1]["layers"]) for run in runs]
    heads = [float(each.awake) for each in awake if each is not None]
    rows.append(row(("recast", "heads awake"), heads, interval([[value] for value in heads])))
    write(RESULTS / "odd_digit.csv", rows)


if __name__ == "__main__":
    main()
