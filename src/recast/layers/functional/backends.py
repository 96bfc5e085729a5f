"""The backends `split`, `merged`, `sdpa` and `plain`: a convolution, plus the open heads.

A *gather* is A_h X; a map is *short* with few keys per channel (`KEYS`). Backends differ in `Attend` and the shift:

split    writes short maps out, and computes long ones part by part (`long_maps`)
merged   has the shift in the maps, if all heads have content and maps are short: one gather, one product
sdpa     calls torch's scaled dot-product attention, whose GPU kernels hold no map
plain    writes every map out, by operations that exporters and function transforms support; sizes may be symbols
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recast.layers.functional import long_maps
from recast.layers.functional.maps import outer, query_tokens, value_grid, weighted_factors
from recast.layers.functional.operands import (
    BiasedWeights,
    Weights,
    finite_half,
    in_autocast,
    is_recorded,
    on_accelerator,
    project_out,
    project_values,
    scatter_heads,
    take_heads,
)
from recast.layers.geometry import Geometry, is_channels_last

KEYS = 2
"""Keys per channel up to which a content map is short: at most twice as large as the input."""
WRITTEN_OUT = 2400
"""On CUDA, maps are written out up to this many keys in all open heads together: `sdpa`'s kernels are slower for values
wider than the keys."""
READ_AGAIN = 8
"""A matrix with this many rows per token of an image is multiplied with the tokens of all images at once: reading it
again for every image takes longer than concatenating the tokens (2×2 pixels, 512 channels: three times as long)."""
PRODUCT = 1.15
"""Time of a matrix product relative to a convolution with as many multiply-adds (results/layer.csv, CPU)."""
ALIGNED = 8
"""torch's GPU kernels require widths of queries and keys that are multiples of this, in half precision."""

Attend = Callable[..., Tensor]
"""(Q (B, H, N, D), K (B, H, D, M), V (B, M, C) of all heads, scale=1.0) → softmax(scale · Q K) V, (B, N, H·C)."""


def choose_backend(
    geometry: Geometry, groups: int, opened: int, has_shift: bool, device: str = "cpu", keys: int | None = None
) -> Literal["split", "merged", "sdpa"]:
    """Return the backend for a layer with `opened` heads that have a Gaussian or a content map, by type of device.

    On CUDA it is `split` for maps with few `keys`, else `sdpa`, which holds no map. Without open heads all are the
    convolution.

    A gather costs the same in both. `split` convolves with all H kernel positions and projects the open heads' gathers;
    `merged` projects all heads' gathers by a matrix product, which is slower than a convolution: H + PRODUCT · opened
    compared with PRODUCT · H. Grouped and transposed layers, where products are small, are always split.
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
    if _is_short(x, w):
        return _convolution_and_open_heads(x, w, written_out, _number_of_parts(x, w))
    return _convolution_and_open_heads(x, w, part_by_part, makes_again=True)


def merged(x: Tensor, w: Weights) -> Tensor:
    """Let every head gather by the sum of its maps, for one product with W_out: cheapest when most heads are open.

    Only on short maps. If all heads have content, the three maps are mixed. Else, if all have a Gaussian, the shift is
    a second term of its factors: no convolution. Other layers are split.
    """
    heads = w.geometry.num_heads
    is_short = on_accelerator(x) or _has_few_keys(x, w)
    if not w.gates.has_shift or w.geometry.is_transposed or w.groups > 1 or not is_short:
        return split(x, w)
    if len(w.content_heads) < heads or not w.content_sees_grid or w.content == "linear":
        if len(w.gaussian_heads) < heads:
            return split(x, w)
        is_cheap = w.content == "linear" or not w.content_heads
        parts = _number_of_parts(x, w)
        return _convolution_and_open_heads(x, w, written_out, parts, merges=True, makes_again=is_cheap)
    values, kernel = project_values(x, w.value, w.groups), _kernel(w, w.content_heads)
    maps = scatter_heads(outer(*weighted_factors(x, w)), w.gaussian_heads, heads) if w.gaussian_heads else None
    maps = outer(*weighted_factors(x, w, of_shift=True), maps)

    def mixed(x: Tensor, values: Tensor) -> Tensor:
        return project(x, _gather(_mixed(maps, x, w), as_tokens(value_grid(values, w))), kernel, w.bias, w)

    return in_format_of(x, w.weight, by_parts(mixed, _number_of_parts(x, w), x, values))


def sdpa(x: Tensor, w: Weights) -> Tensor:
    """Compute `plain` with `scaled_dot_product_attention` instead of content maps: its GPU kernels hold no map.

    Linear content is computed as in `plain`.
    """
    return _convolution_and_open_heads(x, w, scaled_dot_product)


def plain(x: Tensor, w: Weights) -> Tensor:
    """Compute the convolution with a scaled kernel, and add the maps of the open heads, written out.

    Uses operations that every exporter and function transform supports. Height and width may be symbols.
    """
    return _convolution_and_open_heads(x, w, written_out)


# --- content attention ------------------------------------------------------------------------------------------------


def written_out(query: Tensor, key: Tensor, values: Tensor, scale: float = 1.0) -> Tensor:
    return _gather(softmax(logits(query, key, scale)), values)


def part_by_part(query: Tensor, key: Tensor, values: Tensor, scale: float = 1.0) -> Tensor:
    gathered, _ = long_maps.attend(scale * query.contiguous(), key.contiguous(), values.to(query.dtype).contiguous())
    return gathered.to(query.dtype).flatten(2)


def scaled_dot_product(query: Tensor, key: Tensor, values: Tensor, scale: float = 1.0) -> Tensor:
    """Call torch's kernels, for which queries and keys get columns of zeros.

    No mask is needed, as the keys are the pixels that are seen. The values are expanded over the heads without a copy.
    """
    query, key = (F.pad(t, (0, -t.shape[3] % ALIGNED)).contiguous() for t in (query, key.transpose(2, 3)))
    shared = values.to(query.dtype).contiguous()[:, None].expand(-1, query.shape[1], -1, -1)
    return F.scaled_dot_product_attention(query, key, shared, scale=scale).transpose(1, 2).flatten(2)


def _linear(query: Tensor, key: Tensor, values: Tensor) -> Tensor:
    """Compute linear content, softmax_D(Q) [softmax_tokens(K) V]: no map of queries by keys."""
    summaries = torch.softmax(key, 3) @ values[:, None].to(key.dtype)
    return (torch.softmax(query, 3) @ summaries).transpose(1, 2).flatten(2)


def logits(query: Tensor, key: Tensor, scale: float = 1.0) -> Tensor:
    """Return scale · Q K, (B, H, N, M)."""
    q, k = query.flatten(0, 1), key.flatten(0, 1)
    # with beta=0 the first argument is not read, and no operation scales
    scaled = torch.bmm(scale * q, k) if is_recorded() else torch.baddbmm(q.new_empty(1), q, k, beta=0, alpha=scale)
    return finite_half(scaled).reshape(*query.shape[:3], key.shape[3])  # unflatten is fixed in older ONNX


def softmax(logits: Tensor) -> Tensor:
    """Return maps of logits (B, H, N, M), in their precision.

    torch computes them in fp32 and rounds once; autocast would hold a second copy of every map, in fp32.
    """
    with torch.autocast(logits.device.type, enabled=False) if in_autocast(logits) else nullcontext():
        return torch.softmax(logits, -1)


def _queries_and_keys(x: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
    """Return Q and K of the heads that have content: (B, H_c, N, D) and (B, H_c, D, M)."""
    tokens, heads = (w.geometry.pad(x) if w.attend_padding else x).flatten(2), (len(w.content_heads), w.head_dim)
    if w.geometry.keeps_size and not w.attend_padding:  # the query tokens are the keys
        both = torch.stack([matrix.reshape(*heads, -1) for matrix in (w.query, w.key)], 1)  # head by head, for `logits`
        product = times(both.flatten(0, 2), tokens)
        query, key = product.reshape(x.shape[0], heads[0], 2, heads[1], product.shape[2]).unbind(2)
    else:
        pairs = (w.query, query_tokens(x, w.geometry).flatten(2)), (w.key, tokens)
        query, key = (times(matrix, t).reshape(x.shape[0], *heads, t.shape[2]) for matrix, t in pairs)
    return query.transpose(2, 3), key


# --- the steps of a layer ---------------------------------------------------------------------------------------------


def _convolution_and_open_heads(
    x: Tensor, w: Weights, attend: Attend, parts: int = 1, *, merges: bool = False, makes_again: bool = False
) -> Tensor:
    """Return the convolution with a scaled kernel, plus what the open heads gather, content by `attend`.

    `merges`: the Gaussians, which all heads have, gather the shift's part too, in place of the convolution.
    `makes_again`: recompute in the backward pass what Gaussians and linear content gather, which costs little, and all
    gathers of a grouped layer, which would outweigh it in memory. A compiler chooses for itself what it keeps.
    """
    values, bias, output = project_values(x, w.value, w.groups), w.bias, None
    if w.gates.has_shift and not merges:
        output, bias = w.convolve(values), None
    kernels = _kernels(w)
    if not kernels:
        assert output is not None  # heads without a shift have a Gaussian
        return output

    def open_heads(x: Tensor, values: Tensor, content: Tensor | None = None) -> Tensor:
        first, *others = zip(_gathers(x, values, w, attend, merges, content), kernels, strict=True)
        y = project(x, *first, bias, w)
        return y + project(x, *others[0], None, w) if others else y

    with_content = w.groups > 1 or w.content == "linear"
    makes_again = makes_again and (with_content or len(w.gaussian_heads) > 0)
    if makes_again and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        content = None if with_content or not w.content_heads else _content(x, values, w, attend)
        added = checkpoint(open_heads, x, values, content, use_reentrant=False, preserve_rng_state=False)
    else:
        added = by_parts(open_heads, parts, x, values)
    return in_format_of(x, w.weight, added if output is None else output + added)


def _gathers(
    x: Tensor, values: Tensor, w: Weights, attend: Attend, merges: bool, content: Tensor | None
) -> Iterator[Tensor]:
    """Yield what h heads gather, (B, N, h·C): of both maps, or of the Gaussians, then of content (if not given)."""
    grid, has_both = value_grid(values, w), _has_both(w)
    if has_both and attend is written_out and w.content_sees_grid and w.content == "softmax":
        yield _gather(_mixed(outer(*weighted_factors(x, w)), x, w), as_tokens(grid))
        return
    if w.content_heads and content is None:
        content = _content(x, values, w, attend)
    by_gaussian = _gather_by_factors(*_positional_factors(x, w, merges), grid) if w.gaussian_heads else None
    if content is not None and by_gaussian is not None and has_both:
        gates = w.gates.content.to(content.dtype)[:, None].expand(-1, values.shape[1]).flatten()
        yield content * gates + by_gaussian
    else:
        yield from (gathered for gathered in (by_gaussian, content) if gathered is not None)


def _content(x: Tensor, values: Tensor, w: Weights, attend: Attend) -> Tensor:
    """Return what the heads with content gather, (B, N, h·C)."""
    attend = _linear if w.content == "linear" else partial(attend, scale=w.head_dim**-0.5)
    return attend(*_queries_and_keys(x, w), as_tokens(value_grid(values, w) if w.content_sees_grid else values))


def _kernels(w: Weights) -> list[Tensor]:
    """Return the kernels (O, h, C/g) of what `_gathers` yields; content's has its gates if it is gathered alone."""
    if _has_both(w):
        return [_kernel(w, w.content_heads)]
    kernels = [_kernel(w, w.gaussian_heads)] if w.gaussian_heads else []
    if w.content_heads:
        kernels.append(_kernel(w, w.content_heads) * w.gates.content.to(w.weight.dtype)[:, None])
    return kernels


def _has_both(w: Weights) -> bool:
    """Return True if the same heads have both maps: what they gather is projected as one."""
    return len(w.content_heads) > 0 and w.content_heads == w.gaussian_heads


def _mixed(positional: Tensor, x: Tensor, w: Weights) -> Tensor:
    """Add content maps (B, h, N, M), times their gates, to positional ones (h, N, M); in the layout of these."""
    content = softmax(logits(*_queries_and_keys(x, w), w.head_dim**-0.5))
    gates = w.gates.content.to(content.dtype)[:, None, None]
    return torch.addcmul(positional.to(content.dtype), content, gates)


def _positional_factors(x: Tensor, w: Weights, merges: bool) -> tuple[Tensor, Tensor]:
    """Return the factors of the Gaussians (h, I, r, Y) and (h, J, r·X): r = 1, or with those of the shift 2."""
    rows, columns = weighted_factors(x, w)
    if not merges:
        return rows[:, :, None], columns
    shift_rows, shift_columns = weighted_factors(x, w, of_shift=True)
    return torch.stack([rows, shift_rows], 2), torch.cat([columns, shift_columns], 2)


def as_tokens(images: Tensor) -> Tensor:
    """Return (B, C, ·, ·) as (B, ·, C), a view."""
    return images.flatten(2).transpose(1, 2)


def _gather(maps: Tensor, values: Tensor) -> Tensor:
    """Multiply maps (B, h, N, M) with values (B, M, C); returns (B, N, h·C).

    With several heads the result lies query by query, so that one product with W_out takes all images.
    """
    batch, heads, queries, _ = maps.shape
    if type(heads) is int and heads == 1:
        if values.stride(2) != 1:  # the same layout again: what follows reads it without a copy
            return torch.bmm(values.transpose(1, 2), maps.flatten(0, 1).transpose(1, 2)).transpose(1, 2)
        return torch.bmm(maps.flatten(0, 1), values)
    by_query = maps.transpose(1, 2).flatten(1, 2)  # a copy, unless `_mixed`, of the maps: smaller than what is gathered
    return torch.bmm(by_query, values).reshape(batch, queries, heads * values.shape[2])


def _gather_by_factors(rows: Tensor, columns: Tensor, grid: Tensor) -> Tensor:
    """Return what heads with maps Σ_r rows_r ⊗ columns_r gather from values (B, C, Y, X): (B, I·J, h·C).

    rows (h, I, r, Y), columns (h, J, r·X).
    """
    tokens, (heads, queries) = grid.permute(0, 2, 3, 1), rows.shape[:2]
    by_rows = torch.bmm(rows.to(grid.dtype).flatten(0, 2).expand(grid.shape[0], -1, -1), tokens.flatten(2))
    by_rows = by_rows.reshape(grid.shape[0], heads, queries, columns.shape[-1], grid.shape[1])  # (B, h, I, r·X, C)
    return (columns.to(by_rows.dtype)[:, None] @ by_rows).flatten(2, 3).transpose(1, 2).flatten(2)


def _kernel(w: Weights, heads: tuple[int, ...]) -> Tensor:
    """Return W_out of some heads, (O, h, C/g)."""
    kernel = w.weight.flatten(2)
    if len(heads) == 1:
        return kernel[:, None, :, heads[0]]
    return take_heads(kernel.movedim(2, 0), heads, w.geometry.num_heads).transpose(0, 1).contiguous()


def project(x: Tensor, gathered: Tensor, kernel: Tensor, bias: Tensor | None, w: Weights | BiasedWeights) -> Tensor:
    """Multiply gathers (B, N, h·C) with W_out (O, h, C/g) and add the bias: (B, O, I, J)."""
    size = w.geometry.output_size(*x.shape[2:])
    if w.groups > 1:
        by_channel = gathered.transpose(1, 2).reshape(x.shape[0], kernel.shape[1], w.groups * kernel.shape[2], *size)
        return project_out(by_channel.transpose(1, 2), kernel.transpose(1, 2), bias, w.groups)
    y = times(kernel.flatten(1), gathered.transpose(1, 2), bias)
    return y.reshape(x.shape[0], kernel.shape[0], *size)


def times(matrix: Tensor, tokens: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply tokens (B, C, N) by a matrix (D, C), and add a bias (D,): (B, D, N), in the layout of the tokens."""
    if tokens.stride(1) == 1 or reads_again(matrix, tokens.transpose(1, 2)):
        return finite_half(F.linear(tokens.transpose(1, 2), matrix, bias)).transpose(1, 2)
    product = finite_half(torch.bmm(matrix.expand(tokens.shape[0], -1, -1), tokens))
    return product if bias is None else product + bias.to(product.dtype)[:, None]


def reads_again(matrix: Tensor, tokens: Tensor) -> bool:
    """Return True for a matrix (D, C) that is large beside the tokens (B, N, C) of an image (`READ_AGAIN`)."""
    batch, count, _ = tokens.shape  # symbols in an exported program
    return type(count) is int and batch > 1 and READ_AGAIN * count <= matrix.shape[0]


def in_format_of(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    """Return `y`, which may be channels_last, in the memory format of a convolution of `x` with `weight`."""
    return y if is_channels_last(x) or is_channels_last(weight) else y.contiguous()


# --- short maps, a few images at a time -------------------------------------------------------------------------------


def _is_short(x: Tensor, w: Weights) -> bool:
    """Return True where content maps are written out: short ones, and on an accelerator all.

    Not in grouped layers, whose gathers, kept for the backward pass, would outweigh the layer many times.
    """
    has_maps = len(w.content_heads) > 0 and w.content == "softmax" and w.groups == 1
    return on_accelerator(x) or (has_maps and _has_few_keys(x, w))


def _has_few_keys(x: Tensor, w: Weights) -> bool:
    rows, columns = w.geometry.output_size(*x.shape[2:])
    return rows * columns <= KEYS * x.shape[1]


def _number_of_parts(x: Tensor, w: Weights) -> int:
    """Return the number of parts to split the images into, so that their maps stay in the cache of a CPU."""
    rows, columns = w.geometry.output_size(*x.shape[2:])
    numbers = len(w.content_heads) * rows * columns * x.shape[2] * x.shape[3]
    return 1 if on_accelerator(x) else max(1, min(len(x), round(len(x) * numbers / long_maps.MAP_NUMBERS)))


def by_parts(run: Callable[..., Tensor], parts: int, *tensors: Tensor) -> Tensor:
    """Return run(*tensors), computed for a part of the images at a time."""
    if parts == 1:
        return run(*tensors)
    return torch.cat([run(*part) for part in zip(*(tensor.chunk(parts) for tensor in tensors), strict=True)])
