"""C-MHSA's maps of some queries only, for all of an early layer's would not fit into memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from recast.layers.cmhsa import CMHSA
from recast.layers.functional.maps import keys, queries

Rows = Callable[[Tensor], Tensor]
"""Query indices (n,) → their attention (B, H, n, M) over the padded keys."""


def rows_of(layer: CMHSA, x: Tensor) -> Rows:
    """Return a function from queries to their maps A = softmax(Q Kᵀ / √D + B); projections are computed once."""
    logits, bias = logits_and_bias(layer, x)
    return lambda at: torch.softmax(logits(at) + bias(at), dim=-1)


def logits_and_bias(layer: CMHSA, x: Tensor) -> tuple[Rows, Rows]:
    """Return functions from queries of a C-MHSA layer to Q Kᵀ / √D, (B, H, n, M), and to the bias B, (H, n, M)."""
    geometry, (height, width) = layer.geometry, x.shape[-2:]
    w = layer.weights(height, width)
    q, k = queries(x, w), keys(x, w)
    rows, columns = geometry.padded_size(height, width)
    windows = w.relative_bias.unfold(1, rows, geometry.stride[0]).unfold(2, columns, geometry.stride[1])
    down, right = geometry.output_size(height, width)
    # a query's keys are a window of the table, the next query's one stride before it
    return (
        lambda at: q[:, :, at] @ k.transpose(-1, -2) * q.shape[-1] ** -0.5,
        lambda at: windows[:, down - 1 - at // right, right - 1 - at % right].flatten(2),
    )
