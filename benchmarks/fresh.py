"""A network that was just recast, all heads closed: its time over the parent's, by turns.

    python benchmarks/fresh.py      # writes results/fresh.csv (about two minutes)

All 3×3 convolutions of ResNet-20 are recast. Columns: arm (as `recast_` left it, a deep copy, saved and loaded), pass
(inference, or the gradient of the images, as an attack takes it), batch, over_parent (median of ratios within a round),
bitwise (the result is the parent's).
"""

from __future__ import annotations

import copy
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from timing import RESULTS, by_turns, ratio, write
from torch import Tensor, nn

import recast


def inference(model: nn.Module, images: Tensor) -> Tensor:
    """The logits."""
    with torch.no_grad():
        logits: Tensor = model(images)
    return logits


def gradient(model: nn.Module, images: Tensor) -> Tensor:
    """Of the logits' sum by the images."""
    images = images.clone().requires_grad_()
    return torch.autograd.grad(model(images).sum(), images)[0]


def main() -> None:
    """Time them all."""
    parent = timm.create_model("cifar_resnet20").eval()
    fresh = recast.recast_(copy.deepcopy(parent), recast.plan(parent, torch.randn(1, 3, 32, 32), where="all"))
    with tempfile.TemporaryDirectory() as folder:
        loaded = recast.load(recast.save(fresh, Path(folder) / "fresh.safetensors", "cifar_resnet20"))
    arms = {"parent": parent, "recast_": fresh, "deep copy": copy.deepcopy(fresh), "saved, loaded": loaded}
    rows: list[dict[str, Any]] = []
    for batch in (1, 64):
        images = torch.randn(batch, 3, 32, 32)
        for run in (inference, gradient):
            calls = {arm: partial(run, model.requires_grad_(False), images) for arm, model in arms.items()}
            seconds = by_turns(calls, rounds=15, warm=3)
            for arm in list(arms)[1:]:
                equal, over = torch.equal(calls[arm](), calls["parent"]()), ratio(seconds[arm], seconds["parent"])
                row = {"arm": arm, "pass": run.__name__, "batch": batch, "over_parent": f"{over:.2f}"}
                rows.append({**row, "bitwise": equal})
    write(RESULTS / "fresh.csv", rows)


if __name__ == "__main__":
    main()
