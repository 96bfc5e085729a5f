"""`attention_pool_`: attention pooling in the place of a network's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recast.config import PoolConfig
from recast.errors import RecastError
from recast.pooling.adapters import PooledLayer, PoolsBeforeHead, pools_before_head
from recast.pooling.find import find_place
from recast.pooling.layer import AttentionPool, ClassHead
from recast.pooling.place import Place
from recast.shapes import in_eval
from recast.steps import with_pool
from recast.strides import replace_module_

__all__ = ["attention_pool_", "attention_pools"]

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
    network computes what it did, where it averaged; `find_place(model, example).averages` says so. With
    `start="paper"` the pooled features are new, and so the logits: that start is for training.

    per_class: a token, and a map, for each class. The classifier's row j then reads class j's vector (`ClassHead`).
    config: all settings (`PoolConfig`), instead of `per_class`. example: a batch of images that the model takes, by
    default noise of the size that the network tells (timm's do).

    Raises RecastError, and leaves the model as it was, for a network that pools by attention already, whose pooling
    cannot be found or replaced (`find_place`), or, per class, whose logits are not those of one linear layer.
    """
    config = config or PoolConfig("per_class" if per_class else "single")
    if config.kind == "none":
        return model
    if pools := attention_pools(model):
        raise RecastError(
            f"{next(iter(pools)) or type(model).__name__} is attention pooling already: it is put in once"
        )
    place = find_place(model, _example(model) if example is None else example)
    head = _class_head(model, place) if config.kind == "per_class" else None
    like = next(model.parameters())
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
    ).to(like)
    pool.train(model.training)
    _put(model, place, pool)
    if head is not None:
        assert place.classifier is not None
        replace_module_(model, model.get_submodule(place.classifier), head)
    model.recast_plan = with_pool(getattr(model, "recast_plan", None), model, config)  # type: ignore[assignment]
    return model


def _put(model: Any, place: Place, pool: PooledLayer) -> None:
    if place.how == "module":
        replace_module_(model, model.get_submodule(place.name), pool)
    elif place.how == "append":
        before = model.get_submodule(place.name)
        for module in [nn.ReLU(), pool] if place.relu else [pool]:
            before.append(module)
    else:
        kind: Any = type(model)
        model.__class__ = pools_before_head(kind)
        model.attention_pool = pool
        assert isinstance(model, PoolsBeforeHead)


def _class_head(model: nn.Module, place: Place) -> ClassHead:
    """The classifier's rows as a layer that gives each to its own class's vector."""
    if place.classifier is None:
        raise RecastError(
            f"the logits of {type(model).__name__} are not those of one linear layer after its pooling, whose rows "
            "could go to the classes: take a single token (per_class=False)"
        )
    layer = model.get_submodule(place.classifier)
    assert isinstance(layer, nn.Linear | nn.Conv2d)
    weight = layer.weight.detach().flatten(1)
    is_conv = isinstance(layer, nn.Conv2d)
    head = ClassHead(weight.shape[1], weight.shape[0], layer.bias is not None, as_map=is_conv).to(weight)
    with torch.no_grad():
        head.weight.copy_(weight)
        if layer.bias is not None:
            head.bias.copy_(layer.bias)
    return head.train(layer.training)


def _example(model: nn.Module) -> Tensor:
    """Two images of noise that the model takes."""
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise RecastError(f"{type(model).__name__} has no parameters: there is nothing to pool")
    cfg = getattr(model, "pretrained_cfg", None) or {}
    channels, *size = cfg.get("input_size", (3,))
    built_for = getattr(getattr(model, "patch_embed", None), "img_size", None)
    told = [tuple(found) for found in (built_for, size) if isinstance(found, tuple | list) and len(found) == 2]
    sizes = told or [(side, side) for side in SIDES]
    reason: Exception | None = None
    for height, width in sizes:
        noise = torch.randn(2, channels, height, width, generator=torch.Generator().manual_seed(0)).to(parameter)
        try:
            with torch.no_grad(), in_eval(model):
                model(noise)
        except (AssertionError, RuntimeError, ValueError) as error:
            reason = reason or error
        else:
            return noise
    raise RecastError(f"{type(model).__name__} takes no image of noise ({reason}): pass attention_pool_(example=…)")
