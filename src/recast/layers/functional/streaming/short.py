"""Short maps: content heads in groups, with the three maps of a head mixed before the product with the values.

Of a group of G heads and a chunk of images the maps are (n, N, G, keys), query by query: what they gather is then
(n·N, G·C), which meets the heads' W_out in one product. A few calls for all heads, where one after another each of them
would wait for calls more than for numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from recast.layers.functional.streaming.backward import Backward, add_weight_gradient
from recast.layers.functional.streaming.stream import MAP_NUMBERS, VALUE_NUMBERS, Stream, add_product, project

GROUP_NUMBERS = {"cpu": 2**18, "cuda": 2**26}
"""Numbers of a group's maps that are held at a time, or one image's; several such tensors share a CPU's cache."""


class KeyGroup(NamedTuple):
    """Content heads that are computed together."""

    heads: list[int]
    """Among the h."""
    content: slice
    """Among the content heads."""
    images: int
    """Of a chunk."""


def groups(s: Stream) -> Iterator[KeyGroup]:
    """Yield the content heads of a stream that `merges` in groups; one by one in a grouped layer."""
    kind, grouped, a_map = s.kind, s.weight.shape[1] > 1, s.I * s.J * s.num_keys
    together = max(1, min(len(s.content_heads), 1 if grouped else GROUP_NUMBERS[kind] // a_map))
    maps = MAP_NUMBERS if together == 1 else GROUP_NUMBERS  # one head's products want more images
    images = min(maps[kind] // (together * a_map), VALUE_NUMBERS[kind] // (together * s.I * s.J * s.channels))
    for first in range(0, len(s.content_heads), together):
        heads = s.content_heads[first : first + together]
        yield KeyGroup(heads, slice(first, first + len(heads)), max(1, min(s.batch, images)))


def chunks(s: Stream, group: KeyGroup) -> Iterator[slice]:
    """Yield all images in parts."""
    return (slice(b, min(s.batch, b + group.images)) for b in range(0, s.batch, group.images))


def forward(s: Stream, y: Tensor, saved: Tensor | None) -> None:
    """Add the projections of the content heads to `y` (B, I, J, O); their gathers go to `saved` (H_c, B, I, J, C)."""
    queries = s.I * s.J
    for group in groups(s):
        weight, positional = _weight(s, group).transpose(-1, -2), _positional(s, group)
        for images in chunks(s, group):
            mixed = _mixed(s, group, positional, _attention(s, group, images))
            gathered = _gather(s, group, images, mixed, saved)
            project(gathered.view(len(mixed) * queries, -1), weight, y[images].view(len(mixed) * queries, -1))


def backward(s: Backward, dy: Tensor, saved: Tensor | None) -> None:
    """Add the gradients through the content heads to the sums of `s`."""
    queries, keys, values = s.I * s.J, s.num_keys, s.visible
    for group in groups(s):
        weight, positional, count = _weight(s, group), _positional(s, group), len(group.heads)
        d_weight = torch.zeros_like(weight, dtype=s.sum_dtype)
        d_positional = torch.zeros_like(positional, dtype=s.sum_dtype)
        for images in chunks(s, group):
            attention = _attention(s, group, images)
            mixed = _mixed(s, group, positional, attention)
            n, dy_part = len(mixed), dy[images].flatten(0, 2)
            d = s.buffer("d_gathered", n, queries * count, s.channels).zero_()
            project(dy_part, weight, d.view(n * queries, -1))
            gathered = _saved(s, group, images, saved) if saved is not None else _gather(s, group, images, mixed, None)
            add_weight_gradient(dy_part, gathered.view(n * queries, -1), d_weight)
            add_product(s.d_values.flatten(1, 2)[images], mixed.view(n, -1, keys).transpose(1, 2), d)
            d_maps = s.buffer("d_maps", n, queries, count, keys)
            torch.bmm(d, values[images].transpose(1, 2), out=d_maps.view(n, -1, keys))
            d_positional += d_maps.sum(0, dtype=s.sum_dtype)
            # softmax backward: C ∘ (dA − Σ dA ∘ C); that sum over all queries is the gate's gradient
            d_logits = s.buffer("mixed", *attention.shape)
            torch.mul(d_maps.transpose(1, 2), attention, out=d_logits)
            inner = d_logits.sum(-1, keepdim=True)
            s.d_content[group.content] += inner.sum((0, 2, 3), dtype=s.d_content.dtype)
            d_logits.addcmul_(attention, inner, value=-1)
            factor = (s.content[group.content] * s.scale)[:, None, None]
            if d_logits.dtype == torch.float16:  # a closed gate comes before what overflows: infinity times 0 is NaN
                factor = torch.ones_like(d_logits.mul_(factor)[0, :, :1, :1])
            (q, k), maps = _heads(s, group, images), d_logits.flatten(0, 1)
            # the narrow side first: a head of 7 channels takes a fifth of the other order's time
            d_query = torch.bmm(k, maps.transpose(1, 2)).unflatten(0, (n, count)) * factor
            d_key = torch.bmm(q.transpose(1, 2), maps).unflatten(0, (n, count)) * factor
            s.d_query[images].unflatten(-1, (-1, s.head_dim))[:, :, group.content] = d_query.permute(0, 3, 1, 2)
            s.d_key[0][group.content, images] = d_key.transpose(0, 1)
        s.d_weight[group.heads] = d_weight.unflatten(2, (count, -1)).permute(2, 0, 1, 3)
        _positional_gradient(s, group, d_positional)


def _weight(s: Stream, group: KeyGroup) -> Tensor:
    """Return W_out of the group's heads beside each other: (g, O/g, G·C/g)."""
    return torch.stack([s.weight[head] for head in group.heads], 2).flatten(2)


def _heads(s: Stream, group: KeyGroup, images: slice) -> tuple[Tensor, Tensor]:
    """Return queries (n·G, N, D) and keys (n·G, D, keys) of a group."""
    queries = s.query[images].unflatten(-1, (-1, s.head_dim))[:, :, group.content]
    return queries.transpose(1, 2).flatten(0, 1), s.keys[0][group.content, images].transpose(0, 1).flatten(0, 1)


def _attention(s: Stream, group: KeyGroup, images: slice) -> Tensor:
    """Return softmax(Q Kᵀ / √D), (n, G, N, keys)."""
    q, k = _heads(s, group, images)
    shape = (len(q), q.shape[1], s.num_keys)
    logits, attention = s.buffer("mixed", *shape), s.buffer("attention", *shape)
    torch.baddbmm(logits, q, k, beta=0, alpha=s.scale, out=logits)
    if logits.dtype == torch.float16:
        logits.nan_to_num_()  # as `finite_half`, in place
    torch.softmax(logits, -1, out=attention)
    return attention.unflatten(0, (-1, len(group.heads)))


def _grid(s: Stream, group: KeyGroup, maps: Tensor) -> Tensor:
    """View maps (N, G, keys) as (I, J, G, Y, X)."""
    return maps.view(s.I, s.J, len(group.heads), s.Y, s.X)


def _positional(s: Stream, group: KeyGroup) -> Tensor:
    """Return shift · S + R ⊗ K, (N, G, keys): the same for all images."""
    maps = s.values.new_zeros(s.I * s.J, len(group.heads), s.num_keys)
    grid = _grid(s, group, maps)
    for at, head in enumerate(group.heads):
        _, gaussian = s.head_maps(head)
        if gaussian is not None:
            torch.mul(s.rows[gaussian][:, None, :, None], s.columns[gaussian][:, None], out=grid[:, :, at])
        if s.shift is not None and (shifted := s.shifted(head, grid[:, :, at])) is not None:
            shifted += s.shift[head].to(maps.dtype)
    return maps


def _positional_gradient(s: Backward, group: KeyGroup, maps: Tensor) -> None:
    """Add the gradient of the positional maps to those of the Gaussian factors and the shifts."""
    grid = _grid(s, group, maps)
    for at, head in enumerate(group.heads):
        of_head, (_, gaussian) = grid[:, :, at], s.head_maps(head)
        if gaussian is not None:
            rows, columns = s.rows[gaussian].to(grid.dtype), s.columns[gaussian].to(grid.dtype)
            s.d_rows[gaussian] = (of_head * columns[:, None]).sum((1, 3))
            s.d_columns[gaussian] = (of_head * rows[:, None, :, None]).sum((0, 2))
        if s.shift is not None and (shifted := s.shifted(head, of_head)) is not None:
            s.d_shift[head] = shifted.sum(dtype=s.d_shift.dtype)


def _mixed(s: Stream, group: KeyGroup, positional: Tensor, attention: Tensor) -> Tensor:
    """Mix the three maps of the group's heads, query by query: (n, N, G, keys)."""
    gate = s.content[group.content].to(attention.dtype)[:, None]
    n, count, queries, keys = attention.shape
    out = s.buffer("mixed", n, queries, count, keys)
    return torch.addcmul(positional, attention.transpose(1, 2), gate, out=out)


def _saved(s: Stream, group: KeyGroup, images: slice, saved: Tensor) -> Tensor:
    """View the saved gathers of the group's heads for some images: (n, N·G, C)."""
    return saved[group.content].view(s.batch, -1, s.channels)[images]


def _gather(s: Stream, group: KeyGroup, images: slice, mixed: Tensor, saved: Tensor | None) -> Tensor:
    """Return the gathers of the group's heads, (n, N·G, C), written into `saved` if there is one."""
    n, queries, count, keys = mixed.shape
    shape = (n, queries * count, s.channels)
    out = s.buffer("gathered", *shape) if saved is None else _saved(s, group, images, saved)
    return torch.bmm(mixed.view(n, -1, keys), s.visible[images], out=out)
