"""Attention whose positions are a learned bias in the content's own softmax: C-MHSA.

    y = b + Σ_h A_h X W_val W_out^h               A_h = softmax(Q_h K_hᵀ / √D + B_h)
                                                  (Lee et al. 2022, PRS, Eq. 3-5; Li et al. 2021, C-MHSA)

B_h[i, j] depends on the offset δ = key − query alone, and is a table with an entry for every offset. With Q Kᵀ = 0,
B_h = M at the head's kernel position and 0 elsewhere, a query gives that pixel 1 / (1 + (keys − 1)·e^−M) of its
attention: the convolution, in the limit.

Tokens are the pixels of the explicitly padded input, and padding is seen as any token is: where a head's position lies
on the padding of zeros, a token of zeros must be there to be looked at. Without it the head would find the same bias
everywhere, and be the mean of the image.

Shapes as in `recast.layers.functional`; R and S are the numbers of row and column offsets.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.layers.functional.backends import as_tokens, in_format_of, logits, project, softmax, times
from recast.layers.functional.maps import apply_maps, keys, queries, query_tokens
from recast.layers.functional.operands import BiasedWeights, finite_half, on_accelerator, project_values
from recast.layers.geometry import Geometry


class BiasedMaps(NamedTuple):
    """Attention of every head, (1 or B, H, N, M), rows sum to one: of the bias alone, of the content alone, of both."""

    position: Tensor
    content: Tensor
    mix: Tensor


def offset_ranges(geometry: Geometry, height: int, width: int) -> tuple[slice, slice]:
    """Return row and column offsets from any query to any key, smallest first, for an input of `height` × `width`."""
    output, padded = geometry.output_size(height, width), geometry.padded_size(height, width)
    sides = zip(geometry.anchor, output, geometry.stride, padded, strict=True)
    rows, columns = (slice(-anchor - (n - 1) * stride, size - anchor) for anchor, n, stride, size in sides)
    return rows, columns


def bias_map(relative_bias: Tensor, geometry: Geometry, height: int, width: int) -> Tensor:
    """Return B, (H, N, M): the table's entry for every pair of query and key.

    A query's keys are a window of the table, the next query's one stride before it: windows from the far end on.
    """
    sizes, counts = geometry.padded_size(height, width), geometry.output_size(height, width)
    if type(height) is int:
        windows = relative_bias
        for axis, (size, stride) in enumerate(zip(sizes, geometry.stride, strict=True)):
            windows = windows.unfold(1 + axis, size, stride)
        return windows.flip(1, 2).flatten(1, 2).flatten(2)
    rows, columns = (  # sizes in an exported program are symbols: windows require numbers
        torch.arange(size, device=relative_bias.device)
        + stride * torch.arange(count - 1, -1, -1, device=relative_bias.device)[:, None]
        for size, count, stride in zip(sizes, counts, geometry.stride, strict=True)
    )
    return relative_bias[:, rows[:, None, :, None], columns[None, :, None, :]].flatten(1, 2).flatten(2)


def biased_reference(x: Tensor, w: BiasedWeights) -> Tensor:
    """Compute y = b + Σ_h softmax(Q_h K_hᵀ / √D + B_h) X W_val W_out^h, head by head; returns (B, O, I, J)."""
    return apply_maps(x, biased_maps(x, w).mix, w)


def biased(x: Tensor, w: BiasedWeights) -> Tensor:
    """Compute `biased_reference` in a few products: logits of all heads, gathers from the shared values, and W_out."""
    geometry, heads = w.geometry, w.geometry.num_heads
    weight = w.query * (w.query.shape[0] // heads) ** -0.5
    query, key = times(weight, query_tokens(x, geometry).flatten(2)), times(w.key, geometry.pad(x).flatten(2))
    query, key = (t.reshape(x.shape[0], heads, t.shape[1] // heads, t.shape[2]) for t in (query, key))
    values = as_tokens(geometry.pad(project_values(x, w.value, w.groups)))
    attend = fused_attention if on_accelerator(x) else written_out_attention
    by_head = attend(query.transpose(2, 3), key, values, bias_map(w.relative_bias, geometry, *x.shape[-2:]))
    gathered = by_head.transpose(1, 2).flatten(2)
    return in_format_of(x, w.weight, project(x, gathered, w.weight.flatten(2).transpose(1, 2), w.bias, w))


def written_out_attention(query: Tensor, key: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Compute softmax(Q K + bias) V with the maps written out; the bias may overflow half precision.

    Q (B, H, N, D), scaled, K (B, H, D, M), and V (B, M, C), of all heads: (B, H, N, C).
    """
    scores = logits(query, key)
    maps = softmax(finite_half(scores + bias.to(scores.dtype)))
    return torch.bmm(maps.flatten(1, 2), values.to(maps.dtype)).reshape(*maps.shape[:3], values.shape[2])


def fused_attention(query: Tensor, key: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Compute the same by torch's kernels for GPUs, which hold no map and require contiguous channels."""
    query, key, values = (t.to(query.dtype).contiguous() for t in (query, key.transpose(2, 3), values))
    shared = values[:, None].expand(-1, query.shape[1], -1, -1)
    return F.scaled_dot_product_attention(query, key, shared, attn_mask=bias[None].to(query.dtype), scale=1.0)


def biased_maps(x: Tensor, w: BiasedWeights) -> BiasedMaps:
    """Return the attention maps over the padded key grid."""
    q, k, bias = queries(x, w), keys(x, w), bias_map(w.relative_bias, w.geometry, *x.shape[-2:])
    content = finite_half(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5)
    return BiasedMaps(*(torch.softmax(part, dim=-1) for part in (bias[None], content, finite_half(content + bias))))
