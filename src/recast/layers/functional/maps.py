"""The layer as the paper defines it: the attention maps S, G and C, and two backends that hold them whole.

`reference` goes head by head; everything is compared with it. `dense` takes two products. Both hold all B·H·N·M numbers
of the maps and have derivatives of any order.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.layers.functional.operands import (
    BiasedWeights,
    Weights,
    block_diagonal,
    expand_heads,
    project_out,
    project_values,
)  # fmt: skip
from recast.layers.geometry import Geometry


class AttentionMaps(NamedTuple):
    """Attention of every head, (1 or B, H, N, M); rows of the first three sum to one."""

    shift: Tensor
    gaussian: Tensor
    content: Tensor
    mix: Tensor


def shift_map(geometry: Geometry, height: int, width: int, like: Tensor) -> Tensor:
    """One-hot S, (H, N, M): head h of a query attends to the pixel under position h of the kernel."""
    rows, columns = geometry.padded_size(height, width)
    rows_at, columns_at = geometry.query_positions(height, width)
    anchors = torch.tensor([(i, j) for i in rows_at for j in columns_at], device=like.device)
    seen = anchors + torch.tensor(geometry.offsets(), device=like.device)[:, None]
    return F.one_hot(seen[..., 0] * columns + seen[..., 1], rows * columns).to(like.dtype)


def gaussian_map(center: Tensor, alpha: Tensor, geometry: Geometry, height: int, width: int) -> Tensor:
    """G = softmax_δ(−α‖δ−Δ‖²), (H, N, M), written out over all pairs of query and key; at least fp32."""
    dtype = torch.promote_types(torch.promote_types(center.dtype, alpha.dtype), torch.float32)
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
    dtype = torch.promote_types(torch.promote_types(center.dtype, alpha.dtype), torch.float32)
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


def queries(x: Tensor, w: Weights | BiasedWeights) -> Tensor:
    """Q of every output pixel, (B, H, N, D); of a layer with all content maps, as `keys`."""
    tokens = query_tokens(x, w.geometry).flatten(2).transpose(1, 2)
    return F.linear(tokens, w.query).unflatten(-1, (w.geometry.num_heads, -1)).transpose(1, 2)


def keys(x: Tensor, w: Weights | BiasedWeights) -> Tensor:
    """K of every pixel of the padded input, (B, H, M, D)."""
    tokens = w.geometry.pad(x).flatten(2).transpose(1, 2)
    return F.linear(tokens, w.key).unflatten(-1, (w.geometry.num_heads, -1)).transpose(1, 2)


def content_map(x: Tensor, w: Weights) -> Tensor:
    """C over the padded grid, (B, H, N, M); padding gets exactly 0 unless `attend_padding`.

    softmax: C = softmax(Q Kᵀ / √D). linear: C = softmax_D(Q) · softmax_tokens(K)ᵀ, positive, rows sum to one, and of
    rank D (Shen et al. 2021, Efficient Attention).
    """
    q, k, (height, width) = queries(x, w), keys(x, w), x.shape[-2:]
    hidden = ~real_keys(w.geometry, height, width, x.device) & (not w.attend_padding)
    if w.content == "linear":
        k = k.masked_fill(hidden[:, None], float("-inf"))
        return torch.softmax(q, dim=-1) @ torch.softmax(k, dim=-2).transpose(-1, -2)
    logits = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return torch.softmax(logits.masked_fill(hidden, float("-inf")), dim=-1)


def relative_entropy(maps: Tensor) -> Tensor:
    """Entropy of maps (…, N, M) over its maximum ln M, in the mean over the queries: 0 for one pixel of several, 1 for
    uniform maps, those of a single pixel too."""
    entropy, most = torch.special.entr(maps).sum(-1).mean(-1), math.log(maps.shape[-1])
    return entropy / most if most else torch.ones_like(entropy)


def attention_maps(x: Tensor, w: Weights) -> AttentionMaps:
    """S, G, C and their gated mix over the padded key grid; G as an outer product of its two factors."""
    w = expand_heads(w)
    height, width = x.shape[-2:]
    rows, columns = gaussian_factors(w.center, w.alpha, w.geometry, height, width)
    G = torch.einsum("hiy,hjx->hijyx", rows, columns).flatten(1, 2).flatten(2)[None].to(x.dtype)
    C, S = content_map(x, w), shift_map(w.geometry, height, width, x)[None]
    return AttentionMaps(S, G, C, w.gates.mix(S, G, C))


# --- the layer with its maps written out ------------------------------------------------------------------------------


def reference(x: Tensor, w: Weights) -> Tensor:
    """y = b + Σ_h A_h X W_val W_out^h, (B, C, height, width) → (B, O, I, J)."""
    w = expand_heads(w)
    height, width = x.shape[-2:]
    S = shift_map(w.geometry, height, width, x)
    G = gaussian_map(w.center, w.alpha, w.geometry, height, width).to(x.dtype)
    return apply_maps(x, w.gates.mix(S, G, content_map(x, w)), w)


def apply_maps(x: Tensor, A: Tensor, w: Weights | BiasedWeights) -> Tensor:
    """y = b + Σ_h A_h X W_val W_out^h for maps A (B, H, N, M), head by head: (B, C, height, width) → (B, O, I, J)."""
    tokens = w.geometry.pad(x).flatten(2).transpose(1, 2)
    values = tokens if w.value is None else tokens @ block_diagonal(w.value, w.groups).T
    output = torch.zeros((), dtype=x.dtype, device=x.device)
    for h, W_out in enumerate(w.weight.flatten(2).unbind(-1)):
        output = output + A[:, h] @ values @ block_diagonal(W_out, w.groups).T
    if w.bias is not None:
        output = output + w.bias
    return output.transpose(1, 2).unflatten(-1, w.geometry.output_size(*x.shape[-2:]))


def gather(x: Tensor, w: Weights) -> Tensor:
    """What every head gathers from the shared values, A_h X W_val: (B, C, H, I, J).

    A convolution gathers the pixel under each position of its kernel (im2col); here the gather is a mix of maps.
    """
    values = w.geometry.pad(project_values(x, w.value, w.groups)).flatten(2)
    gathered = values @ attention_maps(x, w).mix.to(values.dtype).flatten(1, 2).transpose(-1, -2)
    return gathered.unflatten(-1, (w.geometry.num_heads, *w.geometry.output_size(*x.shape[-2:])))


def dense(x: Tensor, w: Weights) -> Tensor:
    """One product of the mixed maps with the shared values, one with W_out: a 1×1 convolution of what was gathered."""
    return project_out(gather(x, w), w.weight.flatten(2), w.bias, w.groups)
