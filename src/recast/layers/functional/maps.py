"""The attention maps written out: S the shift, G the Gaussian (also as a Kronecker product), C the content."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.layers.functional.weights import Weights, expand_heads
from recast.layers.geometry import Geometry


class AttentionMaps(NamedTuple):
    """Attention of every head, (1 or B, H, N, M); rows of the first three sum to one."""

    shift: Tensor
    gaussian: Tensor
    content: Tensor
    mix: Tensor


def _at_least_float32(*tensors: Tensor) -> torch.dtype:
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def shift_map(geometry: Geometry, height: int, width: int, like: Tensor) -> Tensor:
    """One-hot S, (H, N, M): head h of a query attends to the pixel under tap h."""
    _, columns = geometry.padded_size(height, width)
    rows_at, columns_at = geometry.query_positions(height, width)
    anchors = torch.tensor([(i, j) for i in rows_at for j in columns_at], device=like.device)
    taps = anchors + torch.tensor(geometry.offsets(), device=like.device)[:, None]
    num_keys = columns * geometry.padded_size(height, width)[0]
    return F.one_hot(taps[..., 0] * columns + taps[..., 1], num_keys).to(like.dtype)


def gaussian_map(center: Tensor, alpha: Tensor, geometry: Geometry, height: int, width: int) -> Tensor:
    """G = softmax_δ(−α‖δ−Δ‖²), (H, N, M), written out over all pairs of query and key; at least fp32."""
    dtype = _at_least_float32(center, alpha)
    rows, columns = geometry.padded_size(height, width)
    rows_at, columns_at = geometry.query_positions(height, width)
    keys_at = torch.tensor([(y, x) for y in range(rows) for x in range(columns)], dtype=dtype, device=center.device)
    queries_at = torch.tensor([(i, j) for i in rows_at for j in columns_at], dtype=dtype, device=center.device)
    delta = keys_at[None, :] - queries_at[:, None]
    distance = (delta - center.to(dtype)[:, None, None]).square().sum(-1)
    return torch.softmax(-alpha.to(dtype)[:, None, None] * distance, dim=-1)


def gaussian_factors(
    center: Tensor, alpha: Tensor, geometry: Geometry, height: int, width: int
) -> tuple[Tensor, Tensor]:
    """G as a Kronecker product of softmaxes R (H, I, Y) and K (H, J, X): G[h, ij, yx] = R[h, i, y] · K[h, j, x].

    Exact on any rectangle, borders included, because ‖δ−Δ‖² is a sum over the two axes. At least fp32: half precision
    cannot hold the squared distances of a large map.
    """
    dtype = _at_least_float32(center, alpha)
    factors = []
    for axis, (size, at) in enumerate(
        zip(geometry.padded_size(height, width), geometry.query_positions(height, width), strict=True)
    ):
        keys_at = torch.arange(size, dtype=dtype, device=center.device)
        queries_at = torch.arange(at.start, at.stop, at.step, dtype=dtype, device=center.device)
        delta = keys_at - queries_at[:, None] - center.to(dtype)[:, axis, None, None]
        factors.append(torch.softmax(-alpha.to(dtype)[:, None, None] * delta.square(), dim=-1))
    return factors[0], factors[1]


def real_keys(geometry: Geometry, height: int, width: int, device: torch.device) -> Tensor:
    """Boolean (M,): True where a key is a pixel of the image, False where it is padding."""
    rows, columns = geometry.padded_size(height, width)
    mask = torch.zeros(rows, columns, dtype=torch.bool, device=device)
    mask[geometry.pixels(height, width)] = True
    return mask.flatten()


def query_tokens(x: Tensor, geometry: Geometry) -> Tensor:
    """The token of every output pixel's query, (B, C, I, J): at its anchor, or a transposed convolution's source."""
    height, width = x.shape[-2:]
    if geometry.is_transposed:
        at_rows, at_columns = geometry.source_pixels(height, width)
        return x[..., at_rows, :][..., at_columns]
    rows, columns = geometry.query_positions(height, width)
    top, _, left, _ = geometry.padding_at(height, width)
    if rows[0] >= top and rows[-1] < top + height and columns[0] >= left and columns[-1] < left + width:
        tokens = x  # no anchor lies on padding
    else:
        tokens, top, left = geometry.pad(x), 0, 0
    return tokens[
        ..., rows.start - top : rows.stop - top : rows.step, columns.start - left : columns.stop - left : columns.step
    ]


def queries(x: Tensor, query: Tensor, num_heads: int, geometry: Geometry) -> Tensor:
    """Q of every output pixel, (B, H, N, D)."""
    tokens = query_tokens(x, geometry).flatten(2).transpose(1, 2)
    return F.linear(tokens, query).unflatten(-1, (num_heads, -1)).transpose(1, 2)


def keys(x: Tensor, key: Tensor, num_heads: int) -> Tensor:
    """K of every pixel of `x`, (B, H, pixels, D)."""
    return F.linear(x.flatten(2).transpose(1, 2), key).unflatten(-1, (num_heads, -1)).transpose(1, 2)


def content_map(
    x: Tensor, query: Tensor, key: Tensor, num_heads: int, geometry: Geometry, attend_padding: bool = False
) -> Tensor:
    """C = softmax(Q Kᵀ / √D), (B, H, N, M), over the padded grid; padding gets exactly 0 unless `attend_padding`."""
    height, width = x.shape[-2:]
    q, k = queries(x, query, num_heads, geometry), keys(geometry.pad(x), key, num_heads)
    logits = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if not attend_padding:
        logits = logits.masked_fill(~real_keys(geometry, height, width, x.device), float("-inf"))
    return torch.softmax(logits, dim=-1)


def linear_content_map(
    x: Tensor, query: Tensor, key: Tensor, num_heads: int, geometry: Geometry, attend_padding: bool = False
) -> Tensor:
    """C = softmax_D(Q) · softmax_tokens(K)ᵀ, (B, H, N, M): positive, rows sum to one, and of rank D (Shen et al. 2021,
    Efficient Attention). Padding gets exactly 0 unless `attend_padding`."""
    height, width = x.shape[-2:]
    q, k = queries(x, query, num_heads, geometry), keys(geometry.pad(x), key, num_heads)
    if not attend_padding:
        k = k.masked_fill(~real_keys(geometry, height, width, x.device)[:, None], float("-inf"))
    return torch.softmax(q, dim=-1) @ torch.softmax(k, dim=-2).transpose(-1, -2)


CONTENT_MAPS: dict[str, Callable[..., Tensor]] = {"softmax": content_map, "linear": linear_content_map}


def attention_maps(
    x: Tensor, w: Weights, geometry: Geometry, attend_padding: bool = False, content: str = "softmax"
) -> AttentionMaps:
    """S, G, C and their gated mix over the padded key grid; G as an outer product of its two factors."""
    w = expand_heads(w, geometry)
    height, width = x.shape[-2:]
    rows, columns = gaussian_factors(w.center, w.alpha, geometry, height, width)
    G = torch.einsum("hiy,hjx->hijyx", rows, columns).flatten(1, 2).flatten(2)[None].to(x.dtype)
    C = CONTENT_MAPS[content](x, w.query, w.key, w.num_heads, geometry, attend_padding)
    S = shift_map(geometry, height, width, x)[None]
    mix = w.gates.gaussian[:, None, None] * G + w.gates.content[:, None, None] * C
    if w.gates.shift is not None:
        mix = mix + w.gates.shift[:, None, None] * S
    return AttentionMaps(S, G, C, mix)
