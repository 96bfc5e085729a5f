"""Controls: changes of a network that a comparison must detect, or it proves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from recast.errors import RecastError
from recast.layers.attention_pool import attention_pools
from recast.layers.beside import AttentionBeside
from recast.layers.cmhsa import RecastLayer, recast_layers
from recast.tracing.hooks import hooked

GATE = 1.0
"""Added to γ by the control: content attention as strong as the tap that it starts from."""
QUERY = 10.0
"""Added to every query by the control: far from the average start, whose queries are 0."""


@contextmanager
def shifted_queries(model: nn.Module) -> Iterator[None]:
    """Shift the queries of attention pooling inside the block: a control that must change the output."""
    projections = [(name, pool.attn.q) for name, pool in attention_pools(model).items()]
    if not projections:
        raise RecastError("the control requires attention pooling")
    with hooked(projections, after=lambda _name, _module, _inputs, queries: queries + QUERY):
        yield


@contextmanager
def changed_layer(model: nn.Module) -> Iterator[None]:
    """Change the first recast layer inside the block: a control that must change the output.

    Beside a convolution, γ is raised by `GATE`. Else W_out of two heads is swapped; one of the two is the middle of the
    kernel: on a small map the kernel's border may see only padding.
    """
    layer = next((m for m in recast_layers(model).values() if _can_change(m)), None)
    if layer is None:
        raise RecastError("the control requires a recast layer with two taps, or attention beside a convolution")
    weight = layer.gamma if isinstance(layer, AttentionBeside) else layer.weight
    original = weight.detach().clone()
    with torch.no_grad():
        if isinstance(layer, AttentionBeside):
            weight.add_(GATE)
        else:
            order, middle = list(range(layer.num_heads)), layer.num_heads // 2
            order[0], order[middle] = middle, 0
            weight.copy_(original.flatten(2)[..., order].view_as(original))
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(original)


def _can_change(layer: RecastLayer) -> bool:
    return bool(layer.content_heads) if isinstance(layer, AttentionBeside) else layer.num_heads > 1
