"""Where does a network pool? Found by running it: what a module takes and gives says more than its name."""

from __future__ import annotations

import timm.layers
import torch
from timm.layers import SelectAdaptivePool2d
from timm.layers import adaptive_avgmax_pool as timm_pools
from torch import Tensor, nn

from recast.errors import RecastError
from recast.surgery.pooling.in_code import find_after_sequential, find_in_head
from recast.surgery.pooling.place import Layout, Place
from recast.surgery.pooling.watch import (
    MEANS,
    Done,
    all_comes_through,
    classifier_of,
    finished,
    is_linear,
    is_one,
    same,
    watched,
)
from recast.tracing.hooks import in_eval

__all__ = ["find_place"]

POOLS: tuple[type[nn.Module], ...] = (
    SelectAdaptivePool2d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
    nn.AvgPool2d,
    nn.MaxPool2d,
    *(kind for kind in vars(timm_pools).values() if isinstance(kind, type) and issubclass(kind, nn.Module)),
)
BY_ATTENTION = tuple(
    kind
    for name, kind in vars(timm.layers).items()
    if name in ("AttentionPool2d", "AttentionPoolLatent", "AttentionPoolPrr", "RotAttentionPool2d")
)


@torch.no_grad()
def find_place(model: nn.Module, example: Tensor) -> Place:
    """Where `model` pools the positions of its last map (or its tokens), seen on `example` (B, C, H, W) in eval mode.

    Raises RecastError for a network that does not take the example, gives anything but logits (B, K), pools by
    attention already, or pools where nothing can be put in its place.
    """
    if name := next((name for name, module in model.named_modules() if isinstance(module, BY_ATTENTION)), None):
        raise RecastError(
            f"{type(model).__name__} pools by attention already ({name}): build it with another global_pool"
        )
    with in_eval(model):
        logits = model(example)
        if not isinstance(logits, Tensor) or logits.dim() != 2:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise RecastError(f"attention pooling is for networks that give (batch, classes), got {got}")
        order = finished(model, example)
        found = _module(model, example, order, logits)
        if found is None and callable(getattr(model, "forward_head", None)):
            found = find_in_head(model, example, logits)
        if found is None:
            found = find_after_sequential(model, example, order, logits)
    if found is None:
        raise RecastError(
            f"cannot tell where {type(model).__name__} pools: expected a pooling module that gives one position "
            "(nn.AdaptiveAvgPool2d(1)), timm's forward_head, or an nn.Sequential whose output is averaged in code"
        )
    return found


def _module(model: nn.Module, example: Tensor, order: list[tuple[str, torch.Size]], logits: Tensor) -> Place | None:
    modules = dict(model.named_modules())
    pools = [i for i, (name, shape) in enumerate(order) if isinstance(modules[name], POOLS) and is_one(shape)]
    if not pools or any(not is_one(shape) for _, shape in order[pools[-1] + 1 :]):
        return None  # none, or the last is of a channel attention: there are maps after it
    name = order[pools[-1]][0]
    after = {n for n, _ in order[pools[-1] + 1 :] if is_linear(modules[n])}
    before = [n for n, _ in order[: pools[-1]] if is_linear(modules[n])]
    with watched(model, {name, *(after or before[-1:])}) as seen:
        model(example)
    pool = next(done for done in reversed(seen) if done.name == name)
    if sum(done.name == name for done in seen) > 1:
        raise RecastError(f"{name} of {type(model).__name__} pools more than once: it cannot be replaced")
    if not after and (found := _before_classifier(model, example, order, pool, seen, logits)) is not None:
        return found
    layout = _layout(pool)
    dim = pool.input.shape[1 if layout == "NCHW" else 3]
    if pool.output.numel() != dim * len(pool.output):
        raise RecastError(
            f"{name} of {type(model).__name__} gives {pool.output[0].numel()} numbers for {dim} channels (average and "
            "maximum): attention pooling gives one a channel; build the network with global_pool='avg'"
        )
    if not all_comes_through(model, name, pool, example):
        return None  # it is a branch, and the network pools in code besides
    gives: Layout = "flat" if pool.output.dim() == 2 else "NCHW" if pool.output.shape[1] == dim else "NHWC"
    averages = same(pool.input.mean(MEANS[layout]).flatten(), pool.output.flatten())
    tail = [done for done in seen if done.name in after]
    positions = pool.input[0].numel() // dim
    return Place("module", name, dim, layout, gives, 0, classifier_of(tail, logits), averages, positions=positions)


def _layout(pool: Done) -> Layout:
    """By what it gives: the mean over the one or the other; of other pools by the number of channels."""
    for layout in ("NCHW", "NHWC"):
        if same(pool.input.mean(MEANS[layout]).flatten(), pool.output.flatten()):
            return layout
    return "NHWC" if pool.output[0].numel() == pool.input.shape[3] != pool.input.shape[1] else "NCHW"


def _before_classifier(
    model: nn.Module, example: Tensor, order: list[tuple[str, torch.Size]], pool: Done, seen: list[Done], logits: Tensor
) -> Place | None:
    """A network that classifies every position and averages then (SqueezeNet): it is pooled before its classifier."""
    last = next((done for done in reversed(seen) if isinstance(done.module, nn.Conv2d)), None)
    if last is None or not same(pool.output.flatten(1), logits) or last.output.shape != pool.input.shape:
        return None
    if not (same(last.output, pool.input) or same(last.output.relu(), pool.input)):
        return None  # what is pooled are features, and there is no classifier
    names = [name for name, _ in order]
    for name in reversed(names[: names.index(last.name)]):
        if not isinstance(model.get_submodule(name), nn.Sequential):
            continue
        with watched(model, {name}) as found:
            model(example)
        if same(found[-1].output, last.input):
            dim, positions = last.input.shape[1], last.input[0, 0].numel()
            return Place("append", name, dim, "NCHW", "NCHW", 0, last.name, averages=False, positions=positions)
    return None
