"""The backends `split` and `merged`, and which backend is cheapest for a layer.

`split` is the convolution plus what open heads add to it, `merged` everything in one. Neither holds a long map whole.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.layers.functional import short_maps
from recast.layers.functional.maps import in_format_of, query_tokens, value_grid, weighted_factors
from recast.layers.functional.operands import Weights, finite_half, in_autocast, project_values, take_heads
from recast.layers.functional.streaming import attend
from recast.layers.functional.streaming.stream import Layout, Operands
from recast.layers.geometry import Geometry

KEEP_COST = 0.1
"""Gathers are recomputed in the backward pass if that costs at most this share of a step."""
WRITTEN_OUT = 2400
"""On CUDA, maps of this many keys, of all open heads together, are written out: `sdpa`'s kernels are slower for values
so wide."""
PRODUCT = 1.15
"""Time of a matrix product against a convolution of as many multiply-accumulates (results/layer.csv, CPU)."""


def choose_backend(
    geometry: Geometry, groups: int, opened: int, has_shift: bool, device: str = "cpu", keys: int | None = None
) -> Literal["split", "merged", "sdpa"]:
    """Return the backend for a layer with `opened` heads that have a Gaussian or a content map, by type of device.

    On CUDA it is `split` where the maps, of `keys` pixels, are short, else `sdpa`, which holds none. Without open heads
    all are the convolution.

    What a head gathers costs the same in both. `split` convolves with all H kernel positions and projects the open
    heads' gathers; `merged` projects all heads' gathers by a matrix product, which is slower than a convolution:
    H + PRODUCT · opened against PRODUCT · H. Grouped and transposed layers, where products are small, are always split.
    """
    heads = geometry.num_heads
    if device == "cuda" and opened:
        return "split" if keys is not None and opened * keys <= WRITTEN_OUT else "sdpa"
    if groups > 1 or geometry.is_transposed or not has_shift:
        return "split"
    return "merged" if PRODUCT * heads < heads + PRODUCT * opened else "split"


def split(x: Tensor, w: Weights) -> Tensor:
    """Compute the shift part as a convolution with a scaled kernel, and add the Gaussian and content parts.

    With closed gates the scaled kernel has the kernel's own bits and the rest is exactly 0, so the output is bitwise
    the convolution. Only heads that have a Gaussian or a content map (`Weights`) cost more than that.
    """
    if short_maps.is_short(x, w):
        return in_format_of(x, w.weight, short_maps.split(x, w))
    values = project_values(x, w.value, w.groups)
    if not w.gates.has_shift:
        return in_format_of(x, w.weight, _streamed(x, values, w, None, w.bias))
    output = w.convolve(values)
    if not w.gaussian_heads and not w.content_heads:
        return output
    return output + _streamed(x, values, w, None, None)


def merged(x: Tensor, w: Weights) -> Tensor:
    """Gather all three parts of a head together, for one product with W_out: cheapest when most heads are open.

    A transposed convolution, whose kernel's positions fall between the pixels, is split; so are short maps of a part
    of the heads.
    """
    is_short = short_maps.is_short(x, w)
    if w.geometry.is_transposed or (is_short and not short_maps.can_merge(w)):
        return split(x, w)
    if is_short:
        return in_format_of(x, w.weight, short_maps.merged(x, w))
    # tokens lie channel by channel in memory: all that follows reads them without another copy
    tokens = x.contiguous(memory_format=torch.channels_last)
    values = project_values(tokens, w.value, w.groups)
    return in_format_of(x, w.weight, _streamed(tokens, values, w, w.shift, w.bias))


def _streamed(x: Tensor, values: Tensor, w: Weights, shift: Tensor | None, bias: Tensor | None) -> Tensor:
    """Call `streaming.attend` on images; returns (B, O, I, J), with the shift part only if `shift` is given."""
    geometry, (height, width) = w.geometry, x.shape[-2:]
    heads, kernel = list(range(geometry.num_heads)), w.weight.flatten(2).permute(2, 0, 1)  # (h, O, C/g)
    if shift is None:
        heads = sorted({*w.gaussian_heads, *w.content_heads})
        kernel = take_heads(kernel, heads, geometry.num_heads)
    if kernel.stride(2) != 1:  # it is in a kernel that is channels_last
        kernel = kernel.contiguous()

    pixels = _as_tokens(value_grid(values, w))
    window = (0, 0, pixels.shape[1], pixels.shape[2])
    if not w.content_sees_grid:
        top, _, left, _ = geometry.padding_at(height, width)
        window = (top, left, height, width)
    if w.content_heads:
        query, key = _queries_and_keys(x, pixels, window, w)
        dtype = query.dtype
    else:
        query = key = pixels.new_empty(len(x), 0, 0)
        dtype = _autocast_dtype(pixels)
    rows, columns = weighted_factors(x, w)
    pixels, query, key, rows, columns, kernel = (t.to(dtype) for t in (pixels, query, key, rows, columns, kernel))
    operands = Operands(pixels, query, key, rows, columns, shift, w.gates.content, kernel)
    layout = Layout(
        content_heads=[heads.index(h) for h in w.content_heads],
        gaussian_heads=[heads.index(h) for h in w.gaussian_heads],
        spans=[] if shift is None else shift_spans(geometry, height, width, w.gathers_padding),
        stride=geometry.stride,
        window=window,
        groups=w.groups,
        linear=w.content == "linear",
    )
    keeps = w.content == "softmax" and torch.is_grad_enabled()
    keeps = keeps and keeps_gathered(rows.shape[1] * columns.shape[1], w)
    output, *_ = attend(*operands, None if bias is None else bias.to(dtype), *layout, keeps)
    return output.permute(0, 3, 1, 2)


def _queries_and_keys(x: Tensor, pixels: Tensor, window: tuple[int, ...], w: Weights) -> tuple[Tensor, Tensor]:
    """Return `query` and `key` of the `Operands`, for values `pixels` (B, Y, X, C) that content sees in a window."""
    tokens = x.contiguous(memory_format=torch.channels_last)
    query = _project_tokens(query_tokens(tokens, w.geometry), w.query)
    key = _project_tokens(w.geometry.pad(tokens) if w.attend_padding else tokens, w.key)
    if w.content == "softmax":
        return query, key
    # softmax_D(Q) [softmax_tokens(K)ᵀ V]: the heads share V, one product gives all of their D × C summaries
    top, left, height, width = window
    visible = pixels[:, top : top + height, left : left + width].flatten(1, 2).to(query.dtype)
    by_head = query.unflatten(-1, (len(w.content_heads), -1))
    return torch.softmax(by_head, -1).flatten(2), torch.softmax(key, -2).transpose(1, 2) @ visible


def keeps_gathered(queries: int, w: Weights) -> bool:
    """Return True if the gathers of the heads (H·C numbers per query) are kept for the backward pass.

    They are recomputed where that costs at most `KEEP_COST` of a step's multiply-accumulates, and in grouped layers,
    whose kernels are small: there the memory would outweigh the layer many times.
    """
    if w.groups > 1 or not w.content_heads:
        return False
    outputs, channels, width, heads = *w.weight.shape[:2], w.head_dim, len(w.content_heads)
    again = heads * queries * (channels + width)
    step = 3 * (w.geometry.num_heads * channels * outputs + heads * (2 * channels * width)) + 3 * again
    return again > KEEP_COST * step


def shift_spans(geometry: Geometry, height: int, width: int, padded: bool) -> list[int]:
    """Return (i₀, i₁, y₀, j₀, j₁, x₀) per head: the queries whose kernel position is a pixel, and the first pixel.

    Pixels are counted on the padded grid if `padded`, else on the image.
    """
    padding, outputs = geometry.padding_at(height, width), geometry.output_size(height, width)
    spans: list[int] = []
    for offsets in geometry.offsets():
        for axis, size in enumerate((height, width)):
            stride, count = geometry.stride[axis], outputs[axis]
            first = offsets[axis] + geometry.anchor[axis] - (0 if padded else padding[2 * axis])
            low = 0 if padded else max(0, -(first // stride))
            high = count if padded else min(count, (size - 1 - first) // stride + 1)
            spans += [low, max(low, high), first + low * stride]
    return spans


def _as_tokens(images: Tensor) -> Tensor:
    """Permute (B, C, Y, X) to contiguous (B, Y, X, C); no copy for channels_last."""
    return images.permute(0, 2, 3, 1).contiguous()


def _autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that autocast gives products of `x`: without W_val and content maps no product came before."""
    return torch.get_autocast_dtype(x.device.type) if x.dtype == torch.float32 and in_autocast(x) else x.dtype


def _project_tokens(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply x (B, C, ·, ·) by matrixᵀ; returns tokens (B, N, rows of `matrix`)."""
    return finite_half(_as_tokens(F.conv2d(x, matrix[:, :, None, None])).flatten(1, 2))
