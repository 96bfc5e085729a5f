"""The layer as the paper defines it: the attention maps S, G and C, and two backends that hold them whole.

`reference` goes head by head; everything is compared with it. `dense` takes two products. Both hold all B·H·N·M numbers
of the maps and have derivatives of any order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.layers.functional.operands import (
    BiasedWeights,
    Weights,
    block_diagonal,
    constant,
    expand_heads,
    finite_half,
    project_out,
    project_values,
)
from recast.layers.geometry import Geometry


class AttentionMaps(NamedTuple):
    """Attention of every head, (1 or B, H, N, M); rows of the first three sum to one."""

    shift: Tensor
    gaussian: Tensor
    content: Tensor
    mix: Tensor


def positions(geometry: Geometry, height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return rows and columns of all queries (N, 2) and keys (M, 2) on the padded grid, row-major."""
    grids = geometry.query_positions(height, width), map(range, geometry.padded_size(height, width))
    queries_at, keys_at = (
        torch.cartesian_prod(*(torch.tensor(axis, device=device) for axis in axes)) for axes in grids
    )
    return queries_at, keys_at


def shift_map(geometry: Geometry, height: int, width: int, like: Tensor) -> Tensor:
    """Return the one-hot S, (H, N, M): head h attends to the pixel under position h of the kernel."""
    rows, columns = geometry.padded_size(height, width)
    queries_at, _ = positions(geometry, height, width, like.device)
    at = queries_at + torch.tensor(geometry.offsets(), device=like.device)[:, None]
    return F.one_hot(at[..., 0] * columns + at[..., 1], rows * columns).to(like.dtype)


def gaussian_map(center: Tensor, alpha: Tensor, geometry: Geometry, height: int, width: int) -> Tensor:
    """Return G = softmax_δ(−α‖δ−Δ‖²), (H, N, M), over all pairs of query and key; at least fp32."""
    dtype = torch.promote_types(torch.promote_types(center.dtype, alpha.dtype), torch.float32)
    queries_at, keys_at = positions(geometry, height, width, center.device)
    delta = (keys_at - queries_at[:, None]).to(dtype)
    distance = (delta - center.to(dtype)[:, None, None]).square().sum(-1)
    return torch.softmax(-alpha.to(dtype)[:, None, None] * distance, dim=-1)


def gaussian_factors(
    center: Tensor, alpha: Tensor, geometry: Geometry, height: int, width: int
) -> tuple[Tensor, Tensor]:
    """Return the factors R (H, I, Y) and K (H, J, X) of G: G[h, ij, yx] = R[h, i, y] · K[h, j, x].

    Exact on any rectangle, borders included, because ‖δ−Δ‖² is a sum over the two axes. At least fp32: half precision
    cannot hold the squared distances of a large map. Tails far below rounding are 0: numbers below 1e-38 are slow.
    """
    dtype = torch.promote_types(torch.promote_types(center.dtype, alpha.dtype), torch.float32)
    offsets = constant(_offsets, geometry, height, width, dtype, center.device)
    centers, steepness = center.to(dtype).T[:, None, :, None], -alpha.to(dtype)[:, None]
    factors: list[Tensor] = []
    for offset, at in zip(offsets, centers.chunk(len(offsets)), strict=True):
        gaussians = torch.softmax(steepness * (offset - at).square(), dim=-1)
        factors += F.hardshrink(gaussians, torch.finfo(dtype).eps ** 2).transpose(1, 2).unbind()
    return factors[0], factors[1]


def _offsets(geometry: Geometry, height: int, width: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return offsets from queries to keys in rows, (1, I, 1, Y), and in columns; in one tensor if sizes agree."""
    axes = geometry.padded_size(height, width), geometry.output_size(height, width), geometry.anchor, geometry.stride
    offsets = []
    for size, count, anchor, stride in zip(*axes, strict=True):
        keys_at, steps = (torch.arange(n, dtype=dtype, device=device) for n in (size, count))
        offsets.append((keys_at - (anchor + stride * steps)[:, None])[None, :, None])
    is_fixed = type(height) is int and not torch.compiler.is_compiling()  # else sizes are symbols
    return [torch.cat(offsets)] if is_fixed and offsets[0].shape == offsets[1].shape else offsets


def _shifts(geometry: Geometry, height: int, width: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the factors of S, one-hot: Gaussians so sharp that all but one pixel underflow to 0."""
    center = torch.tensor(geometry.offsets(), dtype=dtype, device=device)
    return gaussian_factors(center, torch.full_like(center[:, 0], 1e3), geometry, height, width)


def real_keys(geometry: Geometry, height: int, width: int, device: torch.device) -> Tensor:
    """Return a mask (M,): True where a key is a pixel of the image, False where it is padding."""
    rows, columns = geometry.padded_size(height, width)
    mask = torch.zeros(rows, columns, dtype=torch.bool, device=device)
    mask[geometry.pixels(height, width)] = True
    return mask.flatten()


def query_tokens(x: Tensor, geometry: Geometry) -> Tensor:
    """Return the query token of every output pixel, (B, C, I, J): at its anchor, or `source_pixels`."""
    height, width = x.shape[-2:]
    if geometry.is_transposed:
        at_rows, at_columns = geometry.source_pixels(height, width)
        return x[..., at_rows, :][..., at_columns]
    top, _, left, _ = geometry.padding_at(height, width)
    (c0, c1), (r0, r1), (s0, s1) = geometry.anchor, geometry.reach, geometry.stride
    # no anchor lies on padding: tested without the size, which is a symbol in an exported program
    if not (geometry.same or all(p <= c for p, c in zip(geometry.padding, (c0, r0 - c0, c1, r1 - c1), strict=True))):
        x, top, left = geometry.pad(x), 0, 0
    rows, columns = geometry.output_size(height, width)
    c0, c1 = c0 - top, c1 - left
    return x[..., c0 : c0 + (rows - 1) * s0 + 1 : s0, c1 : c1 + (columns - 1) * s1 + 1 : s1]


def queries(x: Tensor, w: Weights | BiasedWeights) -> Tensor:
    """Return Q of every output pixel, (B, H, N, D). Like `keys`, it needs all content maps."""
    tokens = query_tokens(x, w.geometry).flatten(2).transpose(1, 2)
    return finite_half(F.linear(tokens, w.query)).unflatten(-1, (w.geometry.num_heads, -1)).transpose(1, 2)


def keys(x: Tensor, w: Weights | BiasedWeights) -> Tensor:
    """Return K of every pixel of the padded input, (B, H, M, D)."""
    tokens = w.geometry.pad(x).flatten(2).transpose(1, 2)
    return finite_half(F.linear(tokens, w.key)).unflatten(-1, (w.geometry.num_heads, -1)).transpose(1, 2)


def content_rows(x: Tensor, w: Weights) -> Callable[[Tensor | slice], Tensor]:
    """Return a function from query indices (n,) to rows of C, (B, H, n, M), also for heads whose gate is 0.

    Padding gets exactly 0 unless `attend_padding`. softmax: C = softmax(Q Kᵀ / √D). linear: C = softmax_D(Q) ·
    softmax_tokens(K)ᵀ, positive, rows sum to one, and of rank D (Shen et al. 2021, Efficient Attention).
    """
    q, k, (height, width) = queries(x, w), keys(x, w), x.shape[-2:]
    hidden = ~real_keys(w.geometry, height, width, x.device) & (not w.attend_padding)
    if w.content == "linear":
        shares = torch.softmax(k.masked_fill(hidden[:, None], float("-inf")), dim=-2).transpose(-1, -2)
        return lambda at: torch.softmax(q[:, :, at], dim=-1) @ shares
    k, scale = k.transpose(-1, -2), q.shape[-1] ** -0.5
    return lambda at: torch.softmax(finite_half(q[:, :, at] @ k * scale).masked_fill(hidden, float("-inf")), dim=-1)


def content_map(x: Tensor, w: Weights) -> Tensor:
    """Return C of all queries over the padded grid, (B, H, N, M)."""
    return content_rows(x, w)(slice(None))


def attention_maps(x: Tensor, w: Weights) -> AttentionMaps:
    """Return S, G, C and their gated mix over the padded key grid; G as an outer product of its two factors."""
    w = expand_heads(w)
    height, width = x.shape[-2:]
    rows, columns = gaussian_factors(w.center, w.alpha, w.geometry, height, width)
    G = outer(rows, columns)[None].to(x.dtype)
    C, S = content_map(x, w), shift_map(w.geometry, height, width, x)[None]
    return AttentionMaps(S, G, C, w.mix(S, G, C))


# --- the layer with its maps written out ------------------------------------------------------------------------------


def reference(x: Tensor, w: Weights) -> Tensor:
    """Compute y = b + Σ_h A_h X W_val W_out^h, (B, C, H, W) → (B, O, I, J)."""
    w = expand_heads(w)
    height, width = x.shape[-2:]
    S = shift_map(w.geometry, height, width, x)
    G = gaussian_map(w.center, w.alpha, w.geometry, height, width).to(x.dtype)
    return apply_maps(x, w.mix(S, G, content_map(x, w)), w)


def apply_maps(x: Tensor, A: Tensor, w: Weights | BiasedWeights) -> Tensor:
    """Compute y = b + Σ_h A_h X W_val W_out^h for maps A (B, H, N, M), head by head; returns (B, O, I, J)."""
    tokens = w.geometry.pad(x).flatten(2).transpose(1, 2)
    values = tokens if w.value is None else tokens @ block_diagonal(w.value, w.groups).T
    output = torch.zeros((), dtype=x.dtype, device=x.device)
    for h, W_out in enumerate(w.weight.flatten(2).unbind(-1)):
        output = output + A[:, h] @ values @ block_diagonal(W_out, w.groups).T
    if w.bias is not None:
        output = output + w.bias
    return output.transpose(1, 2).unflatten(-1, w.geometry.output_size(*x.shape[-2:]))


def gather(x: Tensor, w: Weights) -> Tensor:
    """Return the gathers A_h X W_val of every head from the shared values, (B, C, H, I, J).

    A convolution gathers the pixel under each position of its kernel (im2col); here the gather is a mix of maps.
    """
    values = w.geometry.pad(project_values(x, w.value, w.groups)).flatten(2)
    gathered = values @ attention_maps(x, w).mix.to(values.dtype).flatten(1, 2).transpose(-1, -2)
    return gathered.unflatten(-1, (w.geometry.num_heads, *w.geometry.output_size(*x.shape[-2:])))


def value_grid(values: Tensor, w: Weights) -> Tensor:
    """Pad V (B, C, H, W) to the tokens that add something to a gather, (B, C, ·, ·).

    Zero tokens take part in the Gaussian's softmax, but add nothing to its sum: the image's own pixels are enough.
    """
    return w.geometry.pad(values) if w.gathers_padding else values


def weighted_factors(x: Tensor, w: Weights, of_shift: bool = False) -> tuple[Tensor, Tensor]:
    """Return `gaussian_factors` over the pixels of `value_grid`, or those of S, with the coefficients in the rows."""
    size, share = x.shape[2:], w.shift if of_shift else w.gates.gaussian
    if of_shift:
        rows, columns = constant(_shifts, w.geometry, *size, w.weight.dtype, x.device)
    else:
        rows, columns = gaussian_factors(w.center, w.alpha, w.geometry, *size)
    assert share is not None
    if not w.gathers_padding:
        at = w.geometry.pixels(*size)
        rows, columns = rows[..., at[0]], columns[..., at[1]]
    return share.to(rows.dtype)[:, None, None] * rows, columns


def outer(rows: Tensor, columns: Tensor, maps: Tensor | None = None) -> Tensor:
    """Return maps (…, N, M) from their factors (…, I, Y) and (…, J, X), added to `maps`."""
    sizes = rows.shape[-2], columns.shape[-2], rows.shape[-1], columns.shape[-1]
    rows, columns = rows[..., :, None, :, None], columns[..., None, :, None, :]
    product = rows * columns if maps is None else torch.addcmul(maps.reshape(-1, *sizes), rows, columns)
    return product.flatten(-2).flatten(-3, -2)


def dense(x: Tensor, w: Weights) -> Tensor:
    """Multiply the mixed maps with the shared values, then the gathers with W_out (a 1×1 convolution)."""
    return project_out(gather(x, w), w.weight.flatten(2), w.bias, w.groups)
