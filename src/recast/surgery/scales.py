"""What scales a network's branches: LayerScale, norms and BatchNorm's statistics; found, drawn, measured again."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from recast.config import typed
from recast.errors import RecastError
from recast.layers.cmhsa import RecastLayer
from recast.modes import in_eval
from recast.tracing.batches import read_batches
from recast.tracing.examples import Example, batch_of, run_example

LAYER_SCALE = re.compile(r"gamma(_?\d|_xca)?|ls_?\d?|layer_scale(_?\d)?")
"""Parameters that are a LayerScale, or modules whose only parameter is one, in timm and torchvision."""


def layer_scales(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name → LayerScale of every residual branch, whichever way the network writes it; GPSA's gate γ is none."""
    scales: dict[str, nn.Parameter] = {}
    for name, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        if isinstance(module, RecastLayer):
            continue
        is_scale = "Scale" in type(module).__name__ and LAYER_SCALE.fullmatch(name.rpartition(".")[2])
        for key, parameter in parameters.items():
            one_axis = parameter.numel() == max(parameter.shape, default=0)
            if one_axis and (LAYER_SCALE.fullmatch(key) or (is_scale and len(parameters) == 1)):
                scales[f"{name}.{key}" if name else key] = parameter
    return scales


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Every BatchNorm that keeps statistics, timm's with activation and SyncBatchNorm included."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


@torch.no_grad()
def randomize_scales_(model: nn.Module, example: Example | None = None) -> nn.Module:
    """Give random weights scales that show every layer, in place: norms in U(0.5, 1.5), LayerScale in U(0.5, 1), zero
    weights redrawn.

    Fresh networks end their blocks in zero or tiny scales, and a comparison on them would not see a broken layer. With
    an `example` batch, BatchNorm's running statistics become its own: without, the signal of a deep network fades.
    """
    scales = {id(scale) for scale in layer_scales(model).values()}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, RecastLayer):
                continue
            if name == "weight" and parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            elif id(parameter) in scales:
                parameter.uniform_(0.5, 1.0)
            elif parameter.dim() > 1 and not parameter.any():
                nn.init.trunc_normal_(parameter, std=0.02)
            elif parameter.dim() == 0 and not parameter.any():  # SkipInit's gain
                parameter.uniform_(0.5, 1.0)
    return model if example is None else recalibrate_batch_norm_(model, [example])


@typed("model", "batches")
@torch.no_grad()
def recalibrate_batch_norm_(model: nn.Module, batches: Tensor | Iterable[Any]) -> nn.Module:
    """Measure BatchNorm's statistics again: mean and variance become their average over `batches`, by images.

    `batches` is one example on the model's device, or several, with labels or without (`read_batches`). Only
    BatchNorm is in training mode meanwhile: torch.optim.swa_utils.update_bn, which has the whole model in it, would
    drop paths, draw random numbers and let spectral norms take a step. Momentum, counters and training flags are as
    before. A network without BatchNorm is left alone.

    Raises RecastError without any batch, or for one with a single value per channel; the statistics are as before then.
    """
    norms = batch_norms(model)
    if not norms:
        return model
    momenta = [norm.momentum for norm in norms]
    before = [{name: buffer.clone() for name, buffer in norm.named_buffers(recurse=False)} for norm in norms]
    images, finished = 0, False
    try:
        with in_eval(model):
            for norm in norms:
                norm.training = True  # not train(): timm's BatchNormAct2d holds an activation and a dropout
            for batch, _ in read_batches(model, batches):
                images += batch_of(batch)
                for norm in norms:  # the k-th batch has a share of B_k / (B_1 + … + B_k) in the average
                    norm.momentum = batch_of(batch) / images
                run_example(model, batch)
        finished = images > 0
    finally:
        for norm, momentum, buffers in zip(norms, momenta, before, strict=True):
            norm.momentum = momentum
            for name, buffer in buffers.items():
                if not finished or name == "num_batches_tracked":
                    getattr(norm, name).copy_(buffer)
    if not finished:
        raise RecastError("BatchNorm's statistics require at least one batch of images, got none")
    return model
