"""Is a recast network the same function? Random and trained networks, both forms of the layer, with a control.

    python benchmarks/exactness.py                      # five timm networks, random scales, 224 and 224×160
    RECAST_DATA=DIR python benchmarks/exactness.py      # also the trained CIFAR ResNets and SqueezeNet, on real images

Writes results/exactness.csv: a row per network, size, selection and form. `same` counts images with the parent's
argmax. `control` is the relative error after swapping two taps of one layer: it must be large, or the row proves
nothing. Trained networks: $RECAST_DATA/weights/*.safetensors on the 5,000 CIFAR test images (the dense form of all
stages on 50 of them, its maps are 1024 × 1156 for each of 9 heads) and on the 200 images of
$RECAST_DATA/imagenet_sample.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from timing import RESULTS, write
from torch import Tensor, nn

from recast.lab.config import DataConfig
from recast.lab.data import Loader, load_data
from recast.layers.config import Backend, RecastConfig
from recast.models.build import build
from recast.models.config import ModelConfig
from recast.surgery.apply import recast_
from recast.surgery.controls import changed_layer
from recast.surgery.exactness import Exactness
from recast.surgery.planning import plan
from recast.surgery.scales import randomize_scales_
from recast.surgery.verify import verify

RANDOM = ("resnet18", "resnet50", "resnetrs50", "resnext50_32x4d", "convnext_tiny")
CIFAR = {
    "cifar10_resnet20_akamaster": ("cifar_resnet20_a", "cifar10"),
    "cifar10_resnet56_akamaster": ("cifar_resnet56_a", "cifar10"),
    "cifar100_resnet20_chenyaofo": ("cifar_resnet20", "cifar100"),
    "cifar100_resnet56_chenyaofo": ("cifar_resnet56", "cifar100"),
}
"""Weights → (network, data set)."""
HEADS = RecastConfig("linear", content_heads=1)
"""A head for each tap: what `dense` computes by products of maps. Beside a convolution the closed gate adds zeros."""


def compare(
    parent: nn.Module,
    batches: Sequence[Tensor],
    where: str,
    forms: dict[Backend, int],
    *,
    skip_closed: bool = False,
    config: RecastConfig = HEADS,
) -> Iterator[tuple[int, str, Exactness, float]]:
    """Yield recast layers, form, exactness and the control's error for each form and number of batches."""
    planned = plan(parent, batches[0][:1], config, where=where, max_tokens=4096)
    child = recast_(copy.deepcopy(parent), planned)
    if skip_closed:
        child.eval()
    with changed_layer(child):
        control = verify(parent, child, batches[0][:8]).max_relative_error
    for form, count in forms.items():
        exactness = reduce(add, (verify(parent, child, batch, backend=form) for batch in batches[:count]))
        yield len(planned.steps), form + (" (closed heads skipped)" if skip_closed else ""), exactness, control


def rows_of(
    name: str, weights: str, parent: nn.Module, batches: list[Tensor], where: str, *args: Any, **options: Any
) -> Iterator[dict[str, Any]]:
    """Print and yield the rows of `compare`."""
    height, width = batches[0].shape[-2:]
    selection = {"last_stage": "last stage", "all": "all stages", "last_of_blocks": "last of blocks"}[where]
    for layers, form, exactness, control in compare(parent, batches, where, *args, **options):
        row = {"network": name, "weights": weights, "size": f"{height}x{width}", "selection": selection}
        row |= {"layers": layers, "form": form, "images": exactness.images}
        row |= {"same": exactness.predictions - exactness.differing}
        row |= {"relative_error": f"{exactness.max_relative_error:.3g}", "bitwise": exactness.bitwise}
        row |= {"control": f"{control:.3g}"}
        print(*row.values(), flush=True)
        yield row


def rows() -> Iterator[dict[str, Any]]:
    """Yield a row per comparison."""
    torch.manual_seed(0)
    for name in RANDOM:
        for height, width in ((224, 224), (224, 160)):
            parent = randomize_scales_(build(ModelConfig(name))).eval()
            batches = [torch.randn(8, 3, height, width)]
            yield from rows_of(name, "random", parent, batches, "last_stage", {"split": 1, "dense": 1})
            beside: dict[Backend, int] = {"split": 1, "sdpa": 1}
            yield from rows_of(name, "random", parent, batches, "last_of_blocks", beside, config=RecastConfig())
    if (root := os.environ.get("RECAST_DATA")) is None:
        return
    for weights, (name, dataset) in CIFAR.items():
        data = load_data(DataConfig(dataset, data_dir=f"{root}/{dataset}"))
        parent = build(ModelConfig(name, f"{root}/weights/{weights}.safetensors"), num_classes=len(data.classes)).eval()
        data, _ = data.fitted_to(parent)
        batches = [data.normalised(images, torch.device("cpu")) for images, _ in Loader(data.val, 50)]
        yield from rows_of(name, weights, parent, batches, "last_stage", {"split": 100, "dense": 100})
        yield from rows_of(name, weights, parent, batches, "all", {"split": 100}, skip_closed=True)
        yield from rows_of(name, weights, parent, batches, "all", {"split": 1, "dense": 1})
    data = load_data(DataConfig("folder", data_dir=f"{root}/imagenet_sample"))
    weights = "imagenet_squeezenet1_1"
    parent = build(ModelConfig("torchvision:squeezenet1_1", f"{root}/weights/{weights}.safetensors")).eval()
    batches = [data.normalised(images, torch.device("cpu")) for images, _ in Loader(data.val, 25)]
    yield from rows_of("squeezenet1_1", weights, parent, batches, "last_stage", {"split": 8, "dense": 8})


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    write(RESULTS / "exactness.csv", list(rows()))
