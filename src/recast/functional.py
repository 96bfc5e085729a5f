"""Gated positional self-attention as pure functions: `reference` reads like the paper, `dense` and `split` are fast.

    y = b + Σ_h A_h X W_val W_out^h                A_h = shift_h · S_h + gaussian_h · G_h + content_h · C_h

    S_h   the shift to tap h: query i attends to the one token at its anchor + tap offset (a convolution)
    G_h   softmax over tokens of −α_h ‖δ − Δ_h‖²   (d'Ascoli et al. 2021, Eq. 4)
    C_h   softmax over tokens of Q_h K_hᵀ / √D_h   (Eq. 1); padding tokens are masked out, never out of S_h and G_h

The three coefficients of a head sum to one (`linear_gates`, `sigmoid_gates`).

Shapes: B batch, C input channels, O output channels, g groups, H heads, D head width, N queries (output pixels,
row-major), M keys (pixels of the padded input, row-major), I×J the query grid, Y×X the key grid. All functions agree to
rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.geometry import Geometry

MERGE_RATIO = 2
"""`split` mixes the maps before it multiplies the values while a map has at most this many keys per channel."""


class Gates(NamedTuple):
    """Coefficients of the three maps of every head, (H,) each; they sum to one. `shift=None` means zero for all."""

    shift: Tensor | None
    gaussian: Tensor
    content: Tensor


class Weights(NamedTuple):
    """All tensors of a layer. W_val is applied as X · valueᵀ (the layout of `nn.Linear`), block-diagonal in groups."""

    weight: Tensor
    """(O, C/g, kernel rows, kernel columns): W_out^h is `weight[:, :, a, c]ᵀ`, exactly a convolution's kernel."""
    bias: Tensor | None
    """(O,), added once."""
    value: Tensor | None
    """(C, C/g) or None for the identity (depthwise layers)."""
    query: Tensor
    """(H·D, C), heads in order."""
    key: Tensor
    """(H·D, C), heads in order."""
    center: Tensor
    """Δ, (H, 2): rows and columns from the query's anchor, in pixels."""
    alpha: Tensor
    """Locality strength α > 0, (H,), in 1/pixel²."""
    gates: Gates


class AttentionMaps(NamedTuple):
    """Attention of every head, (1 or B, H, N, M); rows of the first three sum to one."""

    shift: Tensor
    gaussian: Tensor
    content: Tensor
    mix: Tensor


def linear_gates(gamma: Tensor, s: Tensor) -> Gates:
    """A = (1−γ)·[(1−s)·S + s·G] + γ·C: at γ = s = 0 the convolution itself, with live gradients."""
    return Gates((1 - gamma) * (1 - s), (1 - gamma) * s, gamma)


def sigmoid_gates(lam: Tensor) -> Gates:
    """A = σ(λ)·G + (1−σ(λ))·C (d'Ascoli et al. 2021, Eq. 7)."""
    return Gates(None, torch.sigmoid(lam), torch.sigmoid(-lam))


# --- maps -------------------------------------------------------------------------------------------------------------


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
    keys = torch.tensor([(y, x) for y in range(rows) for x in range(columns)], dtype=dtype, device=center.device)
    queries = torch.tensor([(i, j) for i in rows_at for j in columns_at], dtype=dtype, device=center.device)
    delta = keys[None, :] - queries[:, None]
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
        keys = torch.arange(size, dtype=dtype, device=center.device)
        queries = torch.arange(at.start, at.stop, at.step, dtype=dtype, device=center.device)
        delta = keys - queries[:, None] - center.to(dtype)[:, axis, None, None]
        factors.append(torch.softmax(-alpha.to(dtype)[:, None, None] * delta.square(), dim=-1))
    return factors[0], factors[1]


def real_keys(geometry: Geometry, height: int, width: int, device: torch.device) -> Tensor:
    """Boolean (M,): True where a key is a pixel of the image, False where it is padding."""
    rows, columns = geometry.padded_size(height, width)
    mask = torch.zeros(rows, columns, dtype=torch.bool, device=device)
    mask[geometry.pixels(height, width)] = True
    return mask.flatten()


def _queries(x: Tensor, query: Tensor, num_heads: int, geometry: Geometry) -> Tensor:
    """Q of every output pixel, (B, H, N, D): the token at its anchor, or a transposed convolution's source pixel."""
    height, width = x.shape[-2:]
    if geometry.is_transposed:
        at_rows, at_columns = geometry.source_pixels(height, width)
        tokens = x[..., at_rows, :][..., at_columns]
    else:
        rows, columns = geometry.query_positions(height, width)
        tokens = geometry.pad(x)[..., rows.start : rows.stop : rows.step, columns.start : columns.stop : columns.step]
    return F.linear(tokens.flatten(2).transpose(1, 2), query).unflatten(-1, (num_heads, -1)).transpose(1, 2)


def _keys(x: Tensor, key: Tensor, num_heads: int) -> Tensor:
    """K of every pixel of `x`, (B, H, pixels, D)."""
    return F.linear(x.flatten(2).transpose(1, 2), key).unflatten(-1, (num_heads, -1)).transpose(1, 2)


def content_map(
    x: Tensor, query: Tensor, key: Tensor, num_heads: int, geometry: Geometry, attend_padding: bool = False
) -> Tensor:
    """C = softmax(Q Kᵀ / √D), (B, H, N, M), over the padded grid; padding gets exactly 0 unless `attend_padding`."""
    height, width = x.shape[-2:]
    q, k = _queries(x, query, num_heads, geometry), _keys(geometry.pad(x), key, num_heads)
    logits = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if not attend_padding:
        logits = logits.masked_fill(~real_keys(geometry, height, width, x.device), float("-inf"))
    return torch.softmax(logits, dim=-1)


# --- three ways to the same output -----------------------------------------------------------------------------------


def reference(x: Tensor, w: Weights, geometry: Geometry, groups: int = 1, attend_padding: bool = False) -> Tensor:
    """The definition, head by head, every map written out: (B, C, height, width) → (B, O, I, J). Slow, and kept."""
    height, width = x.shape[-2:]
    num_heads = geometry.num_heads
    tokens = geometry.pad(x).flatten(2).transpose(1, 2)
    values = tokens if w.value is None else tokens @ _block_diagonal(w.value, groups).T
    S = shift_map(geometry, height, width, x)
    G = gaussian_map(w.center, w.alpha, geometry, height, width).to(x.dtype)
    C = content_map(x, w.query, w.key, num_heads, geometry, attend_padding)
    output = torch.zeros((), dtype=x.dtype, device=x.device)
    for h, tap in enumerate(w.weight.flatten(2).unbind(-1)):
        A = w.gates.gaussian[h] * G[h] + w.gates.content[h] * C[:, h]
        if w.gates.shift is not None:
            A = A + w.gates.shift[h] * S[h]
        output = output + A @ values @ _block_diagonal(tap, groups).T
    if w.bias is not None:
        output = output + w.bias
    return output.transpose(1, 2).unflatten(-1, geometry.output_size(height, width))


def attention_maps(x: Tensor, w: Weights, geometry: Geometry, attend_padding: bool = False) -> AttentionMaps:
    """S, G, C and their gated mix over the padded key grid; G as an outer product of its two factors."""
    height, width = x.shape[-2:]
    rows, columns = gaussian_factors(w.center, w.alpha, geometry, height, width)
    G = torch.einsum("hiy,hjx->hijyx", rows, columns).flatten(1, 2).flatten(2)[None].to(x.dtype)
    C = content_map(x, w.query, w.key, geometry.num_heads, geometry, attend_padding)
    S = shift_map(geometry, height, width, x)[None]
    mix = w.gates.gaussian[:, None, None] * G + w.gates.content[:, None, None] * C
    if w.gates.shift is not None:
        mix = mix + w.gates.shift[:, None, None] * S
    return AttentionMaps(S, G, C, mix)


def gather(x: Tensor, w: Weights, geometry: Geometry, groups: int = 1, attend_padding: bool = False) -> Tensor:
    """What every head gathers from the shared values, A_h X W_val: (B, C, H, I, J).

    A convolution gathers the pixel under each tap (im2col); here the gather is a mix of attention maps.
    """
    mix = attention_maps(x, w, geometry, attend_padding).mix
    values = geometry.pad(project_values(x, w.value, groups)).flatten(2)
    gathered = values @ mix.to(values.dtype).flatten(1, 2).transpose(-1, -2)
    return gathered.unflatten(-1, (geometry.num_heads, *geometry.output_size(*x.shape[-2:])))


def dense(x: Tensor, w: Weights, geometry: Geometry, groups: int = 1, attend_padding: bool = False) -> Tensor:
    """Merge the three maps, one product with the shared values, one product with W_out: im2col by attention.

    The second step is a convolution's own: a 1×1 product with the kernel's C/g · H columns.
    """
    return project_out(gather(x, w, geometry, groups, attend_padding), w.weight.flatten(2), w.bias, groups)


def split(
    x: Tensor,
    w: Weights,
    geometry: Geometry,
    groups: int = 1,
    attend_padding: bool = False,
    heads: tuple[int, ...] | None = None,
) -> Tensor:
    """The shift part is the convolution itself with scaled taps; the Gaussian and content parts are added to it.

    With closed gates the scaled taps are the kernel's own bits and the rest is exactly 0, so the output is bitwise the
    convolution. Long maps make no M×N tensor for the Gaussian part (two small products instead). `heads` names the
    heads whose rest is computed (None: all); the others must be closed.
    """
    values = project_values(x, w.value, groups)
    shape = w.weight.shape
    if w.gates.shift is None:
        if heads is not None:
            raise ValueError("a gate without a shift part has no closed heads")
        return _rest(x, values, w, geometry, groups, attend_padding, w.bias)
    taps = w.weight * w.gates.shift.view(shape[2:]).to(w.weight.dtype)
    output = geometry.convolve(values, taps, w.bias, groups)
    if heads == ():
        return output
    if heads is not None:
        w = select_heads(w, heads)
    return output + _rest(x, values, w, geometry, groups, attend_padding, None)


def _rest(
    x: Tensor, values: Tensor, w: Weights, geometry: Geometry, groups: int, attend_padding: bool, bias: Tensor | None
) -> Tensor:
    """Gaussian and content parts of the heads in `w`, through W_out: (B, O, I, J)."""
    height, width = x.shape[-2:]
    num_heads, channels = w.alpha.shape[0], values.shape[1]
    # Padding tokens carry no content: attention over the real pixels is the masked softmax without the mask.
    keyed, seen = (geometry.pad(x), geometry.pad(values)) if attend_padding else (x, values)
    q, k = _queries(x, w.query, num_heads, geometry), _keys(keyed, w.key, num_heads)
    C = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1).to(values.dtype)

    rows, columns = gaussian_factors(w.center, w.alpha, geometry, height, width)
    rows, columns = rows.to(values.dtype), columns.to(values.dtype)
    if geometry.padding_mode == "zeros" and not attend_padding:
        # zero tokens took part in the softmax, but add nothing to the sum
        at_rows, at_columns = geometry.pixels(height, width)
        rows, columns, pixels = rows[..., at_rows], columns[..., at_columns], values
    else:
        pixels = geometry.pad(values)

    same_keys = pixels.shape == seen.shape
    if same_keys and pixels.shape[-2] * pixels.shape[-1] <= MERGE_RATIO * channels:
        # short maps: mix the maps and multiply the values once
        G = torch.einsum("hiy,hjx->hijyx", _per_head(w.gates.gaussian, rows), columns).flatten(1, 2).flatten(2)
        gathered = pixels.flatten(2) @ (G + _per_head(w.gates.content, C)).flatten(1, 2).transpose(-1, -2)
    else:
        # long maps: no M×N tensor for the Gaussian part, two small products instead
        by_row = torch.einsum("hiy,bcyx->bchix", _per_head(w.gates.gaussian, rows), pixels)
        by_position = torch.einsum("bchix,hjx->bchij", by_row, columns.to(by_row.dtype)).flatten(2)
        by_content = seen.flatten(2) @ C.flatten(1, 2).transpose(-1, -2)
        gate = w.gates.content.to(by_content.dtype).repeat_interleave(C.shape[2])
        gathered = by_position + gate * by_content
    gathered = gathered.unflatten(-1, (num_heads, *geometry.output_size(height, width)))
    return project_out(gathered, w.weight.flatten(2), bias, groups)


def _per_head(gate: Tensor, maps: Tensor) -> Tensor:
    """Scale (…, H, N, M) maps head by head."""
    return gate.to(maps.dtype)[:, None, None] * maps


# --- projections ------------------------------------------------------------------------------------------------------


def project_values(x: Tensor, value: Tensor | None, groups: int) -> Tensor:
    """V = X W_val, (B, C, ·, ·) → same shape; an identity W_val returns the bits of x."""
    return x if value is None else F.conv2d(x, value[:, :, None, None], groups=groups)


def project_out(gathered: Tensor, taps: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """Σ_h of what head h gathered, times W_out^h: (B, C, H, I, J) and taps (O, C/g, H) → (B, O, I, J)."""
    return F.conv2d(gathered.flatten(1, 2), taps.flatten(1)[:, :, None, None], bias, groups=groups)


def select_heads(w: Weights, heads: tuple[int, ...]) -> Weights:
    """The tensors of some heads only; `weight` becomes (O, C/g, heads, 1)."""
    index = list(heads)
    num_heads = w.alpha.shape[0]

    def rows_of(projection: Tensor) -> Tensor:
        return projection.unflatten(0, (num_heads, -1))[index].flatten(0, 1)

    gates = Gates(
        None if w.gates.shift is None else w.gates.shift[index], w.gates.gaussian[index], w.gates.content[index]
    )
    return Weights(
        w.weight.flatten(2)[:, :, index].unsqueeze(-1),
        w.bias,
        w.value,
        rows_of(w.query),
        rows_of(w.key),
        w.center[index],
        w.alpha[index],
        gates,
    )


def fold_value(weight: Tensor, value: Tensor | None, groups: int) -> Tensor:
    """W_val · W_out^h for every head, as a kernel: (O, C/g, …) and (C, C/g) → (O, C/g, …)."""
    if value is None:
        return weight
    per_group = weight.flatten(2).unflatten(0, (groups, -1))
    folded = torch.einsum("gojh,gji->goih", per_group, value.unflatten(0, (groups, -1)))
    return folded.flatten(0, 1).view_as(weight)


def _block_diagonal(matrix: Tensor, groups: int) -> Tensor:
    """(g·a, b) → (g·a, g·b) with the g blocks on the diagonal."""
    return torch.block_diag(*matrix.chunk(groups))
