"""Content attention beside a convolution, as pure functions: `by_formula` reads like the formula, `added` is fast.

    y = conv(X) + γ ⊙ (C X W_con)      C = softmax(Q Kᵀ / √D)        Q = c X_q W_qry,  K = c X W_key

C is one map over the pixels of the input X, whatever the convolution's padding is: padding is never a key. X_q is the
pixel of X under every pixel of the output (`query_pixels`). In the language of `recast.layers.functional`: the heads
that stay one-hot shifts are the convolution, and one more head has content and a W_out of its own.

Shapes as in `recast.layers.functional`; N queries are the output's I·J pixels, M keys the input's H·W.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recast.layers.functional import long_maps
from recast.layers.functional.backends import (
    KEYS,
    WRITTEN_OUT,
    Attend,
    as_tokens,
    by_parts,
    part_by_part,
    reads_again,
    scaled_dot_product,
    times,
    written_out,
)
from recast.layers.functional.operands import block_diagonal, finite_half, is_recorded, on_accelerator
from recast.layers.geometry import is_channels_last

MADE_AGAIN = 1 << 16
"""Numbers of C X for an image beyond which, with few keys, the backward pass makes it again: it is as large as the
input, and takes 2 % of the layer's time (results/layer_again.csv)."""


class BesideWeights(NamedTuple):
    """The tensors of the attention."""

    query: Tensor
    """W_qry, (D, C)."""
    key: Tensor
    """W_key, (D, C)."""
    content: Tensor
    """W_con, (O, C/g): block-diagonal in the groups of the convolution."""
    gamma: Tensor
    """γ, (O,)."""
    qk_scale: Tensor
    """c, ()."""
    groups: int = 1


def query_pixels(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return the pixel of x (B, C, H, W) under every pixel of an output of `rows` × `columns`: (B, C, I, J).

    Both grids cover the same image: output row i lies over input row ((2i + 1)·H − 1) // 2I, the pixel nearest its
    centre, the upper one of two. For a convolution that pads as much as its kernel reaches, i·stride.
    """
    for axis, count in ((2, rows), (3, columns)):
        size = x.shape[axis]
        if type(size) is int and size % count == 0:
            if size > count:
                step = size // count
                x = x[(slice(None),) * axis + (slice((step - 1) // 2, None, step),)]
        else:  # symbols in an exported program are not compared
            at = ((2 * torch.arange(count, device=x.device) + 1) * size - 1) // (2 * count)
            x = x.index_select(axis, at)
    return x


def attention_map(x: Tensor, queries: Tensor, w: BesideWeights) -> Tensor:
    """Return C of all queries (B, C, I, J) over the pixels of x, (B, 1, N, M)."""
    q, k = (F.linear(as_tokens(pixels), w.qk_scale * matrix) for pixels, matrix in ((queries, w.query), (x, w.key)))
    return torch.softmax(finite_half(finite_half(q) @ finite_half(k).mT) * w.query.shape[0] ** -0.5, -1)[:, None]


def by_formula(x: Tensor, y: Tensor, queries: Tensor, w: BesideWeights) -> Tensor:
    """Compute y + γ ⊙ (C X W_con) for the convolution's output y (B, O, I, J)."""
    attended = attention_map(x, queries, w)[:, 0] @ as_tokens(x) @ block_diagonal(w.content, w.groups).T
    return y + w.gamma[:, None, None] * attended.transpose(1, 2).unflatten(2, y.shape[2:])


def added(x: Tensor, y: Tensor, queries: Tensor, w: BesideWeights, attend: Attend) -> Tensor:
    """Compute `by_formula` with content by `attend`: with `written_out` by eight operations, most of them products."""
    tokens, scale = x.flatten(2), w.query.shape[0] ** -0.5
    if queries is x:
        query, key = times(w.qk_scale * torch.cat([w.query, w.key]), tokens).chunk(2, 1)
    else:
        query, key = times(w.qk_scale * w.query, queries.flatten(2)), times(w.qk_scale * w.key, tokens)
    operands, kernel = (query.transpose(1, 2)[:, None], key[:, None], as_tokens(x)), w.gamma[:, None] * w.content

    def attended(kernel: Tensor, *operands: Tensor) -> Tensor:
        return times(kernel, attend(*operands, scale=scale).transpose(1, 2))

    if _is_large(tokens, queries, w.groups):  # the same operations without a gradient, for the same bits
        again = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
        run = partial(checkpoint, attended, use_reentrant=False, preserve_rng_state=False) if again else attended
        return y + run(kernel, *operands).reshape(y.shape).to(y.dtype)
    gathered = attend(*operands, scale=scale)
    if w.groups > 1:
        pixels = gathered.transpose(1, 2).reshape(queries.shape)
        return y + F.conv2d(pixels, kernel[:, :, None, None], groups=w.groups).to(y.dtype)
    if y.dtype != gathered.dtype or reads_again(kernel, gathered):  # autocast would round a y in single precision
        return y + times(kernel, gathered.transpose(1, 2)).reshape(y.shape).to(y.dtype)
    outputs, kernels = y.flatten(2), kernel.expand(y.shape[0], -1, -1)
    if is_channels_last(y):
        outputs = torch.baddbmm(outputs.transpose(1, 2), gathered, kernels.transpose(1, 2))
        return outputs.unflatten(1, y.shape[2:]).permute(0, 3, 1, 2)  # strides of channels_last, of one image too
    return torch.baddbmm(outputs, kernels, gathered.transpose(1, 2)).reshape(y.shape)


def _is_large(tokens: Tensor, queries: Tensor, groups: int) -> bool:
    """Return True if the backward pass makes C X again. A compiler chooses for itself what it keeps."""
    if groups > 1 or is_recorded() or torch.compiler.is_compiling():  # sizes may be symbols
        return False
    return KEYS * tokens.shape[2] <= tokens.shape[1] and queries.shape[1:].numel() > MADE_AGAIN


def choose_attend(x: Tensor, y: Tensor, backend: str) -> Attend:
    """Return the function that computes content for an input and an output of the convolution.

    "plain", and "split" on short maps (few keys a channel), write the map out; on a CPU a few images at a time, in its
    cache. "split" computes long maps part by part on a CPU, and by torch's kernels on CUDA, as "sdpa" does everywhere.
    """
    queries, keys = y.shape[2] * y.shape[3], x.shape[2] * x.shape[3]
    if backend == "sdpa" or (backend != "plain" and x.device.type == "cuda" and keys > WRITTEN_OUT):
        return scaled_dot_product
    if backend == "plain" or on_accelerator(x):
        return written_out
    if queries > KEYS * x.shape[1]:
        return part_by_part
    parts = max(1, min(len(x), round(len(x) * queries * keys / long_maps.MAP_NUMBERS)))
    return written_out if parts == 1 else _by_parts(parts)


def _by_parts(parts: int) -> Attend:
    """Return `written_out` for a part of the images at a time."""
    return lambda *tensors, scale: by_parts(partial(written_out, scale=scale), parts, *tensors)
