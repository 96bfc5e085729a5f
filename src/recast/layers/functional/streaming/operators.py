"""The two custom operators, one node each for `torch.compile`, their derivative and their cost."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from recast.layers.functional.streaming.backward import Gradients, project_backward, weight_gradient
from recast.layers.functional.streaming.stream import Stream, project

TENSORS = (
    "Tensor values, Tensor query, Tensor key, Tensor rows, Tensor columns, Tensor? shift, Tensor content, Tensor weight"
)
NUMBERS = (
    "SymInt[] size, SymInt[] content_heads, SymInt[] gaussian_heads, SymInt[] spans, SymInt[] stride, SymInt[] window, "
    "SymInt groups, bool linear"
)
"""What both operators take; `Stream` says what each is."""


@torch.library.custom_op(
    "recast::attend", mutates_args=(), schema=f"({TENSORS}, Tensor? bias, {NUMBERS}, bool keep) -> (Tensor, Tensor)"
)
def attend(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Heads' gathers through W_out: ((B, I, J, O), what they gathered (h, B, I, J, C) if `keep`, else empty).

    `bias` (O,). `keep` saves the backward pass one product a head.
    """
    tensors, bias, numbers, keep = inputs[:8], inputs[8], inputs[9:-1], inputs[-1]
    values, weight = tensors[0], tensors[7]
    with torch.autocast(values.device.type, enabled=False):
        s = Stream(*tensors, *numbers)
        y = values.new_zeros(s.batch, s.I, s.J, weight.shape[1], dtype=s.sum_dtype)
        if bias is not None:
            y += bias
        kept = values.new_empty(s.heads if keep else 0, s.batch, s.I, s.J, s.channels)
        for h in range(s.heads):
            for chunk in s.chunks():
                at, shape = (chunk.images, chunk.rows), (chunk.n, chunk.r, s.J, s.channels)
                gathered = kept[h][at] if keep else s.buffer("gathered", *shape)
                s.gather(h, chunk, s.maps(h, chunk), gathered)
                tokens = chunk.n * chunk.r * s.J
                project(gathered.view(tokens, -1), weight[h], s.groups, y[at].view(tokens, -1))
    return y.to(values.dtype), kept


@attend.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    values, weight, size, keep = inputs[0], inputs[7], inputs[9], inputs[-1]
    batch, channels = values.shape[0], values.shape[3]
    kept = values.new_empty(weight.shape[0] if keep else 0, batch, size[0], size[1], channels)
    return values.new_empty(batch, size[0], size[1], weight.shape[1]), kept


@torch.library.custom_op(
    "recast::attend_backward",
    mutates_args=(),
    schema=f"(Tensor dy, {TENSORS}, Tensor kept, {NUMBERS}) -> ({', '.join(['Tensor'] * 8)})",
)
def attend_backward(dy: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Gradients of `attend` for values, query, key, rows, columns, shift (empty without one), content and weight."""
    tensors, kept, numbers = inputs[:8], inputs[8], inputs[9:]
    weight = tensors[7]
    with torch.autocast(dy.device.type, enabled=False):
        s = Stream(*tensors, *numbers)
        g = Gradients(s, weight)
        for h in range(s.heads):
            for chunk in s.chunks():
                at, shape = (chunk.images, chunk.rows), (chunk.n, chunk.r, s.J, s.channels)
                dy_part = dy[at].reshape(chunk.n * chunk.r * s.J, weight.shape[1])
                d_gathered = s.buffer("d_gathered", *shape)
                project_backward(dy_part, weight[h], s.groups, d_gathered.view(len(dy_part), -1))
                maps = s.maps(h, chunk)
                if len(kept):
                    gathered = kept[h][at]
                else:
                    gathered = s.buffer("gathered", *shape)
                    s.gather(h, chunk, maps, gathered)
                weight_gradient(dy_part, gathered.view(len(dy_part), -1), s.groups, g.weight[h])
                g.add(h, chunk, maps, d_gathered)
            if s.is_merged(h):
                g.finish(h)
    return g.results()


@attend_backward.register_fake
def _(dy: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(dy.new_empty(0, dtype=inputs[6].dtype) if t is None else torch.empty_like(t) for t in inputs[:8])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, bias, (*numbers, _keep) = inputs[:8], inputs[8], inputs[9:]
    ctx.save_for_backward(*tensors, output[1])
    ctx.numbers = numbers
    ctx.bias = None if bias is None else bias.dtype
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    *tensors, kept = ctx.saved_tensors
    dy = dy.contiguous()
    gradients = list(torch.ops.recast.attend_backward(dy, *tensors, kept, *ctx.numbers))
    if tensors[5] is None:
        gradients[5] = None
    bias = None if ctx.bias is None else dy.sum((0, 1, 2), dtype=ctx.bias)
    return (*gradients, bias, *(None,) * 9)


attend.register_autograd(_backward, setup_context=_save)


# --- what they cost, for the planner and `torch.utils.flop_counter` ---------------------------------------------------


def _gather_flops(linear: bool, values: Any, query: Any, key: Any, rows: Any, columns: Any) -> tuple[int, int, int]:
    """Twice the multiply-accumulates of the logits, of what a content map gathers, and of the Gaussians' products."""
    batch, Y, X, channels = values
    _, queries, width = query
    gaussian = rows[0] * rows[1] * X * channels * (Y + columns[1])
    if linear:
        return 0, 2 * batch * queries * width * channels, 2 * batch * gaussian
    return 2 * batch * queries * key[1] * width, 2 * batch * queries * key[1] * channels, 2 * batch * gaussian


@register_flop_formula(torch.ops.recast.attend)
def _attend_flops(*shapes: Any, **_: Any) -> int:
    values, content, weight, size, linear = shapes[0], shapes[6], shapes[7], shapes[9], shapes[-2]
    logits, mixed, gaussian = _gather_flops(linear, *shapes[:5])
    queries = values[0] * size[0] * size[1]
    heads = 1 if linear else content[0]
    return int(logits + heads * mixed + gaussian + 2 * queries * weight[0] * weight[1] * weight[2])


@register_flop_formula(torch.ops.recast.attend_backward)
def _attend_backward_flops(_dy: Any, *shapes: Any, **_: Any) -> int:
    values, content, weight, kept, size, linear = shapes[0], shapes[6], shapes[7], shapes[8], shapes[9], shapes[-1]
    logits, mixed, gaussian = _gather_flops(linear, *shapes[:5])
    queries = values[0] * size[0] * size[1]
    mixed *= 1 if linear else content[0]
    again = 0 if kept[0] else mixed + gaussian // 2
    projections = 4 * queries * weight[0] * weight[1] * weight[2]
    return int(3 * logits + 2 * mixed + 5 * gaussian // 2 + again + projections)
