"""softmax(Q K) V of long maps, computed part by part, and again in the backward pass, so that no map is held whole.

The maps of a few hundred queries at a time stay in the processor's cache (as in flash attention, Dao et al. 2022). Here
all heads gather from the same values, which are wider than the queries and keys. Half precision is computed in fp32.

Two custom operators, one node each for `torch.compile`. The gradient has no derivative: `maps.dense` has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from recast.errors import RecastError

MAP_NUMBERS = 2**19
"""Approximate number of map entries computed at a time on a CPU, also of short maps: these 2 MiB fit its cache."""
LARGEST_EXPONENT = 40.0
"""Logits whose exponentials fp32 can sum as they are: e^±40 is 4e-18 to 2e17."""


@torch.library.custom_op("recast::attend", mutates_args=())
def attend(query: Tensor, key: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return softmax(Q K) V, (B, N, H, C), and the logarithms of the softmax's sums, (B, H, N, 1).

    Q is (B, H, N, D), scaled, K (B, H, D, M) and V, which the heads share, (B, M, C). With half-precision inputs the
    result is fp32, because the backward pass requires its digits.
    """
    gathered, log_sums = _outputs(query, values)
    dtype = gathered.dtype
    query, key, values = query.to(dtype), key.to(dtype), values.to(dtype)
    with torch.autocast(values.device.type, enabled=False):
        has_large = len(query) > 0 and not _largest_logit(query, key) < LARGEST_EXPONENT  # NaN counts as large
        for images, queries in _parts(query, key):
            maps = _logits(query, key, images, queries)
            if has_large:
                largest = maps.amax(-1, keepdim=True)
                maps.sub_(largest)
            sums = maps.exp_().sum(-1, keepdim=True)
            by_head = torch.bmm(maps.flatten(1, 2), values[images]).unflatten(1, maps.shape[1:3])
            gathered[images, queries] = by_head.div_(sums).transpose(1, 2)
            log_sums[images, :, queries] = sums.log_() + largest if has_large else sums.log_()
    return gathered, log_sums


@attend.register_fake
def _(query: Tensor, key: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return _outputs(query, values)


@torch.library.custom_op("recast::attend_backward", mutates_args=())
def attend_backward(
    d_gathered: Tensor, query: Tensor, key: Tensor, values: Tensor, gathered: Tensor, log_sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `attend` for Q, K and V, from that of its output."""
    dtypes = [t.dtype for t in (query, key, values)]
    query, key, values = (t.to(gathered.dtype) for t in (query, key, values))
    d_query, d_key = torch.empty_like(query), torch.zeros_like(key)
    d_values = values.new_zeros(len(values), values.shape[2], values.shape[1])  # channel by channel
    with torch.autocast(values.device.type, enabled=False):
        # softmax backward: A ∘ (dA − Σ_keys A ∘ dA), and that sum is the gradient times what was gathered
        inner = (d_gathered * gathered).sum(-1, keepdim=True).transpose(1, 2)
        for images, queries in _parts(query, key):
            maps = _logits(query, key, images, queries).sub_(log_sums[images, :, queries]).exp_()
            d = d_gathered[images, queries].transpose(1, 2).flatten(1, 2)
            # a product with the maps takes half the time of one with the maps transposed
            d_values[images].baddbmm_(d.mT.contiguous(), maps.flatten(1, 2))
            d_logits = torch.bmm(d, values[images].mT).view_as(maps).sub_(inner[images, :, queries]).mul_(maps)
            flat, q = d_logits.flatten(0, 1), query[images, :, queries]
            d_query[images, :, queries] = torch.bmm(flat, key[images].flatten(0, 1).mT).view_as(q)
            d_key[images].flatten(0, 1).baddbmm_(q.flatten(0, 1).mT, flat)
    gradients = d_query, d_key, d_values.mT.contiguous()
    return tuple(t.to(dtype) for t, dtype in zip(gradients, dtypes, strict=True))  # type: ignore[return-value]


@attend_backward.register_fake
def _(
    d_gathered: Tensor, query: Tensor, key: Tensor, values: Tensor, gathered: Tensor, log_sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(values)


def _outputs(query: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return empty outputs of `attend`, in at least fp32."""
    (batch, heads, count, _), dtype = query.shape, torch.promote_types(values.dtype, torch.float32)
    gathered = values.new_empty(batch, count, heads, values.shape[2], dtype=dtype)
    return gathered, values.new_empty(batch, heads, count, 1, dtype=dtype)


def _parts(query: Tensor, key: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield images and queries: all queries of some images, or some queries of one image."""
    batch, heads, count, _ = query.shape
    at_once = max(1, MAP_NUMBERS // (heads * key.shape[3]))
    images = max(1, at_once // count)
    for b in range(0, batch, images):
        for first in range(0, count, at_once):
            yield slice(b, b + images), slice(first, first + at_once)


def _logits(query: Tensor, key: Tensor, images: slice, queries: slice) -> Tensor:
    """Return Q K of a part, (b, H, n, M)."""
    q = query[images, :, queries]
    return torch.bmm(q.flatten(0, 1), key[images].flatten(0, 1)).unflatten(0, q.shape[:2])


def _largest_logit(query: Tensor, key: Tensor) -> float:
    """Return max |q| · max |k|, which no logit exceeds."""
    return float(query.norm(dim=-1).amax() * key.norm(dim=-2).amax())


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_gathered: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if d_gathered is None:
        return None, None, None
    if torch.is_grad_enabled():
        raise RecastError("second derivatives (create_graph=True) require backend='dense' in RecastConfig")
    gradients: tuple[Tensor, ...] = torch.ops.recast.attend_backward(d_gathered.contiguous(), *ctx.saved_tensors)
    return gradients


attend.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.recast.attend)
def _attend_flops(query: Any, key: Any, values: Any, **_: Any) -> int:
    """Return twice the multiply-accumulates, for the planner and `torch.utils.flop_counter`."""
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[3] * (width + values[2])


@register_flop_formula(torch.ops.recast.attend_backward)
def _attend_backward_flops(_: Any, query: Any, key: Any, values: Any, *__: Any, **___: Any) -> int:
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[3] * (3 * width + 2 * values[2])
