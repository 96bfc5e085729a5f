"""The memory that a recipe's training needs, counted without data, weights or a GPU.

    python benchmarks/memory.py [NAME …]      # → results/memory.csv

Weights: parameters, gradients and the optimizer's moments in float32, and the moving average if there is one; with
mixed precision also the half-precision weights that autograd keeps. Image: what autograd keeps of one image of the
recipe's size in its precision, of all its views, without and with `--grad-checkpointing`: the inputs of the blocks, not
the block that is computed again. Attention is counted as the fused kernel keeps it (torch's on CPUs). Of a recipe with
several arms it is the parent. Not counted: the allocator's fragments, a convolution's workspace, teacher and target.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import timm
import torch
from timing import RESULTS, write
from torch import nn
from torch._subclasses import FakeTensorMode

import recast.papers.networks  # noqa: F401
from recast.lab.config import Recipe
from recast.lab.recipes import make_recipe
from recast.models.names import split_name
from recast.tracing.cost import count_parameters, saved_sizes

NAMES = (
    "deit_base deit_base_384 deit3_large deit3_huge deit3_huge_224 cait_m36 cait_m48_distilled_448 resmlp_big_24 "
    "patchconvnet_s60 patchconvnet_b120 patchconvnet_b120_384 tcnn tcnn_resnetrs350 rsb_a2 prs_cmhsa3 grafit"
).split()
MOMENTS = {"adamw": 2, "lamb": 2, "sgd": 1}


def kept(model: nn.Module, recipe: Recipe, images: int) -> int:
    """Return the bytes that autograd keeps of a forward pass."""
    size = recipe.data.img_size
    autocast: Any = nullcontext() if recipe.amp == "off" else torch.autocast("cpu", torch.bfloat16)
    with saved_sizes(model) as sizes, autocast:
        model(torch.empty(images, 3, size, size))
    return sum(sizes)


def row(name: str) -> dict[str, Any]:
    """Return the memory of a recipe, in GiB and MiB."""
    recipe = make_recipe(name)
    size = {} if recipe.model.input_size is None else {"img_size": recipe.model.input_size}
    with torch.device("meta"):
        model = timm.create_model(split_name(recipe.model.name)[1], **size, **recipe.model.kwargs).train()
    per_image, fixed = [], 0
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        for checkpoints in (False, True):
            model.set_grad_checkpointing(checkpoints)
            one, two = (kept(model, recipe, images) for images in (1, 2))
            per_image.append(two - one)
            fixed = fixed or max(0, 2 * one - two)
    copies = 2 + MOMENTS[recipe.optim.opt] + (recipe.regularization.ema_decay is not None)
    views = getattr(getattr(recipe.task, "projector", None), "views", 1)
    return {
        "recipe": name,
        "weights_gib": f"{(copies * 4 * count_parameters(model) + fixed) / 2**30:.2f}",
        "image_mib": f"{views * per_image[0] / 2**20:.0f}",
        "image_mib_checkpointed": f"{views * per_image[1] / 2**20:.0f}",
        "side": recipe.data.img_size,
        "precision": "fp32" if recipe.amp == "off" else recipe.amp,
    }


if __name__ == "__main__":
    rows = []
    for chosen in sys.argv[1:] or NAMES:
        rows.append(row(chosen))
        print(*rows[-1].values(), flush=True)
    if not sys.argv[1:]:
        write(RESULTS / "memory.csv", rows)
