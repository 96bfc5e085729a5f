"""Throughput of `fit` against a bare loop: the same network, the same images in memory, interleaved in one run.

    RECAST_DATA=DIR python benchmarks/loop.py            # writes results/loop.csv; some minutes on two CPU cores

CIFAR-100 ResNet-20 and its recast child, batches of 128, AdamW. The bare loop is what one would write by hand: index
a tensor of normalised images, forward, cross-entropy, backward, step. fit's time is that of its updates, data
included and validation left out, as it is of the bare loop. Ratios of rounds that ran side by side; the median and
the range over the rounds.
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
from timing import RESULTS, write_table
from torch import nn
from torch.nn import functional as F
from torchvision.transforms.v2.functional import normalize

from recast.lab.config import AugmentConfig, DataConfig, OptimConfig, Recipe
from recast.lab.data import Data, load_data
from recast.lab.training.loop import fit
from recast.models.build import build
from recast.models.config import ModelConfig
from recast.surgery.apply import recast_
from recast.surgery.parameters import param_groups
from recast.surgery.planning import plan

RESULT = RESULTS / "loop.csv"
BATCH = 128
AUGMENTS = {"none": AugmentConfig(crop="none", flip=False), "crop and flip": AugmentConfig()}


def bare(model: nn.Module, data: Data) -> float:
    """Images per second of one epoch by hand."""
    pixels = torch.stack([data.train[i][0] for i in range(len(data.train))])
    images, labels = normalize(pixels, list(data.mean), list(data.std)), data.train.labels
    optimizer = torch.optim.AdamW(param_groups(model.train(), lr=1e-4))
    order = torch.randperm(len(images))
    started = time.perf_counter()
    for start in range(0, len(order) - BATCH + 1, BATCH):
        chosen = order[start : start + BATCH]
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return len(order) // BATCH * BATCH / (time.perf_counter() - started)


def fitted(model: nn.Module, data: Data, recipe: Recipe) -> float:
    """Images per second of one epoch of `fit`, as it reports it."""
    with tempfile.TemporaryDirectory() as folder:
        rows = fit(model, data, recipe, folder, progress=False)
    return float(rows[-1]["images_per_second"])


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--images", type=int, default=2560)
    options = parser.parse_args()
    root = Path(os.environ["RECAST_DATA"])
    weights = root / "weights" / "cifar100_resnet20_chenyaofo.safetensors"
    rows = []
    for augment_name, augment in AUGMENTS.items():
        config = DataConfig(
            "cifar100", data_dir=str(root / "cifar100"), batch_size=BATCH, num_train=options.images, num_val=100
        )
        recipe = Recipe(ModelConfig("cifar_resnet20"), config, augment, optim=OptimConfig(), epochs=1, device="cpu")
        data = load_data(config, augment)
        parent = build(ModelConfig("cifar_resnet20", str(weights)), num_classes=100)
        child = recast_(copy.deepcopy(parent), plan(parent, torch.zeros(1, 3, 32, 32)))
        for network, model in (("parent", parent), ("recast", child)):
            speeds = [
                (bare(copy.deepcopy(model), data), fitted(copy.deepcopy(model), data, recipe))
                for _ in range(options.rounds)
            ]
            ratios = [fit_speed / bare_speed for bare_speed, fit_speed in speeds[1:]]  # the first round warms up
            medians = [round(statistics.median(column), 1) for column in zip(*speeds[1:], strict=True)]
            spread = [round(value, 4) for value in (statistics.median(ratios), min(ratios), max(ratios))]
            rows.append(
                [
                    network,
                    augment_name,
                    torch.get_num_threads(),
                    *medians,
                    *spread,
                    platform.processor() or platform.machine(),
                ]
            )
            print(*rows[-1], sep="  ", flush=True)
    rates = ("bare_images_s", "fit_images_s", "ratio", "ratio_min", "ratio_max")
    write_table(RESULT, ["network", "augment", "threads", *rates, "machine"], rows)


if __name__ == "__main__":
    main()
