"""`attention_pool_`: attention pooling in the place of a network's own."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from recast.errors import RecastError
from recast.layers.attention_pool import AttentionPool, ClassHead
from recast.run.config import PoolConfig
from recast.surgery.plan import with_pool
from recast.surgery.pooling.adapters import PooledLayer, class_head, pooled_class
from recast.surgery.pooling.find import find_place
from recast.surgery.pooling.place import Place
from recast.surgery.stride import replace_module_
from recast.tracing.hooks import in_eval

__all__ = ["attention_pool_", "attention_pools", "noise", "swap_"]

SIDES = (128, 224, 64, 32, 256, 384)
"""Sides in pixels that a network is tried with which does not say what it takes."""


def attention_pools(model: nn.Module) -> dict[str, AttentionPool]:
    """The attention pooling layers of a model by name, in the order of `named_modules`."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AttentionPool)}


def attention_pool_(
    model: nn.Module, per_class: bool = False, *, config: PoolConfig | None = None, example: Tensor | None = None
) -> nn.Module:
    """Replace the global pooling of `model` by attention (`AttentionPool`), in place; returns the model.

    The classifier and whatever lies before it stay, with their weights. With the default start, an average, the
    network computes what it did, where it averaged; where it did not, and where there is a single position to pool, a
    warning says so. With `start="paper"` the pooled features are new, and so the logits: that start is for training.

    per_class: a token, and a map, for each class. The classifier's row j then reads class j's vector (`ClassHead`), and
    `forward_head(x, pre_logits=True)` of timm's networks gives these vectors as rows (B·K, C). config: all settings
    (`PoolConfig`), instead of `per_class`. example: a batch of images that the model takes, by default noise of the
    size that the network tells (timm's do), or of one that it takes.

    Raises RecastError, and leaves the model as it was, for a network that pools by attention already, whose pooling
    cannot be found or replaced (`find_place`), or, per class, whose logits are not those of one linear layer.
    """
    config = config or PoolConfig("per_class" if per_class else "single")
    if config.kind == "none":
        return model
    place = swap_(model, config, example)
    if config.start == "average" and not place.averages:
        warnings.warn(
            f"{type(model).__name__} did not average over its last map (class token, maximum, or its classifier comes "
            "first): its logits are others now",
            stacklevel=2,
        )
    elif place.positions == 1:
        warnings.warn(
            f"{type(model).__name__} pools a single position at this size of image: attention has nothing to choose",
            stacklevel=2,
        )
    return model


def swap_(model: nn.Module, config: PoolConfig, example: Tensor | None = None) -> Place:
    """`attention_pool_` without its warnings, for what has told of the swap already; returns where it went."""
    if pools := attention_pools(model):
        raise RecastError(
            f"{next(iter(pools)) or type(model).__name__} is attention pooling already: it is put in once"
        )
    example = noise(model) if example is None else example
    place = find_place(model, example)
    head = _class_head(model, place) if config.kind == "per_class" else None
    pool = PooledLayer(
        place.dim,
        None if head is None else head.out_features,
        takes=place.takes,
        gives=place.gives,
        prefix_tokens=place.prefix_tokens,
        start=config.start,
        cls_in_keys=config.cls_in_keys,
        num_heads=config.num_heads,
        mlp_ratio=config.mlp_ratio,
        init_values=config.init_values,
    ).to(next(model.parameters()))
    pool.train(model.training)
    _put(model, place, pool)
    if head is not None:
        assert place.classifier is not None
        replace_module_(model, model.get_submodule(place.classifier), head)
    shape = (example.shape[1], example.shape[2], example.shape[3])
    done = with_pool(getattr(model, "recast_plan", None), model, config, shape)
    model.recast_plan = done  # type: ignore[assignment]
    return place


def _put(model: Any, place: Place, pool: PooledLayer) -> None:
    if place.how == "module":
        pool.replaced = (model.get_submodule(place.name),)
        replace_module_(model, pool.replaced[0], pool)
    elif place.how == "append":
        before = model.get_submodule(place.name)
        for module in [nn.ReLU(), pool] if place.relu else [pool]:
            before.append(module)
    kind: Any = type(model)
    if place.how == "head" or (hasattr(model, "reset_classifier") and hasattr(model, "get_classifier")):
        model.__class__ = pooled_class(kind, place.how == "head")
    if place.how == "head":
        model.attention_pool = pool


def _class_head(model: nn.Module, place: Place) -> ClassHead:
    """The classifier per class."""
    if place.classifier is None:
        raise RecastError(
            f"the logits of {type(model).__name__} are not those of one linear layer after its pooling, whose rows "
            "could go to the classes: take a single token (per_class=False)"
        )
    return class_head(model.get_submodule(place.classifier))


def noise(model: nn.Module, shape: tuple[int, int, int] | None = None) -> Tensor:
    """Two images of noise that the model takes: of `shape` (C, H, W), or of one that the network tells or takes."""
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise RecastError(f"{type(model).__name__} has no parameters: there is nothing to pool")
    if shape is not None:
        return _noise(parameter, *shape)
    cfg = getattr(model, "pretrained_cfg", None) or {}
    channels, *size = cfg.get("input_size", (_in_channels(model),))
    built_for = getattr(getattr(model, "patch_embed", None), "img_size", None)
    told = [tuple(found) for found in (built_for, size) if isinstance(found, tuple | list) and len(found) == 2]
    reason: Exception | None = None
    for height, width in told or [(side, side) for side in SIDES]:
        found = _noise(parameter, channels, height, width)
        try:
            with torch.no_grad(), in_eval(model):
                model(found)
        except (AssertionError, RuntimeError, ValueError) as error:
            reason = reason or error
        else:
            return found
    raise RecastError(f"{type(model).__name__} takes no image of noise ({reason}): pass attention_pool_(example=…)")


def _noise(like: Tensor, *shape: int) -> Tensor:
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).to(like)


def _in_channels(model: nn.Module) -> int:
    """Of the first convolution; 3 without one."""
    return next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), 3)
