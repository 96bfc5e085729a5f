"""Closing heads one after another, always the one whose removal raises the loss least.

To first order, closing head h of a layer adds to the loss

    −(γ_h · ∂L/∂γ_h + s_h · ∂L/∂s_h)        linear gate, and beside a convolution (without s; γ of all channels)
    (1 − σ(λ_h)) · ∂L/∂σ_h                  sigmoid gate: its content map goes, the Gaussian stays

Before each step all open heads are put in this order; the first few are closed in turn, and the one with the smallest
loss measured stays closed. The rule is this library's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recast.errors import RecastError
from recast.layers.cmhsa import GatedLayer, gated_layers
from recast.layers.gpsa import GPSA, LAMBDA_WITHOUT_CONTENT
from recast.modes import in_eval
from recast.surgery.scales import recalibrate_batch_norm_

TRIED = 4
"""Heads whose closing is measured before one of them is chosen."""
PART = 64
"""Images of one pass."""


class Closed(NamedTuple):
    """A head that was closed, and the loss without it."""

    layer: str
    head: int
    loss: float


def heads_left(model: nn.Module) -> list[tuple[str, int]]:
    """Return (layer, head) of every open head."""
    return [(name, head) for name, layer in gated_layers(model).items() for head in sorted(_open(layer))]


def _open(layer: GatedLayer) -> set[int]:
    return {head for _, heads in _gates(layer) for head in heads}


def closing_(model: nn.Module, images: Tensor, labels: Tensor) -> Iterator[Closed]:
    """Close one head of `model` at each step, in place, until none is open; closed parts are removed (`prune_`).

    images (N, C, H, W), normalised, and labels (N,): training images. The loss is measured on every second image, and
    BatchNorm's statistics on all of them after each step (`close_`). Raises RecastError for a network without open
    heads.
    """
    for layer in gated_layers(model).values():
        layer.close_maps_(0.0)
    if not heads_left(model):
        raise RecastError("the network has no open head to close")
    batches = list(zip(images[::2].split(PART), labels[::2].split(PART), strict=True))
    with in_eval(model):
        while added := _added(model, batches):
            losses = {}
            for name, head in sorted(added, key=added.__getitem__)[:TRIED]:
                with _without(model.get_submodule(name), head):
                    losses[name, head] = _loss(model, batches)
            name, head = min(losses, key=losses.__getitem__)
            close_(model, [(name, head)], images)
            yield Closed(name, head, _loss(model, batches))


def close_(model: nn.Module, heads: list[tuple[str, int]], images: Tensor) -> None:
    """Remove the maps of these heads, and measure BatchNorm's statistics again on `images`.

    Raises RecastError for a layer or head that the network does not have, or that is closed.
    """
    layers = gated_layers(model)
    for name, head in heads:
        layer = layers.get(name)
        if layer is None or head not in _open(layer):
            raise RecastError(f"{type(model).__name__} has no open head {head} in {name}")
        content, gaussian = {*layer.content_heads} - {head}, {*layer.gaussian_heads}
        layer.prune_(gaussian - {head} if layer.config.gate == "linear" else gaussian, content)
    recalibrate_batch_norm_(model, batches_of(images))


def batches_of(images: Tensor) -> tuple[Tensor, ...]:
    """Split images into even parts of about `PART`: a single last image would have no variance on 1×1 maps."""
    return images.tensor_split(-(-len(images) // PART))


def _added(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> dict[tuple[str, int], float]:
    """Return the first-order increase of the loss from closing each open head."""
    added = dict.fromkeys(heads_left(model), 0.0)
    if not added:
        return added
    gates = [(name, layer, *gate) for name, layer in gated_layers(model).items() for gate in _gates(layer)]
    parameters = [gate for _, _, gate, _ in gates]
    slopes = [torch.zeros_like(gate) for gate in parameters]
    count = sum(len(labels) for _, labels in batches)
    required = [(p, p.requires_grad) for p in model.parameters()]
    for p, _ in required:
        p.requires_grad_(any(p is gate for gate in parameters))
    try:
        with torch.enable_grad():
            for images, labels in batches:
                loss = F.cross_entropy(model(images).float(), labels, reduction="sum") / count
                gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
                slopes = [slope + gradient for slope, gradient in zip(slopes, gradients, strict=True)]
    finally:
        for p, before in required:
            p.requires_grad_(before)
    for (name, layer, gate, heads), slope in zip(gates, slopes, strict=True):
        rise = slope / gate.sigmoid() if layer.config.gate == "sigmoid" else -gate * slope
        for head, value in zip(heads, rise.view(len(heads), -1).sum(1).tolist(), strict=True):
            added[name, head] += value
    return added


def _gates(layer: GatedLayer) -> list[tuple[nn.Parameter, tuple[int, ...]]]:
    """Return the gates that can close, and the heads of each."""
    if isinstance(layer, GPSA) and layer.config.gate == "sigmoid":
        gates = [(layer.lam, layer.content_heads)]
    else:
        gates = [(layer.gamma, layer.content_heads)]
        gates += [(layer.spread, layer.gaussian_heads)] if isinstance(layer, GPSA) else []
    return [(gate, heads) for gate, heads in gates if heads]


@torch.no_grad()
def _loss(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    sums = [F.cross_entropy(model(images).float(), labels, reduction="sum") for images, labels in batches]
    return float(torch.stack(sums).sum()) / sum(len(labels) for _, labels in batches)


@contextmanager
def _without(layer: nn.Module, head: int) -> Iterator[None]:
    """Close a head of the layer inside the block."""
    assert isinstance(layer, GatedLayer)
    before = [(gate, gate.detach().clone()) for gate, _ in _gates(layer)]
    closed = LAMBDA_WITHOUT_CONTENT if layer.config.gate == "sigmoid" else 0.0
    with torch.no_grad():
        for gate, heads in _gates(layer):
            if head in heads:
                gate.view(len(heads), -1)[heads.index(head)] = closed
        try:
            yield
        finally:
            for gate, value in before:
                gate.copy_(value)
