"""How fast is `evaluate` beside a bare forward loop over the same images?

    RECAST_DATA=DIR python benchmarks/evaluation.py       # CIFAR-10, 2,000 images, two networks; 4 minutes on 2 cores

Writes results/evaluation.csv: `ratio` is the median over rounds of bare seconds / suite's seconds, measured by turns;
1 is as fast as `model((images - mean) / std)` over ready batches with the top-1 counted. With `cache` scores are kept.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from timing import RESULTS, by_turns, machine, ratio, write
from torch import nn
from trained import trained

from recast.data import Data, Loader
from recast.evaluation import evaluate

BATCH, IMAGES = 250, 2000


@torch.no_grad()
def bare(model: nn.Module, data: Data) -> float:
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (data.mean, data.std))
    right = 0
    for images, labels in Loader(data.val, BATCH):
        right += int((model((images - mean) / std).argmax(1) == labels).sum())
    return 100 * right / len(data.val)


def cached(model: nn.Module, data: Data, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    evaluate(model, "clean", data, batch_size=BATCH, cache=folder, progress=False)


def compare(weights: str) -> tuple[int, dict[str, list[float]]]:
    """Images, and the seconds of every loop."""
    model, data = trained(weights, IMAGES)
    with tempfile.TemporaryDirectory() as folder:
        arms = {
            "bare": lambda: bare(model, data),
            "clean": lambda: evaluate(model, "clean", data, batch_size=BATCH, progress=False),
            "clean, cache": lambda: cached(model, data, Path(folder) / "scores"),
        }
        return len(data.val), by_turns(arms, 5)


def main() -> None:
    rows: list[dict[str, Any]] = []
    for weights in ("cifar10_resnet20_akamaster", "cifar10_resnet56_akamaster"):
        images, seconds = compare(weights)
        for loop, times in seconds.items():
            rows.append(
                {
                    "weights": weights,
                    "images": images,
                    "loop": loop,
                    "seconds": round(statistics.median(times), 3),
                    "ratio": round(ratio(seconds["bare"], times), 3),
                    "machine": machine(),
                }
            )
            print(rows[-1], flush=True)
    write(RESULTS / "evaluation.csv", rows)


if __name__ == "__main__":
    main()
