"""Regularisation that is a property of the network: stochastic depth, LayerScale, BatchNorm's statistics.

Everything here works on a network that exists, recast or not, and leaves the names of its state_dict alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch
from timm.layers import DropPath
from timm.models.cait import LayerScaleBlockClassAttn
from timm.models.vision_transformer import ParallelThingsBlock
from timm.models.volo import ClassBlock
from timm.models.xcit import ClassAttentionBlock
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.ops import StochasticDepth

from recast.errors import RecastError
from recast.layers.cmhsa import RecastLayer
from recast.run.config import Recipe
from recast.training.freezing import freeze_trunk_

DROP_PATH = re.compile(r"drop_path\d*|stochastic_depth|stochastic_dropout")
"""Attributes of a residual block that hold its stochastic depth, in timm and in torchvision."""
LAYER_SCALE = re.compile(r"gamma(_?\d|_xca)?|ls_?\d?|layer_scale(_?\d)?")
"""Parameters that are a LayerScale, or modules whose only parameter is one."""
CLASS_ATTENTION = (LayerScaleBlockClassAttn, ClassAttentionBlock, ClassBlock)
"""Blocks that only update class tokens; CaiT, XCiT and VOLO are trained without stochastic depth in them."""


class Place(NamedTuple):
    """Where stochastic depth is, or could be: an attribute of a block."""

    holder: nn.Module
    attribute: str


def drop_path_places(model: nn.Module) -> list[list[Place]]:
    """Places of stochastic depth by block, blocks in the order of `named_modules`; empty if there are none.

    A ViT's block has two places, ParallelThingsBlock as many as it has branches, a block without a shortcut none: it
    counts, as in timm, but without a shortcut a dropped path would leave nothing.
    """
    blocks: dict[str, list[Place]] = {}
    several: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, ParallelThingsBlock):
            several.append(name)
        if isinstance(module, CLASS_ATTENTION):
            continue
        kept = {k: v for k, v in vars(module).items() if v is None} | dict(module.named_children())
        for attribute, value in kept.items():
            if DROP_PATH.fullmatch(attribute) and isinstance(value, DropPath | StochasticDepth | nn.Identity | None):
                block = next((outer for outer in several if name.startswith(f"{outer}.")), name)
                places = blocks.setdefault(block, [])
                if _has_shortcut(module):
                    places.append(Place(module, attribute))
    return list(blocks.values()) if any(blocks.values()) else []


def _has_shortcut(block: nn.Module) -> bool:
    """False where a block of timm says that it has none (MobileOne and RepVGG, ByobNet, VoVNet)."""
    says_no = (getattr(block, "identity", True), getattr(block, "shortcut", True), getattr(block, "residual", True))
    return not any(said is None or said is False for said in says_no)


def set_drop_path_(model: nn.Module, rate: float, mode: Literal["linear", "uniform"] = "linear") -> nn.Module:
    """Stochastic depth (Huang et al. 2016): in training, per image, y = x + F(x)·b/(1 − p), b ~ Bernoulli(1 − p).

    uniform: p = rate in all of the L blocks (CaiT, DeiT III). linear: p = rate·l/(L − 1) in block l = 0 … L − 1, timm's
    rule. Whatever probabilities were there before are replaced; rate 0 removes them. Nothing changes in eval mode.

    Raises RecastError for a rate outside [0, 1), and for a network without a place for it (torchvision's ResNets).
    """
    if not 0 <= rate < 1:
        raise RecastError(f"drop_path must be at least 0 and below 1, got {rate}")
    if mode not in ("linear", "uniform"):
        raise RecastError(f"drop_path_mode must be linear or uniform, got {mode!r}")
    blocks = drop_path_places(model)
    if rate and not blocks:
        raise RecastError(
            f"{type(model).__name__} has no residual block with a place for stochastic depth: leave drop_path out, "
            "or take timm's version of the network"
        )
    last = max(1, len(blocks) - 1)
    for number, places in enumerate(blocks):
        share = 1.0 if mode == "uniform" or len(blocks) == 1 else number / last
        for holder, attribute in places:
            dropped = DropPath(rate * share) if rate * share else nn.Identity()
            setattr(holder, attribute, dropped.train(holder.training))
    return model


def layer_scales(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name → LayerScale of every residual branch, whichever way the network writes it; GPSA's gate γ is none."""
    found: dict[str, nn.Parameter] = {}
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, RecastLayer):
            continue
        is_scale = "Scale" in type(module).__name__ and LAYER_SCALE.fullmatch(name.rpartition(".")[2])
        for key, parameter in own.items():
            one_axis = parameter.numel() == max(parameter.shape, default=0)
            if one_axis and (LAYER_SCALE.fullmatch(key) or (is_scale and len(own) == 1)):
                found[f"{name}.{key}" if name else key] = parameter
    return found


@torch.no_grad()
def set_layer_scale_(model: nn.Module, value: float) -> nn.Module:
    """Every LayerScale, y = x + γ·F(x) with γ one number a channel, becomes `value` (Touvron et al. 2021, CaiT).

    Class-attention blocks included, as in the published code. Raises RecastError for a negative or infinite value, and
    for a network that has no LayerScale.
    """
    if not 0 <= value < math.inf:
        raise RecastError(f"layer_scale must be 0 or a positive number, got {value}")
    scales = layer_scales(model)
    if not scales:
        raise RecastError(f"{type(model).__name__} has no LayerScale: leave layer_scale out")
    for scale in scales.values():
        scale.fill_(value)
    return model


def set_grad_checkpointing_(model: nn.Module) -> nn.Module:
    """Recompute activations in the backward pass, block by block (Chen et al. 2016). Raises RecastError where the
    network cannot."""
    switch = getattr(model, "set_grad_checkpointing", None)
    try:
        if not callable(switch):
            raise AssertionError
        switch(True)
    except (AssertionError, NotImplementedError):  # timm's way to say no
        raise RecastError(
            f"{type(model).__name__} cannot recompute its activations: leave grad_checkpointing out, "
            "or use a larger accumulate"
        ) from None
    return model


def prepare_(model: nn.Module, recipe: Recipe) -> nn.Module:
    """What a recipe changes in the network before training: stochastic depth, LayerScale, checkpointing, what is
    frozen, memory format.

    LayerScale is set whatever weights the network has: weights to go on from are loaded after this. Raises RecastError
    for what the network has not.
    """
    config = recipe.regularization
    if config.drop_path is not None:
        set_drop_path_(model, config.drop_path, config.drop_path_mode)
    if config.layer_scale is not None:
        set_layer_scale_(model, config.layer_scale)
    if config.freeze == "trunk":
        freeze_trunk_(model, recipe.model.num_classes)
    if recipe.grad_checkpointing:
        set_grad_checkpointing_(model)
    if recipe.channels_last:
        model.to(memory_format=torch.channels_last)
    return model


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Every BatchNorm that keeps statistics, timm's with activation and SyncBatchNorm included."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


def freeze_batch_norm(model: nn.Module) -> None:
    """Let every BatchNorm use its stored statistics and not update them; its weight and bias are trained as before.

    `model.train()` undoes it: call it after each.
    """
    for norm in batch_norms(model):
        norm.training = False  # not eval(): timm's BatchNormAct2d holds an activation and a dropout


@torch.no_grad()
def recalibrate_batch_norm_(model: nn.Module, batches: Iterable[Tensor]) -> nn.Module:
    """Measure BatchNorm's statistics again: mean and variance become their average over `batches`, by images.

    `batches` holds normalised images (B, C, H, W) on the model's device. Only BatchNorm is in training mode meanwhile:
    torch.optim.swa_utils.update_bn, which has the whole model in it, would drop paths, draw random numbers and let
    spectral norms take a step. Momentum, counters and training flags are as before. A network without BatchNorm is left
    alone.

    Raises RecastError without any batch, or for one with a single value per channel; the statistics are as before then.
    """
    norms = batch_norms(model)
    if not norms:
        return model
    flags = [(module, module.training) for module in model.modules()]
    momenta = [norm.momentum for norm in norms]
    before = [{name: buffer.clone() for name, buffer in norm.named_buffers(recurse=False)} for norm in norms]
    seen, finished = 0, False
    try:
        model.eval()
        for norm in norms:
            norm.training = True
        for images in batches:
            seen += len(images)
            for norm in norms:  # the k-th batch has a share of B_k / (B_1 + … + B_k) in the average
                norm.momentum = len(images) / seen
            model(images)
        finished = seen > 0
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise RecastError(
            "BatchNorm's statistics need more than one value per channel: use batches of more images"
        ) from None
    finally:
        for norm, momentum, buffers in zip(norms, momenta, before, strict=True):
            norm.momentum = momentum
            for name, buffer in buffers.items():
                if not finished or name == "num_batches_tracked":
                    getattr(norm, name).copy_(buffer)
        for module, training in flags:
            module.training = training
    if not finished:
        raise RecastError("BatchNorm's statistics need at least one batch of images to be measured on, got none")
    return model
