"""The operator under the fast backends: heads gather and project a few at a time, and no map is ever held whole.

    y = b + Σ_h (shift_h · S_h + R_h ⊗ K_h + content_h · softmax(Q_h K_hᵀ / √D)) V W_out^h

The Gaussian is applied as two small products, R over the rows and K over the columns. The content maps of a few
thousand queries at a time stay in the processor's cache. The backward pass computes them again (as flash attention
does, Dao et al. 2022), here with values that all heads share and that are wider than the keys.

Here are the two custom operators, one node each for `torch.compile`, and their cost; the steps are in `stream` and
`backward`. The gradient has no derivative: `maps.dense` has.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from recast.errors import RecastError
from recast.layers.functional.streaming.backward import Backward, add_weight_gradient
from recast.layers.functional.streaming.stream import Layout, Operands, Stream, goes_by_parts, project

TENSORS = (
    "Tensor values, Tensor query, Tensor key, Tensor rows, Tensor columns, Tensor? shift, Tensor content, Tensor weight"
)
NUMBERS = (
    "SymInt[] content_heads, SymInt[] gaussian_heads, SymInt[] spans, SymInt[] stride, SymInt[] window, SymInt groups, "
    "bool linear"
)
"""Arguments of both operators: `Operands` and `Layout`."""
NUM_INPUTS = len(Operands._fields) + len(Layout._fields) + 2
"""Inputs of `attend`: these, `bias` and `keep`."""


def _unpacked(inputs: tuple[Any, ...]) -> tuple[Operands, Tensor | None, Layout, bool]:
    """Return operands, bias, layout and `keep` from the inputs of `attend`."""
    return Operands(*inputs[:8]), inputs[8], Layout(*inputs[9:-1]), inputs[-1]


@torch.library.custom_op(
    "recast::attend",
    mutates_args=(),
    schema=f"({TENSORS}, Tensor? bias, {NUMBERS}, bool keep) -> (Tensor, Tensor, Tensor)",
)
def attend(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return (output (B, I, J, O), saved gathers (H_c, B, I, J, C) if `keep`, else empty, norms).

    `bias` is (O,). `keep` saves the backward pass one product per head: the gathers of the content heads are saved, on
    long maps (`Stream.by_parts`) those of their content maps alone, with the norms (H_c, B, N, 1) of `Stream.attend`.
    """
    operands, bias, layout, keep = _unpacked(inputs)
    values, outputs = operands.values, operands.weight.shape[1]
    with torch.autocast(values.device.type, enabled=False):
        s = Stream(operands, layout)
        y = values.new_zeros(s.batch, s.I, s.J, outputs, dtype=s.sum_dtype)
        if bias is not None:
            y += bias
        saved = values.new_empty(len(s.content_heads) if keep else 0, s.batch, s.I, s.J, s.channels)
        norm = _norms(operands)
        for h in range(len(s.weight)):
            W_out, content = s.weight[h].transpose(-1, -2), s.head_maps(h)[0]
            for chunk in s.chunks():
                at, shape = (chunk.images, chunk.rows), (chunk.n, chunk.r, s.J, s.channels)
                is_saved = keep and content is not None
                by_content = saved[content][at] if is_saved else s.buffer("gathered", *shape)
                gathered = s.buffer("gathered", *shape) if s.by_parts else by_content
                s.gather_by_content(h, chunk, norm, by_content)
                s.gather(h, chunk, by_content, s.by_rows(h, chunk), gathered)
                project(gathered.view(-1, s.channels), W_out, y[at].view(-1, outputs))
    return y.to(values.dtype), saved, norm if _keeps_norms(operands, layout, keep) else values.new_empty(0)


def _norms(operands: Operands) -> Tensor:
    """Allocate the norms (H_c, B, N, 1)."""
    return operands.values.new_empty(operands.content.shape[0], *operands.query.shape[:2], 1)


def _keeps_norms(operands: Operands, layout: Layout, keep: bool) -> bool:
    return keep and not layout.linear and goes_by_parts(operands.values, layout.window)


@attend.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    operands, _bias, layout, keep = _unpacked(inputs)
    values, norm = operands.values, _norms(operands)
    images = values.shape[0], operands.rows.shape[1], operands.columns.shape[1]
    saved = values.new_empty(len(norm) if keep else 0, *images, values.shape[3])
    norm = norm if _keeps_norms(operands, layout, keep) else values.new_empty(0)
    return values.new_empty(*images, operands.weight.shape[1]), saved, norm


@torch.library.custom_op(
    "recast::attend_backward",
    mutates_args=(),
    schema=f"(Tensor dy, {TENSORS}, Tensor kept, Tensor norm, {NUMBERS}) -> ({', '.join(['Tensor'] * 8)})",
)
def attend_backward(dy: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Return the gradients for values, query, key, rows, columns, shift (empty without one), content and weight."""
    operands, saved, norm, layout = Operands(*inputs[:8]), inputs[8], inputs[9], Layout(*inputs[10:])
    with torch.autocast(dy.device.type, enabled=False):
        s = Backward(operands, layout)
        norm = norm if len(norm) else _norms(operands)
        for h in range(len(s.weight)):
            content = s.head_maps(h)[0]
            for chunk in s.chunks():
                at, shape = (chunk.images, chunk.rows), (chunk.n, chunk.r, s.J, s.channels)
                dy_part = dy[at].flatten(0, 2)
                d_gathered = s.buffer("d_gathered", *shape).zero_()
                project(dy_part, s.weight[h], d_gathered.view(-1, s.channels))
                by_rows, is_saved = s.by_rows(h, chunk), content is not None and len(saved) > 0
                gathered = by_content = saved[content][at] if is_saved else s.buffer("by_content", *shape)
                if not is_saved:
                    s.gather_by_content(h, chunk, norm, by_content)
                if s.by_parts or not is_saved:
                    gathered = s.buffer("gathered", *shape)
                    s.gather(h, chunk, by_content, by_rows, gathered)
                add_weight_gradient(dy_part, gathered.view(-1, s.channels), s.d_weight[h])
                s.add(h, chunk, norm, by_content, by_rows, d_gathered)
    return s.results()


@attend_backward.register_fake
def _(dy: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    operands = Operands(*inputs[:8])
    return tuple(dy.new_empty(0, dtype=operands.content.dtype) if t is None else torch.empty_like(t) for t in operands)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    operands, bias, ctx.layout, _keep = _unpacked(inputs)
    ctx.save_for_backward(*operands, *output[1:])
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # else zeros as large as what was kept are written for nothing


def _backward(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * NUM_INPUTS
    if torch.is_grad_enabled():
        raise RecastError("second derivatives (create_graph=True) require backend='dense' in RecastConfig")
    *tensors, saved, norm = ctx.saved_tensors
    gradients = Operands(*torch.ops.recast.attend_backward(dy.contiguous(), *tensors, saved, norm, *ctx.layout))
    if Operands(*tensors).shift is None:
        gradients = gradients._replace(shift=None)
    bias = None if ctx.bias_dtype is None else dy.sum((0, 1, 2), dtype=ctx.bias_dtype)
    return (*gradients, bias, *(None,) * (NUM_INPUTS - len(gradients) - 1))


attend.register_autograd(_backward, setup_context=_save)


# --- costs, for the planner and `torch.utils.flop_counter` ------------------------------------------------------------


def _products(linear: bool, *shapes: Any) -> tuple[int, int, int, int]:
    """Return twice the multiply-accumulates of the logits, the content gathers, the Gaussian gathers and W_out."""
    (batch, Y, X, channels), (_, queries, width), key, rows, columns, _, content, weight = shapes[:8]
    logits, mixed = (0, width) if linear else (key[1] * width, content[0] * key[1])
    gaussian = rows[0] * rows[1] * X * (Y + columns[1])
    projection = rows[1] * columns[1] * math.prod(weight)
    return tuple(2 * batch * n for n in (queries * logits, queries * mixed * channels, gaussian * channels, projection))


@register_flop_formula(torch.ops.recast.attend)
def _attend_flops(*shapes: Any, **_: Any) -> int:
    return sum(_products(shapes[-2], *shapes))


@register_flop_formula(torch.ops.recast.attend_backward)
def _attend_backward_flops(_dy: Any, *shapes: Any, **_: Any) -> int:
    logits, mixed, gaussian, projection = _products(shapes[-1], *shapes)
    again = 0 if shapes[8][0] else mixed + gaussian // 2
    return 3 * logits + 2 * mixed + 5 * gaussian // 2 + again + 2 * projection
