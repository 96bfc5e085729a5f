"""The backends `split` and `merged` where maps are short: written out, in few calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.layers.functional.maps import gather_by_factors, outer, query_tokens, value_grid, weighted_factors
from recast.layers.functional.operands import (
    Weights,
    finite_half,
    in_autocast,
    project_out,
    project_values,
    scatter_heads,
    take_heads,
)  # fmt: skip
from recast.layers.geometry import Geometry

KEYS = 2
"""Keys per channel up to which a content map is short: no more than twice as large as the input."""
MAP_NUMBERS = 2**19
"""Numbers of content maps, about, that are made at a time on a CPU: its cache holds them, without new pages."""
READ_AGAIN = 8
"""A matrix of this many rows for each token of an image meets the tokens of all images at once: to read it again for
every image takes longer than to lay the tokens side by side (2×2 pixels, 512 channels: three times as long)."""


def on_accelerator(x: Tensor) -> bool:
    """Return False on a CPU, and for meta tensors, which stand for a CPU's in plans."""
    return x.device.type not in ("cpu", "meta")


def is_short(x: Tensor, w: Weights) -> bool:
    """Return True where content maps are written out: short ones, and on an accelerator all.

    Not in grouped layers, whose gathers, kept for the backward pass, would outweigh the layer many times.
    """
    if on_accelerator(x):
        return True
    rows, columns = w.geometry.output_size(*x.shape[2:])
    has_maps = len(w.content_heads) > 0 and w.content == "softmax" and w.groups == 1
    return has_maps and rows * columns <= KEYS * x.shape[1]


def can_merge(w: Weights) -> bool:
    """Return True if every head has a shift and a content map over the same keys."""
    all_heads = len(w.content_heads) == w.geometry.num_heads
    return w.gates.has_shift and all_heads and w.content_sees_grid and not w.geometry.is_transposed


def split(x: Tensor, w: Weights) -> Tensor:
    """Compute the convolution with a scaled kernel, and add what the open heads gather; (B, O, I, J)."""
    values = project_values(x, w.value, w.groups)
    if not w.gaussian_heads and not w.content_heads:
        return w.convolve(values)
    shift_is_query, output, bias = _shift_is_the_query(w), None, w.bias
    if shift_is_query:
        output, bias = w.geometry.convolve(values, w.weight, w.bias, w.groups), None
    elif w.gates.has_shift:
        output, bias = w.convolve(values), None
    kernels = _kernels(w)

    def open_heads(x: Tensor, values: Tensor) -> Tensor:
        first, *others = zip(_gathers(x, values, w, less_shift=shift_is_query), kernels, strict=True)
        y = _project(x, *first, bias, w)
        return y + _project(x, *others[0], None, w) if others else y

    added = _by_parts(x, values, w, open_heads)
    return added if output is None else output + added


def _by_parts(x: Tensor, values: Tensor, w: Weights, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return run(x, values), on a CPU a few images at a time."""
    rows, columns = w.geometry.output_size(*x.shape[2:])
    numbers = len(w.content_heads) * rows * columns * x.shape[2] * x.shape[3]
    parts = min(len(x), round(len(x) * numbers / MAP_NUMBERS))
    if on_accelerator(x) or parts <= 1:
        return run(x, values)
    return torch.cat([run(*part) for part in zip(x.chunk(parts), values.chunk(parts), strict=True)])


def merged(x: Tensor, w: Weights) -> Tensor:
    """Mix the three maps of every head, for one gather and one product with W_out; (B, O, I, J). See `can_merge`."""
    values, geometry, shift = project_values(x, w.value, w.groups), w.geometry, w.shift
    assert shift is not None
    rows, columns = _shift_factors(geometry, x.shape[2], x.shape[3], values)
    if not w.gathers_padding:
        at = geometry.pixels(*x.shape[2:])
        rows, columns = rows[..., at[0]], columns[..., at[1]]
    shift = shift.to(values.dtype).view(geometry.kernel)
    maps = outer(shift[:, :, None, None] * rows[:, None], columns.expand(geometry.kernel[0], -1, -1, -1)).flatten(0, 1)
    if w.gaussian_heads:
        gaussian = outer(*weighted_factors(x, w)).to(maps.dtype)
        maps = maps + scatter_heads(gaussian, w.gaussian_heads, geometry.num_heads)
    kernel = _kernel(w, w.content_heads)

    def mixed(x: Tensor, values: Tensor) -> Tensor:
        content = _content_maps(x, w)
        gate = w.gates.content.to(content.dtype)[:, None, None]
        gathered = _gather(torch.addcmul(maps.to(content.dtype), content, gate), value_grid(values, w))
        return _project(x, gathered, kernel, w.bias, w)

    return _by_parts(x, values, w, mixed)


def _shift_factors(geometry: Geometry, height: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return S as an outer product: a row of the kernel over rows of keys (k₀, I, Y), a column over columns (k₁, J, X).

    Made on the device of `like`, in its dtype: an index would be copied there in every pass.
    """
    factors = []
    for axis, (size, count) in enumerate(
        zip(geometry.padded_size(height, width), geometry.output_size(height, width), strict=True)
    ):
        keys, steps, taps = (torch.arange(n, device=like.device) for n in (size, count, geometry.kernel[axis]))
        at = geometry.stride[axis] * steps + geometry.dilation[axis] * taps[:, None]
        factors.append((keys == at[..., None]).to(like.dtype))
    return factors[0], factors[1]


def _shift_is_the_query(w: Weights) -> bool:
    """Return True for one content map alone, of the head whose shift is the query's own pixel.

    Subtracted there, the shift saves the scaling of a large kernel.
    """
    if not w.gates.has_shift or w.gaussian_heads or len(w.content_heads) != 1 or w.geometry.is_transposed:
        return False
    return w.geometry.offsets()[w.content_heads[0]] == (0, 0)


def _is_mixed(w: Weights) -> bool:
    """Return True if the same heads have both maps, over the same keys: one gather serves both."""
    return len(w.content_heads) > 0 and w.content_heads == w.gaussian_heads and w.content_sees_grid


def _kernels(w: Weights) -> list[Tensor]:
    """Return the kernels (O, h, C/g) of what `_gathers` yields; content's has its gates where no map has them."""
    if _is_mixed(w):
        return [_kernel(w, w.content_heads)]
    kernels = [_kernel(w, w.gaussian_heads)] if w.gaussian_heads else []
    if w.content_heads:
        kernels.append(_kernel(w, w.content_heads) * w.gates.content.to(w.weight.dtype)[:, None])
    return kernels


def _gathers(x: Tensor, values: Tensor, w: Weights, less_shift: bool) -> Iterator[Tensor]:
    """Yield what h heads gather, (B, h·C, N): of both maps, or of the Gaussians, then of content.

    `less_shift` subtracts the query's own pixel from what the one head with content gathers.
    """
    grid = value_grid(values, w)
    if w.gaussian_heads:
        rows, columns = weighted_factors(x, w)
        if _is_mixed(w):
            content = _content_maps(x, w)
            gates = w.gates.content.to(content.dtype)[:, None, None]
            yield _gather(torch.addcmul(outer(rows, columns).to(content.dtype), content, gates), grid)
            return
        yield gather_by_factors(rows, columns, grid).transpose(1, 2).flatten(3).flatten(1, 2)
    if w.content_heads:
        gathered = _gather(_content_maps(x, w), grid if w.content_sees_grid else values)
        yield gathered - query_tokens(values, w.geometry).flatten(2) if less_shift else gathered


def _content_maps(x: Tensor, w: Weights) -> Tensor:
    """Return C of the heads that have content, (B, H_c, N, M), over the keys that they see."""
    geometry, tokens, scale = w.geometry, (w.geometry.pad(x) if w.attend_padding else x).flatten(2), w.head_dim**-0.5
    weight = w.query * scale if w.content == "softmax" else w.query
    if _queries_are_keys(w, *x.shape[2:]):
        query, key = _times(torch.cat([weight, w.key]), tokens).chunk(2, 1)
    else:
        query, key = _times(weight, query_tokens(x, geometry).flatten(2)), _times(w.key, tokens)
    query, key = (t.unflatten(1, (len(w.content_heads), -1)).flatten(0, 1) for t in (query, key))
    if w.content == "linear":
        maps = torch.bmm(_softmax(query, 1).mT, _softmax(key, 2))
    else:
        maps = _softmax(finite_half(torch.bmm(query.mT, key)), 2)
    return maps.unflatten(0, (-1, len(w.content_heads)))


def _queries_are_keys(w: Weights, height: int, width: int) -> bool:
    """Return True if the query tokens are the keys: every pixel of the image, in order."""
    if w.attend_padding or w.geometry.is_transposed or w.geometry.stride != (1, 1):
        return False
    top, _, left, _ = w.geometry.padding_at(height, width)
    return w.geometry.output_size(height, width) == (height, width) and (top, left) == w.geometry.anchor


def _gather(maps: Tensor, values: Tensor) -> Tensor:
    """Multiply maps (B, h, N, M) with values (B, C, ·, ·) of M pixels; returns (B, h·C, N).

    With several heads it lies query by query, so that one product for all images meets W_out.
    """
    tokens = values.flatten(2)
    if maps.shape[1] > 1:
        by_query = maps.transpose(1, 2).flatten(1, 2)  # a copy of the maps, which are smaller than what is gathered
        return torch.bmm(by_query, tokens.mT).unflatten(1, (maps.shape[2], -1)).flatten(2).mT
    if tokens.stride(1) == 1:  # the same layout again: what follows reads it without a copy
        return torch.bmm(maps.flatten(0, 1), tokens.mT).mT
    return torch.bmm(tokens, maps.flatten(0, 1).mT)


def _kernel(w: Weights, heads: tuple[int, ...]) -> Tensor:
    """Return W_out of some heads, (O, h, C/g)."""
    kernel = w.weight.flatten(2)
    if len(heads) == 1:
        return kernel[:, None, :, heads[0]]
    return take_heads(kernel.movedim(2, 0), heads, w.geometry.num_heads).transpose(0, 1).contiguous()


def _project(x: Tensor, gathered: Tensor, kernel: Tensor, bias: Tensor | None, w: Weights) -> Tensor:
    """Multiply gathers (B, h·C, N) with W_out (O, h, C/g) and add the bias: (B, O, I, J)."""
    size = w.geometry.output_size(*x.shape[2:])
    if w.groups > 1:
        by_channel = gathered.unflatten(1, (kernel.shape[1], -1)).transpose(1, 2)
        return project_out(by_channel.unflatten(3, size), kernel.transpose(1, 2), bias, w.groups)
    y = _times(kernel.flatten(1), gathered).unflatten(2, size)
    return y if bias is None else y + bias.to(y.dtype)[:, None, None]


def _times(matrix: Tensor, tokens: Tensor) -> Tensor:
    """Multiply tokens (B, C, N) by a matrix (D, C); returns (B, D, N), in the layout of the tokens."""
    if tokens.stride(1) == 1 or (len(tokens) > 1 and READ_AGAIN * tokens.shape[2] <= len(matrix)):
        return finite_half(F.linear(tokens.mT, matrix)).mT
    return finite_half(torch.bmm(matrix.expand(len(tokens), -1, -1), tokens))


def _softmax(logits: Tensor, dim: int) -> Tensor:
    """Return the softmax in the precision of the logits: autocast would hold a second copy of every map, in fp32.

    torch computes it in fp32 in either case, and rounds once.
    """
    if not in_autocast(logits):
        return torch.softmax(logits, dim)
    with torch.autocast(logits.device.type, enabled=False):
        return torch.softmax(logits, dim)
