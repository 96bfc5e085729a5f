"""Is a recast network the same function? Random and trained networks, both forms of the layer, with a control.

    python benchmarks/exactness.py                      # five timm networks, random telling weights, 224 and 224×160
    RECAST_DATA=DIR python benchmarks/exactness.py      # also the trained CIFAR ResNets and SqueezeNet, on real images

Writes results/exactness.csv: a row per network, size, selection and form. `same` counts images with the parent's
argmax, `control` is the relative error when two taps of one layer are swapped: it must be large, or the row proves
nothing. Trained networks: $RECAST_DATA/weights/*.safetensors on the 5,000 CIFAR test images (the dense form of all
stages on 50 of them, its maps are 1024 × 1156 for each of 9 heads) and on the 200 images of
$RECAST_DATA/imagenet_sample.
"""

from __future__ import annotations

import copy
import csv
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torchvision.transforms.v2.functional import normalize
from trained import CIFAR, trained

from recast.lab.config import DataConfig
from recast.lab.data import Loader, load_data
from recast.lab.data.datasets import IMAGENET
from recast.lab.scales import randomize_scales_
from recast.layers.config import Backend
from recast.models.build import build
from recast.models.config import ModelConfig
from recast.surgery.apply import recast_, refresh_gates_
from recast.surgery.controls import swapped_heads
from recast.surgery.exactness import Exactness
from recast.surgery.planning import plan
from recast.surgery.verify import verify

RESULT = Path(__file__).parents[1] / "results" / "exactness.csv"
HEADER = (
    "network",
    "weights",
    "size",
    "selection",
    "layers",
    "form",
    "images",
    "same",
    "relative_error",
    "bitwise",
    "control",
)
RANDOM = ("resnet18", "resnet50", "resnetrs50", "resnext50_32x4d", "convnext_tiny")


def compare(
    parent: nn.Module, batches: Sequence[Tensor], where: str, forms: dict[Backend, int], *, skip_closed: bool = False
) -> Iterator[tuple[int, str, Exactness, float]]:
    """Layers recast, form, exactness over its first batches and the control's error, for each form and batch count."""
    planned = plan(parent, batches[0][:1], where=where, max_tokens=4096)
    child = recast_(copy.deepcopy(parent), planned)
    if skip_closed:
        refresh_gates_(child.eval())
    with swapped_heads(child):
        control = verify(parent, child, batches[0][:8]).max_relative_error
    for form, count in forms.items():
        found = [verify(parent, child, batch, backend=form) for batch in batches[:count]]
        total = found[0]
        for more in found[1:]:
            total = total + more
        yield len(planned.steps), form + (" (closed heads skipped)" if skip_closed else ""), total, control


def rows() -> Iterator[tuple[object, ...]]:
    """One row per comparison, as it is made."""
    torch.manual_seed(0)
    for name in RANDOM:
        for height, width in ((224, 224), (224, 160)):
            parent = randomize_scales_(build(ModelConfig(name))).eval()
            batches = [torch.randn(8, 3, height, width)]
            for found in compare(parent, batches, "last_stage", {"split": 1, "dense": 1}):
                yield _row(name, "random", f"{height}x{width}", "last stage", *found)
    data_root = os.environ.get("RECAST_DATA")
    if not data_root:
        return
    for weights, (name, _) in CIFAR.items():
        parent, data = trained(weights)
        batches = [normalize(images, list(data.mean), list(data.std)) for images, _ in Loader(data.val, 50)]
        for found in compare(parent, batches, "last_stage", {"split": 100, "dense": 100}):
            yield _row(name, weights, "32x32", "last stage", *found)
        for found in compare(parent, batches, "all", {"split": 100}, skip_closed=True):
            yield _row(name, weights, "32x32", "all stages", *found)
        for found in compare(parent, batches, "all", {"split": 1, "dense": 1}):
            yield _row(name, weights, "32x32", "all stages", *found)
    data = load_data(DataConfig("folder", data_dir=f"{data_root}/imagenet_sample"))
    path = str(Path(data_root) / "weights" / "imagenet_squeezenet1_1.safetensors")
    parent = build(ModelConfig("torchvision:squeezenet1_1", path)).eval()
    batches = [normalize(images, *map(list, IMAGENET)) for images, _ in Loader(data.val, 25)]
    for found in compare(parent, batches, "last_stage", {"split": 8, "dense": 8}):
        yield _row("squeezenet1_1", "imagenet_squeezenet1_1", "224x224", "last stage", *found)


def _row(
    name: str, weights: str, size: str, where: str, layers: int, form: str, e: Exactness, control: float
) -> tuple[object, ...]:
    same = e.predictions - e.differing
    return (
        name,
        weights,
        size,
        where,
        layers,
        form,
        e.images,
        same,
        f"{e.max_relative_error:.3g}",
        e.bitwise,
        f"{control:.3g}",
    )


def main() -> None:
    """Print each row as it comes, keep them all."""
    RESULT.parent.mkdir(exist_ok=True)
    with RESULT.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        for row in rows():
            writer.writerow(row)
            file.flush()
            print(*row, flush=True)


if __name__ == "__main__":
    main()
