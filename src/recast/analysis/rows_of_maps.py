"""Attention maps of some queries only: all of an early layer's would not fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from recast.layers.cmhsa import CMHSA, RecastLayer
from recast.layers.functional import expand_heads, gaussian_factors
from recast.layers.functional.maps import keys, queries, real_keys
from recast.layers.geometry import Geometry
from recast.layers.gpsa import GPSA

MAX_NUMBERS = 2**18
"""Numbers that one piece of the maps may have on the CPU: what its cache holds, 1 MB in single precision."""
MAX_NUMBERS_ON_ACCELERATORS = 2**24

Rows = Callable[[Tensor], Tensor]
"""Query indices (n,) → their attention (B, H, n, M) over the padded keys."""


def positions(geometry: Geometry, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of all queries (N, 2) and keys (M, 2) on the padded grid, row-major."""
    rows_at, columns_at = geometry.query_positions(height, width)
    rows, columns = geometry.padded_size(height, width)
    return (
        torch.cartesian_prod(torch.tensor(list(rows_at)), torch.tensor(list(columns_at))),
        torch.cartesian_prod(torch.arange(rows), torch.arange(columns)),
    )


def pieces(layer: RecastLayer, x: Tensor, chosen: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The gated mix of maps A of the `chosen` queries (n,) for an input x (B, C, height, width), in pieces that fit:
    pairs of query indices (q,) and maps (b, H, q, M), b images each time. With every content gate at 0 the maps are
    the same for all images, and are given once, b = 1.

    The numbers are those of `layer.attention(x)`, to rounding.
    """
    if not isinstance(layer, CMHSA) and not bool(layer.coefficients().content.any()):
        x = x[:1]
    rows, columns = layer.geometry.padded_size(*x.shape[-2:])
    one = layer.num_heads * rows * columns
    most = MAX_NUMBERS if x.device.type == "cpu" else MAX_NUMBERS_ON_ACCELERATORS
    images = max(1, most // (one * len(chosen)))
    at_once = max(1, most // one)
    for some in x.split(images):
        maps = rows_of(layer, some)
        for at in chosen.split(at_once):
            yield at, maps(at)


def rows_of(layer: RecastLayer, x: Tensor) -> Rows:
    """The function that gives any queries' maps of a layer for an input; projections and factors are computed once."""
    return _biased_rows(layer, x) if isinstance(layer, CMHSA) else _gated_rows(layer, x)


def _gated_rows(layer: GPSA, x: Tensor) -> Rows:
    """A = shift · S + gaussian · G + content · C, as `recast.layers.functional.attention_maps` writes it out."""
    geometry = layer.geometry
    w = expand_heads(layer.weights(), geometry)
    height, width = x.shape[-2:]
    row_factors, column_factors = gaussian_factors(w.center, w.alpha, geometry, height, width)
    _, output_columns = geometry.output_size(height, width)
    queries_at, _ = (at.to(x.device) for at in positions(geometry, height, width))
    padded_columns = geometry.padded_size(height, width)[1]
    taps = torch.tensor(geometry.offsets(), device=x.device)
    content = content_of(layer, x) if bool(w.gates.content.any()) else None

    def rows(at: Tensor) -> Tensor:
        i, j = at // output_columns, at % output_columns
        gaussian = (row_factors[:, i, :, None] * column_factors[:, j, None, :]).flatten(2).to(x.dtype)
        mix = w.gates.gaussian[:, None, None] * gaussian
        if w.gates.shift is not None:
            under = queries_at[at] + taps[:, None]
            index = (under[..., 0] * padded_columns + under[..., 1])[..., None]
            mix = mix.scatter_add(2, index, w.gates.shift[:, None, None].expand(index.shape).to(mix.dtype))
        mix = mix[None]
        return mix if content is None else mix + w.gates.content[:, None, None] * content(at)

    return rows


def content_of(layer: GPSA, x: Tensor) -> Rows:
    """The function that gives any queries' content maps C alone, also those of heads whose gate is 0."""
    geometry, config = layer.geometry, layer.config
    w = expand_heads(layer.weights(), geometry)
    q, k = queries(x, w.query, w.num_heads, geometry), keys(geometry.pad(x), w.key, w.num_heads)
    height, width = x.shape[-2:]
    mask = None if config.attend_padding else ~real_keys(geometry, height, width, x.device)
    return partial(_linear_content if config.content == "linear" else _softmax_content, q, k, mask)


def _softmax_content(q: Tensor, k: Tensor, mask: Tensor | None, at: Tensor) -> Tensor:
    logits = q[:, :, at] @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return torch.softmax(logits if mask is None else logits.masked_fill(mask, float("-inf")), dim=-1)


def _linear_content(q: Tensor, k: Tensor, mask: Tensor | None, at: Tensor) -> Tensor:
    k = k if mask is None else k.masked_fill(mask[:, None], float("-inf"))
    return torch.softmax(q[:, :, at], dim=-1) @ torch.softmax(k, dim=-2).transpose(-1, -2)


def _biased_rows(layer: CMHSA, x: Tensor) -> Rows:
    """A = softmax(Q Kᵀ / √D + B), as `recast.layers.functional.biased_maps` writes it out."""
    geometry, (height, width) = layer.geometry, x.shape[-2:]
    w = layer.weights(height, width)
    q, k = queries(x, w.query, w.num_heads, geometry), keys(geometry.pad(x), w.key, w.num_heads)
    rows, columns = geometry.padded_size(height, width)
    windows = w.relative_bias.unfold(1, rows, geometry.stride[0]).unfold(2, columns, geometry.stride[1])
    output_rows, output_columns = geometry.output_size(height, width)

    def biased(at: Tensor) -> Tensor:
        # a query's keys are a window of the table, the next query's one stride before it
        bias = windows[:, output_rows - 1 - at // output_columns, output_columns - 1 - at % output_columns].flatten(2)
        return torch.softmax(q[:, :, at] @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias, dim=-1)

    return biased
