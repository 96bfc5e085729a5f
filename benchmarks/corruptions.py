"""The 15 corruptions of ImageNet-C on trained CIFAR networks, made on the fly: what they cost in accuracy and in time.

    RECAST_DATA=DIR python benchmarks/corruptions.py --out runs/corruptions    # 5,000 images; half an hour of a core
    python benchmarks/corruptions.py --times                                   # seconds only; ten minutes of a core

Writes results/corruptions.csv: top-1 in percent with its 95 % interval for each network, kind and severity, by category
and on average, and on the clean images. This is not the released CIFAR-10-C: ImageNet's strengths are used at 32 x 32,
and the images are not stored in between. A run that is stopped goes on from what --out keeps.

Writes results/corruptions_times.csv: CPU seconds for 1,000 images of each kind (mean over the severities), and
whether a second time, in another order, with other global seeds and in another process, gives the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import RESULTS, machine, write
from trained import CIFAR, trained

from recast.evaluation import evaluate
from recast.evaluation.context import PixelModel
from recast.evaluation.imagenet_corruptions import KINDS, corrupt_bytes
from recast.run.suites import SEVERITIES

SIDES = {32: 40, 224: 6}
"""Side in pixels → images that are timed for each kind and severity."""


def accuracies(out: Path, num_val: int | None) -> list[dict[str, Any]]:
    """A row per network and metric; the networks of a data set share the corrupted images."""
    rows = []
    for dataset in ("cifar10", "cifar100"):
        networks, data = {}, None
        for weights, (_, trained_on) in CIFAR.items():
            if trained_on == dataset:
                model, data = trained(weights, num_val)
                networks[weights] = PixelModel(model, data.mean, data.std)
        assert data is not None
        for row in evaluate(networks, ["clean", "corruptions"], data, batch_size=250, cache=out / dataset):
            if row.metric.startswith("top1"):
                numbers = {"value": row.value, "low": row.low, "high": row.high}
                rows.append(
                    {"weights": row.model, "dataset": row.dataset, "suite": row.suite, "metric": row.metric}
                    | {name: None if number is None else f"{number:.2f}" for name, number in numbers.items()}
                    | {"n": row.n}
                )
    return rows


def pictures(side: int, count: int) -> list[np.ndarray]:
    """Smooth shades with some noise, (side, side, 3) uint8."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 3, 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bicubic")
    noisy = (smooth + 0.1 * torch.rand(count, 3, side, side, generator=generator)).clamp(0, 1)
    return list((noisy * 255).to(torch.uint8).permute(0, 2, 3, 1).numpy())


def digest(kind: str, side: int, backwards: bool = False) -> str:
    """A hash of the bytes of eight images at all severities."""
    found: dict[int, bytes] = {}
    np.random.seed(int(backwards))
    torch.manual_seed(int(backwards))
    images = list(enumerate(pictures(side, 8)))
    for number, image in reversed(images) if backwards else images:
        found[number] = b"".join(corrupt_bytes(image, kind, severity, number).tobytes() for severity in SEVERITIES)
    return hashlib.sha256(b"".join(found[number] for number in sorted(found))).hexdigest()


def times(sides: Sequence[int]) -> list[dict[str, Any]]:
    rows = []
    with multiprocessing.get_context("spawn").Pool(1) as other:
        for side in sides:
            images = pictures(side, SIDES[side])
            for kind in KINDS:
                first = digest(kind, side)  # also compiles what is compiled
                begin = time.process_time()
                for severity in SEVERITIES:
                    for number, image in enumerate(images):
                        corrupt_bytes(image, kind, severity, number)
                seconds = (time.process_time() - begin) / len(images) / len(SEVERITIES) * 1000
                again = other.apply(digest, (kind, side, True))
                row = {"kind": kind, "side": side, "cpu_seconds_per_1000": f"{seconds:.2f}"}
                rows.append(row | {"same_bytes": first == again, "machine": machine()})
                print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/corruptions"), help="keeps what was measured")
    parser.add_argument("--num-val", type=int, help="class-balanced test images; all without it")
    parser.add_argument("--times", action="store_true", help="measure seconds only")
    asked = parser.parse_args()
    if asked.times:
        write(RESULTS / "corruptions_times.csv", times(list(SIDES)))
    else:
        write(RESULTS / "corruptions.csv", accuracies(asked.out, asked.num_val))


if __name__ == "__main__":
    main()
