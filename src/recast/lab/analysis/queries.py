"""Attention maps of some queries only, for all of an early layer's would not fit into memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from recast.layers.cmhsa import CMHSA, RecastLayer
from recast.layers.functional import expand_heads, gaussian_factors
from recast.layers.functional.maps import content_rows, keys, positions, queries, under_taps
from recast.layers.gpsa import GPSA

MAX_NUMBERS = 2**18
"""Numbers that one piece of the maps may have on the CPU: what its cache holds, 1 MB in single precision."""

TRIED = 8
"""Queries of a row, and of a column, among which `telling_query` chooses."""

Rows = Callable[[Tensor], Tensor]
"""Query indices (n,) → their attention (B, H, n, M) over the padded keys."""


def rows_of(layer: RecastLayer, x: Tensor) -> Rows:
    """Return a function from queries to their maps for an input; projections and factors are computed once."""
    if isinstance(layer, CMHSA):  # A = softmax(Q Kᵀ / √D + B), as `recast.layers.functional.biased_maps` writes it out
        logits, bias = logits_and_bias(layer, x)
        return lambda at: torch.softmax(logits(at) + bias(at), dim=-1)
    # A = shift · S + gaussian · G + content · C, as `recast.layers.functional.attention_maps` writes it out
    geometry, size = layer.geometry, x.shape[-2:]
    w = expand_heads(layer.weights())
    row_factors, column_factors = gaussian_factors(w.center, w.alpha, geometry, *size)
    columns, padded = geometry.output_size(*size)[1], geometry.padded_size(*size)
    queries_at, _ = positions(geometry, size[0], size[1], x.device)
    content = content_rows(x, w) if bool(w.gates.content.any()) else None

    def rows(at: Tensor) -> Tensor:
        G = (row_factors[:, at // columns, :, None] * column_factors[:, at % columns, None, :]).flatten(2)
        S = one_hot(under_taps(geometry, queries_at[at], padded[1]), padded[0] * padded[1])
        return w.gates.mix(S[None].to(x.dtype), G[None].to(x.dtype), None if content is None else content(at))

    return rows


def content_of(layer: GPSA, x: Tensor) -> Rows:
    """Return a function from queries to their content maps C alone (`content_rows`)."""
    return content_rows(x, expand_heads(layer.weights()))


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


def telling_query(layer: GPSA, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Return the maps of the query whose maps differ most between images x, and the query's pixel (row, column).

    The maps (B, heads, height, width) are over the real pixels. At most TRIED × TRIED queries are compared; where none
    differ it is the middle one.
    """
    geometry, (height, width) = layer.geometry, x.shape[-2:]
    rows, columns = geometry.query_positions(height, width)
    chosen = torch.cartesian_prod(_spaced(len(rows)) * len(columns), _spaced(len(columns))).sum(1).to(x.device)
    maps_of = rows_of(layer, x)
    differences = torch.cat([_difference(maps_of(at)) for at in chosen.split(TRIED)])
    best = int(chosen[differences.argmax()])
    if differences.max() < 1e-4:  # rounding
        best = len(rows) // 2 * len(columns) + len(columns) // 2
    i, j = divmod(best, len(columns))
    at_rows, at_columns = geometry.pixels(height, width)
    mix = maps_of(torch.tensor([best], device=x.device))[:, :, 0].expand(len(x), -1, -1)
    maps = mix.unflatten(-1, geometry.padded_size(height, width))[..., at_rows, at_columns]
    if geometry.is_transposed:
        sources = geometry.source_pixels(height, width)
        return maps, (int(sources[0][i]), int(sources[1][j]))
    return maps, (rows[i] - at_rows.start, columns[j] - at_columns.start)


def _difference(maps: Tensor) -> Tensor:
    """Return the distance of every query's maps (B, H, n, M) from their mean over images, (n,)."""
    return (maps - maps.mean(0)).abs().sum(-1).mean((0, 1))


def _spaced(count: int) -> Tensor:
    """Return at most TRIED of `count` places, evenly apart, with the middle one."""
    step = -(-count // TRIED)
    return torch.arange(count // 2 % step, count, step)
