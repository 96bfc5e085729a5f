"""The operator under the fast paths: heads gather and project one after another, and no map is ever held whole.

    y = b + Σ_h (shift_h · S_h + R_h ⊗ K_h + content_h · softmax(Q_h K_hᵀ / √D)) V W_out^h

The Gaussian is applied as two small products, R over the rows and K over the columns. The content maps of a few
thousand queries at a time stay in the processor's cache. The backward pass computes them again (as flash attention
does, Dao et al. 2022), here with values that all heads share and that are wider than the keys.

Two custom operators, so that `torch.compile` and the counters of `torch.utils.flop_counter` see one node each.
Derivatives of the first order only: `dense` has the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

MAP_NUMBERS = {"cpu": 2**20, "cuda": 2**26}
"""Numbers of a content map that are held at a time: 4 MiB on a CPU, whose cache they should stay in."""
TOKENS = {"cpu": 2**11, "cuda": 2**20}
"""Queries of a product: enough that it is fast, few enough that its operands stay in the cache."""


@dataclass(frozen=True)
class Layout:
    """What of the call is no tensor: which heads have which maps, and where their taps are."""

    size: tuple[int, int]
    """I, J: rows and columns of the queries."""
    content_heads: tuple[int, ...]
    gaussian_heads: tuple[int, ...]
    taps: tuple[int, ...]
    """Per head (i₀, i₁, y₀, j₀, j₁, x₀): queries i₀ ≤ i < i₁ look at row y₀ + (i − i₀)·stride; empty: no taps."""
    stride: tuple[int, int]
    window: tuple[int, int, int, int]
    """First row and column, rows and columns of the values that content attention sees."""

    def shift_views(self, head: int, i0: int, i1: int) -> tuple[tuple[slice, slice], tuple[slice, slice]] | None:
        """Where queries of the rows [i0, i1) that hit a pixel are among those rows, and where these pixels are."""
        a, b, y0, c, d, x0 = self.taps[6 * head : 6 * head + 6]
        first, last = max(a, i0), min(b, i1)
        if first >= last or c >= d:
            return None
        y, (s, t) = y0 + (first - a) * self.stride[0], self.stride
        at = (slice(first - i0, last - i0), slice(c, d))
        return at, (slice(y, y + (last - first - 1) * s + 1, s), slice(x0, x0 + (d - c - 1) * t + 1, t))


class _Stream:
    """The tensors of a call, and the steps that both passes share. Buffers hold one chunk: n images, r query rows."""

    def __init__(
        self,
        values: Tensor,
        query: Tensor,
        key: Tensor,
        rows: Tensor,
        columns: Tensor,
        shift: Tensor | None,
        content: Tensor,
        weight: Tensor,
        layout: Layout,
        groups: int,
    ) -> None:
        self.values, self.query, self.key, self.rows, self.columns = values, query, key, rows, columns
        self.shift, self.content, self.layout, self.groups = shift, content, layout, groups
        self.heads = weight.shape[0]
        self.batch, self.Y, self.X, self.channels = values.shape
        self.I, self.J = layout.size
        # half precision sums over the heads in fp32
        self.sum_dtype = values.dtype if values.dtype in (torch.float32, torch.float64) else torch.float32
        top, left, height, width = layout.window
        self.whole = (height, width) == (self.Y, self.X)
        self.seen = values if self.whole else values[:, top : top + height, left : left + width].contiguous()
        self.seen = self.seen.flatten(1, 2)
        self.num_keys = height * width if layout.content_heads else 0
        self.head_dim = query.shape[-1] // max(1, len(layout.content_heads))
        self.scale = max(1, self.head_dim) ** -0.5
        kind = "cpu" if values.device.type == "cpu" else "cuda"
        per_row = self.J * max(1, self.num_keys)
        self.chunk_rows = min(self.I, max(1, min(MAP_NUMBERS[kind] // per_row, TOKENS[kind] // self.J)))
        images = min(MAP_NUMBERS[kind] // (per_row * self.I), TOKENS[kind] // (self.J * self.I))
        self.chunk_images = max(1, min(self.batch, images)) if self.chunk_rows == self.I else 1
        self.buffers: dict[str, Tensor] = {}

    def chunks(self) -> Iterator[tuple[int, int, int, int]]:
        """Query rows [i0, i1) and images [b, e): all rows of some images, or some rows of one image."""
        for i0 in range(0, self.I, self.chunk_rows):
            for b in range(0, self.batch, self.chunk_images):
                yield i0, min(self.I, i0 + self.chunk_rows), b, min(self.batch, b + self.chunk_images)

    def buffer(self, name: str, *shape: int) -> Tensor:
        """Memory that is used again by every chunk: pages that were touched once are fast."""
        size = 1
        for s in shape:
            size *= s
        known = self.buffers.get(name)
        if known is None or known.numel() < size:
            self.buffers[name] = known = self.values.new_empty(size)
        return known[:size].view(shape)

    def head_maps(self, head: int) -> tuple[int | None, int | None]:
        """Where `head` is among the content heads and among the Gaussian ones."""
        c, g = self.layout.content_heads, self.layout.gaussian_heads
        return c.index(head) if head in c else None, g.index(head) if head in g else None

    def content_map(self, at: int, i0: int, i1: int, b: int, e: int) -> Tensor:
        """softmax(Q Kᵀ / √D) of a chunk, (n, r·J, keys)."""
        shape = (e - b, (i1 - i0) * self.J, self.num_keys)
        part = slice(at * self.head_dim, (at + 1) * self.head_dim)
        logits, attention = self.buffer("logits", *shape), self.buffer("attention", *shape)
        q, k = self.query[b:e, i0 * self.J : i1 * self.J, part], self.key[b:e, :, part]
        torch.baddbmm(logits, q, k.transpose(1, 2), beta=0, alpha=self.scale, out=logits)
        return torch.softmax(logits, -1, out=attention)

    def by_rows(self, at: int, i0: int, i1: int, b: int, e: int) -> Tensor:
        """R V of a chunk: (n, r, X·C)."""
        n, r = e - b, i1 - i0
        out = self.buffer("by_rows", n, r, self.X * self.channels)
        return torch.bmm(
            self.rows[at, i0:i1].expand(n, r, self.Y), self.values[b:e].view(n, self.Y, self.X * self.channels), out=out
        )

    def maps(self, head: int, i0: int, i1: int, b: int, e: int) -> tuple[Tensor | None, Tensor | None]:
        """The content map and R V of a chunk, where `head` has them."""
        content, gaussian = self.head_maps(head)
        return (
            None if content is None else self.content_map(content, i0, i1, b, e),
            None if gaussian is None else self.by_rows(gaussian, i0, i1, b, e),
        )

    def gather(
        self, head: int, i0: int, i1: int, b: int, e: int, maps: tuple[Tensor | None, Tensor | None], out: Tensor
    ) -> None:
        """What `head` gathers for a chunk, into `out` (n, r, J, C)."""
        content, gaussian = self.head_maps(head)
        attention, by_rows = maps
        n, r = e - b, i1 - i0
        if attention is not None:
            torch.bmm(attention, self.seen[b:e], out=out.view(n, r * self.J, self.channels))
            out.mul_(self.content[content])
        if by_rows is not None:
            product = out.view(n * r, self.J, self.channels)
            factor = self.columns[gaussian].expand(n * r, self.J, self.X)
            by_rows = by_rows.view(n * r, self.X, self.channels)
            if attention is None:
                torch.bmm(factor, by_rows, out=product)
            else:
                product.baddbmm_(factor, by_rows)
        if content is None and gaussian is None:
            out.zero_()
        if self.shift is not None and (views := self.layout.shift_views(head, i0, i1)):
            hit = out[:, views[0][0], views[0][1]]
            hit.addcmul_(self.values[b:e, views[1][0], views[1][1]], self.shift[head])


def _project(gathered: Tensor, weight: Tensor, groups: int, out: Tensor) -> None:
    """out (T, O) += gathered (T, C) times W_out^h, `weight` (O, C/g)."""
    if groups == 1:
        _add_mm(out, gathered, weight.T)
    elif weight.shape[0] == groups == gathered.shape[1]:
        out.addcmul_(gathered, weight[:, 0])
    else:
        per_group = gathered.unflatten(1, (groups, -1)).transpose(0, 1)
        product = torch.bmm(per_group, weight.unflatten(0, (groups, -1)).transpose(1, 2))
        out.unflatten(1, (groups, -1)).add_(product.transpose(0, 1))


def _add_mm(out: Tensor, a: Tensor, b: Tensor) -> None:
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    else:
        out.add_(a @ b)


def _add_bmm(out: Tensor, a: Tensor, b: Tensor) -> None:
    if out.dtype == a.dtype:
        out.baddbmm_(a, b)
    else:
        out.add_(torch.bmm(a, b))


def _project_backward(dy: Tensor, weight: Tensor, groups: int, out: Tensor) -> None:
    """out (T, C) = dy (T, O) times the transpose of W_out^h."""
    if groups == 1:
        torch.mm(dy, weight, out=out)
    elif weight.shape[0] == groups == out.shape[1]:
        torch.mul(dy, weight[:, 0], out=out)
    else:
        per_group = dy.unflatten(1, (groups, -1)).transpose(0, 1)
        product = torch.bmm(per_group, weight.unflatten(0, (groups, -1)))
        out.unflatten(1, (groups, -1)).copy_(product.transpose(0, 1))


def _weight_gradient(dy: Tensor, gathered: Tensor, groups: int, out: Tensor) -> None:
    """out (O, C/g) += dyᵀ gathered, the groups' blocks alone."""
    if groups == 1:
        _add_mm(out, dy.T, gathered)
    elif out.shape[0] == groups == gathered.shape[1]:
        out[:, 0].add_((dy * gathered).sum(0, dtype=out.dtype))
    else:
        per_group = dy.unflatten(1, (groups, -1)).permute(1, 2, 0)
        product = torch.bmm(per_group, gathered.unflatten(1, (groups, -1)).transpose(0, 1))
        out.add_(product.flatten(0, 1))


def _layout(
    size: Sequence[int],
    content_heads: Sequence[int],
    gaussian_heads: Sequence[int],
    taps: Sequence[int],
    stride: Sequence[int],
    window: Sequence[int],
) -> Layout:
    return Layout(
        (size[0], size[1]),
        tuple(content_heads),
        tuple(gaussian_heads),
        tuple(taps),
        (stride[0], stride[1]),
        (window[0], window[1], window[2], window[3]),
    )


@torch.library.custom_op("recast::attend", mutates_args=())
def attend(
    values: Tensor,
    query: Tensor,
    key: Tensor,
    rows: Tensor,
    columns: Tensor,
    shift: Tensor | None,
    content: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    size: Sequence[int],
    content_heads: Sequence[int],
    gaussian_heads: Sequence[int],
    taps: Sequence[int],
    stride: Sequence[int],
    window: Sequence[int],
    groups: int,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Heads' gathers through W_out: ((B, I, J, O), what they gathered (h, B, I, J, C) if `keep`, else empty).

    `values` (B, Y, X, C) contiguous; `query` (B, N, H_c·D), `key` (B, keys, H_c·D); `rows` (H_g, I, Y), the gates
    multiplied in, `columns` (H_g, J, X); `shift` (h,); `content` (H_c,); `weight` (h, O, C/g); `bias` (O,). All of one
    dtype but `content` and `shift`. The rest is a `Layout`. `keep` saves the backward pass one product a head.
    """
    layout = _layout(size, content_heads, gaussian_heads, taps, stride, window)
    with torch.autocast(values.device.type, enabled=False):
        s = _Stream(values, query, key, rows, columns, shift, content, weight, layout, groups)
        y = values.new_zeros(s.batch, s.I, s.J, weight.shape[1], dtype=s.sum_dtype)
        if bias is not None:
            y += bias
        kept = values.new_empty(s.heads if keep else 0, s.batch, s.I, s.J, s.channels)
        for h in range(s.heads):
            for i0, i1, b, e in s.chunks():
                tokens = (e - b) * (i1 - i0) * s.J
                shape = (e - b, i1 - i0, s.J, s.channels)
                gathered = kept[h, b:e, i0:i1] if keep else s.buffer("gathered", *shape)
                s.gather(h, i0, i1, b, e, s.maps(h, i0, i1, b, e), gathered)
                _project(gathered.view(tokens, -1), weight[h], groups, y[b:e, i0:i1].view(tokens, -1))
    return y.to(values.dtype), kept


@attend.register_fake
def _(values, query, key, rows, columns, shift, content, weight, bias, size, *rest):  # type: ignore[no-untyped-def]
    keep = rest[-1]
    batch, channels = values.shape[0], values.shape[3]
    kept = values.new_empty(weight.shape[0] if keep else 0, batch, size[0], size[1], channels)
    return values.new_empty(batch, size[0], size[1], weight.shape[1]), kept


@torch.library.custom_op("recast::attend_backward", mutates_args=())
def attend_backward(
    dy: Tensor,
    values: Tensor,
    query: Tensor,
    key: Tensor,
    rows: Tensor,
    columns: Tensor,
    shift: Tensor | None,
    content: Tensor,
    weight: Tensor,
    kept: Tensor,
    size: Sequence[int],
    content_heads: Sequence[int],
    gaussian_heads: Sequence[int],
    taps: Sequence[int],
    stride: Sequence[int],
    window: Sequence[int],
    groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `attend` for values, query, key, rows, columns, shift (empty without one), content and weight."""
    layout = _layout(size, content_heads, gaussian_heads, taps, stride, window)
    with torch.autocast(values.device.type, enabled=False):
        s = _Stream(values, query, key, rows, columns, shift, content, weight, layout, groups)
        g = _Gradients(s, weight)
        for h in range(s.heads):
            for i0, i1, b, e in s.chunks():
                n, r, tokens = e - b, i1 - i0, (e - b) * (i1 - i0) * s.J
                dy_part = dy[b:e, i0:i1].reshape(tokens, -1)
                d_gathered = s.buffer("d_gathered", n, r, s.J, s.channels)
                _project_backward(dy_part, weight[h], groups, d_gathered.view(tokens, -1))
                maps = s.maps(h, i0, i1, b, e)
                if len(kept):
                    gathered = kept[h, b:e, i0:i1]
                else:
                    gathered = s.buffer("gathered", n, r, s.J, s.channels)
                    s.gather(h, i0, i1, b, e, maps, gathered)
                _weight_gradient(dy_part, gathered.view(tokens, -1), groups, g.weight[h])
                g.add(h, i0, i1, b, e, maps, d_gathered)
    return g.results()


class _Gradients:
    """Sums of the gradients over chunks and heads; half precision sums in fp32."""

    def __init__(self, stream: _Stream, weight: Tensor) -> None:
        s = self.stream = stream

        def zeros(like: Tensor) -> Tensor:
            return torch.zeros(like.shape, dtype=s.sum_dtype, device=like.device)

        self.values, self.seen = zeros(s.values), None if s.whole else zeros(s.seen)
        self.query, self.key, self.weight = torch.empty_like(s.query), zeros(s.key), zeros(weight)
        self.rows, self.columns = zeros(s.rows), zeros(s.columns)
        self.shift = None if s.shift is None else torch.zeros_like(s.shift)
        self.content = torch.zeros_like(s.content)

    def add(
        self, head: int, i0: int, i1: int, b: int, e: int, maps: tuple[Tensor | None, Tensor | None], d: Tensor
    ) -> None:
        """Of what `head` gathered in a chunk, `d` (n, r, J, C), back to all that it was made from."""
        s, (content, gaussian) = self.stream, self.stream.head_maps(head)
        attention, by_rows = maps
        if s.shift is not None and self.shift is not None and (views := s.layout.shift_views(head, i0, i1)):
            hit, source = d[:, views[0][0], views[0][1]], (slice(b, e), *views[1])
            self.shift[head].add_((hit * s.values[source]).sum(dtype=self.shift.dtype))
            self.values[source].addcmul_(hit, s.shift[head])
        if gaussian is not None and by_rows is not None:
            self._gaussian(gaussian, i0, i1, b, e, by_rows, d)
        if content is not None and attention is not None:
            self._content(content, i0, i1, b, e, attention, d)

    def _gaussian(self, at: int, i0: int, i1: int, b: int, e: int, by_rows: Tensor, d: Tensor) -> None:
        s = self.stream
        n, r, width = e - b, i1 - i0, s.X * s.channels
        factor = s.columns[at].expand(n * r, s.J, s.X)
        d, by_rows = d.view(n * r, s.J, s.channels), by_rows.view(n * r, s.X, s.channels)
        self.columns[at].add_(torch.bmm(d, by_rows.transpose(1, 2)).sum(0, dtype=s.sum_dtype))
        back = torch.bmm(factor.transpose(1, 2), d, out=s.buffer("d_by_rows", n * r, s.X, s.channels))
        back, values = back.view(n, r, width), s.values[b:e].view(n, s.Y, width)
        self.rows[at, i0:i1].add_(torch.bmm(back, values.transpose(1, 2)).sum(0, dtype=s.sum_dtype))
        _add_bmm(self.values[b:e].view(n, s.Y, width), s.rows[at, i0:i1].expand(n, r, s.Y).transpose(1, 2), back)

    def _content(self, at: int, i0: int, i1: int, b: int, e: int, attention: Tensor, d: Tensor) -> None:
        s = self.stream
        n, tokens = e - b, (i1 - i0) * s.J
        d = d.view(n, tokens, s.channels)
        d_map = torch.bmm(d, s.seen[b:e].transpose(1, 2), out=s.buffer("logits", n, tokens, s.num_keys))
        # softmax backward: C ∘ (dA − Σ dA ∘ C); that sum over all queries is the gate's gradient
        d_map.mul_(attention)
        inner = d_map.sum(-1, keepdim=True)
        self.content[at].add_(inner.sum(dtype=self.content.dtype))
        d_map.addcmul_(attention, inner, value=-1)
        gate = s.content[at]
        part = slice(at * s.head_dim, (at + 1) * s.head_dim)
        q, k = s.query[b:e, i0 * s.J : i1 * s.J, part], s.key[b:e, :, part]
        self.query[b:e, i0 * s.J : i1 * s.J, part] = torch.bmm(d_map, k).mul_(gate * s.scale)
        self.key[b:e, :, part].add_(torch.bmm(d_map.transpose(1, 2), q).mul_(gate * s.scale))
        seen = self.values.view(s.batch, s.Y * s.X, s.channels) if self.seen is None else self.seen
        _add_bmm(seen[b:e], attention.transpose(1, 2), d.mul_(gate))

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """In the order and the types of the operator's inputs."""
        s = self.stream
        if self.seen is not None:
            top, left, height, width = s.layout.window
            seen = self.seen.view(s.batch, height, width, s.channels)
            self.values[:, top : top + height, left : left + width].add_(seen)
        shift = s.content.new_empty(0) if self.shift is None else self.shift
        sums = (self.values, self.query, self.key, self.rows, self.columns)
        values, query, key, rows, columns = (t.to(s.values.dtype) for t in sums)
        return values, query, key, rows, columns, shift, self.content, self.weight.to(s.values.dtype)


@attend_backward.register_fake
def _(dy, values, query, key, rows, columns, shift, content, weight, *rest):  # type: ignore[no-untyped-def]
    like = (values, query, key, rows, columns, shift, content, weight)
    return tuple(content.new_empty(0) if t is None else torch.empty_like(t) for t in like)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, bias, size, content_heads, gaussian_heads, taps, stride, window, groups, _keep = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.numbers = (size, content_heads, gaussian_heads, taps, stride, window, groups)
    ctx.bias = None if bias is None else bias.dtype
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    *tensors, kept = ctx.saved_tensors
    dy = dy.contiguous()
    gradients = list(torch.ops.recast.attend_backward(dy, *tensors, kept, *ctx.numbers))
    if tensors[5] is None:
        gradients[5] = None
    bias = None if ctx.bias is None else dy.sum((0, 1, 2), dtype=ctx.bias)
    return (*gradients, bias, *(None,) * 8)


attend.register_autograd(_backward, setup_context=_save)


# --- what they cost, for the planner and `torch.utils.flop_counter` ---------------------------------------------------


def _gather_flops(values: Any, query: Any, key: Any, rows: Any, columns: Any) -> tuple[int, int]:
    """Twice the multiply-accumulates of the content maps' two products, and of the Gaussians' two."""
    batch, Y, X, channels = values
    _, queries, width = query
    content = 0
    if width:
        content = queries * key[1] * width
    gaussian = rows[0] * rows[1] * X * channels * (Y + columns[1])
    return 2 * batch * content, 2 * batch * gaussian


@register_flop_formula(torch.ops.recast.attend)
def _attend_flops(  # type: ignore[no-untyped-def]
    values, query, key, rows, columns, shift, content, weight, bias, size, *rest, out_shape=None, **_
) -> int:
    logits, gaussian = _gather_flops(values, query, key, rows, columns)
    queries = values[0] * size[0] * size[1]
    mixed = 2 * queries * key[1] * content[0] * values[3]
    return logits + gaussian + mixed + 2 * queries * weight[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.recast.attend_backward)
def _attend_backward_flops(  # type: ignore[no-untyped-def]
    dy, values, query, key, rows, columns, shift, content, weight, kept, size, *rest, out_shape=None, **_
) -> int:
    logits, gaussian = _gather_flops(values, query, key, rows, columns)
    queries = values[0] * size[0] * size[1]
    mixed = 2 * queries * key[1] * content[0] * values[3]
    again = 0 if kept[0] else mixed + gaussian // 2
    return 3 * logits + 2 * mixed + 5 * gaussian // 2 + again + 4 * queries * weight[0] * weight[1] * weight[2]
