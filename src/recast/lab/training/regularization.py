"""Properties of the network while it trains: stochastic depth, frozen parameters, gradient checkpointing.

The functions change networks in place, recast or not, without renaming anything in their state_dict.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import torch
from timm.layers import DropPath
from timm.models.cait import LayerScaleBlockClassAttn
from timm.models.volo import ClassBlock
from timm.models.xcit import ClassAttentionBlock
from torch import nn
from torchvision.ops import StochasticDepth

from recast.analysis.transformers import is_attention
from recast.errors import RecastError
from recast.lab.config import Freeze, Recipe
from recast.layers.attention_pool import attention_pools
from recast.models.adapt import classifiers
from recast.modes import computes_as
from recast.surgery.scales import batch_norms

DROP_PATH = re.compile(r"drop_path\d*|stochastic_depth|stochastic_dropout")
"""Attributes of a residual block that hold its stochastic depth, in timm and in torchvision."""
SHORTCUTS = ("identity", "shortcut", "residual")
"""Attributes that are None or False in a block of timm without a shortcut (MobileOne and RepVGG, ByobNet, VoVNet)."""
CLASS_ATTENTION = (LayerScaleBlockClassAttn, ClassAttentionBlock, ClassBlock)
"""Blocks that only update class tokens; CaiT, XCiT and VOLO are trained without stochastic depth in them."""


def drop_path_places(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the places of stochastic depth, (module, attribute), by block, in the order of `named_modules`.

    A ViT's block has two places. A block without a shortcut has none, but counts as a block, as in timm.
    """
    blocks: dict[str, list[tuple[nn.Module, str]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, CLASS_ATTENTION):
            continue
        attributes = {k: v for k, v in vars(module).items() if v is None} | dict(module.named_children())
        for attribute, value in attributes.items():
            if DROP_PATH.fullmatch(attribute) and (
                value is None or computes_as(value, DropPath, StochasticDepth, nn.Identity)
            ):
                places = blocks.setdefault(name, [])
                if not any(getattr(module, shortcut, True) in (None, False) for shortcut in SHORTCUTS):
                    places.append((module, attribute))
    return list(blocks.values()) if any(blocks.values()) else []


def set_drop_path_(model: nn.Module, rate: float, mode: Literal["linear", "uniform"] = "linear") -> nn.Module:
    """Set stochastic depth (Huang et al. 2016): y = x + F(x)·b/(1 − p) per training image, b ~ Bernoulli(1 − p).

    uniform: p = rate in all of the L blocks (CaiT, DeiT III). linear: p = rate·l/(L − 1) in block l = 0 … L − 1, timm's
    rule. Earlier probabilities are replaced; rate 0 removes them. Nothing changes in eval mode.

    Raises RecastError for a rate outside [0, 1), and for a network without a place for it (torchvision's ResNets).
    """
    if not 0 <= rate < 1:
        raise RecastError(f"drop_path must be at least 0 and below 1, got {rate}")
    blocks = drop_path_places(model)
    if rate and not blocks:
        raise RecastError(
            f"{type(model).__name__} has no residual block with a place for stochastic depth: drop drop_path, or "
            "use timm's version of the network"
        )
    last = max(1, len(blocks) - 1)
    for number, places in enumerate(blocks):
        share = 1.0 if mode == "uniform" or len(blocks) == 1 else number / last
        for holder, attribute in places:
            dropped = DropPath(rate * share) if rate * share else nn.Identity()
            setattr(holder, attribute, dropped.train(holder.training))
    return model


def trained_parts(model: nn.Module, freeze: Freeze, num_classes: int | None) -> list[nn.Module]:
    """Return the modules that train if the rest is frozen: attention pooling, classifiers, and what `freeze` excepts.

    Raises RecastError if the classifier cannot be determined (`recast.models.adapt.classifiers`).
    """
    parts = [*attention_pools(model).values(), *map(model.get_submodule, classifiers(model, num_classes))]
    if freeze == "all_but_attention":
        parts += filter(is_attention, model.modules())
    elif freeze == "all_but_batch_norm":
        parts += batch_norms(model)
    return parts


def set_grad_checkpointing_(model: nn.Module) -> None:
    """Switch on timm's gradient checkpointing. Raises RecastError for a network without it."""
    switch: Any = getattr(model, "set_grad_checkpointing", None)
    try:
        if switch is None:
            raise AssertionError
        switch(True)
    except AssertionError:  # timm's, of networks that have the method only
        raise RecastError(
            f"{type(model).__name__} has no gradient checkpointing: drop grad_checkpointing, and raise accumulate if "
            "a batch does not fit into memory"
        ) from None


def prepare_(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Apply a recipe's stochastic depth, settings of papers, freezing, memory format and gradient checkpointing.

    Frozen parameters require no gradient. Raises RecastError if the network has no place for stochastic depth, or no
    gradient checkpointing.
    """
    config, papers = recipe.regularization, recipe.papers.values()
    if recipe.grad_checkpointing:
        set_grad_checkpointing_(model)
    if config.drop_path is not None:
        set_drop_path_(model, config.drop_path)
        for paper in papers:
            paper.drop_path_(model, config.drop_path)
    for paper in papers:
        paper.prepare_(model)
    if config.freeze not in ("none", "batch_norm"):
        parts = trained_parts(model, config.freeze, recipe.model.num_classes)
        trained = {id(p) for part in parts for p in part.parameters()}
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.requires_grad and id(parameter) in trained)
    if recipe.channels_last:
        model.to(memory_format=torch.channels_last)
    return model


def train_mode(model: nn.Module, freeze: Freeze, num_classes: int | None = None) -> None:
    """Set training mode, except for frozen modules.

    trunk, all_but_batch_norm: everything but `trained_parts` is in eval mode. batch_norm, all_but_attention: BatchNorm
    uses its stored statistics; dropout and stochastic depth stay on.
    """
    model.train()
    if freeze in ("trunk", "all_but_batch_norm"):
        model.eval()
        for part in trained_parts(model, freeze, num_classes):
            part.train()
    if freeze in ("batch_norm", "all_but_attention"):
        for norm in batch_norms(model):
            norm.training = False  # not eval(): timm's BatchNormAct2d holds an activation and a dropout
