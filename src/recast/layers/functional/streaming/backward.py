"""From the gradient of what heads gathered, a chunk at a time, to all that it was made from."""

from __future__ import annotations

import torch
from torch import Tensor

from recast.layers.functional.streaming.stream import Chunk, HeadMaps, Stream, add_product


class Gradients:
    """Sums of the gradients over chunks and heads; half precision sums in fp32."""

    def __init__(self, stream: Stream, weight: Tensor) -> None:
        s = self.stream = stream

        def zeros(like: Tensor) -> Tensor:
            return torch.zeros_like(like, dtype=s.sum_dtype)

        self.values, self.seen = zeros(s.values), None if s.whole else zeros(s.seen)
        self.query, self.key, self.weight = torch.empty_like(s.query), zeros(s.key), zeros(weight)
        self.rows, self.columns = zeros(s.rows), zeros(s.columns)
        self.shift = None if s.shift is None else torch.zeros_like(s.shift)
        self.content = torch.zeros_like(s.content)
        self.positional: Tensor | None = None
        """Of a merged head's positional map, (N, keys)."""

    def add(self, head: int, chunk: Chunk, maps: HeadMaps, d: Tensor) -> None:
        """Of what `head` gathered in a chunk, `d` (n, r, J, C), back to all that it was made from."""
        s, (content, gaussian) = self.stream, self.stream.head_maps(head)
        attention, by_rows = maps
        flat = d.view(chunk.n, chunk.r * s.J, s.channels)
        if attention is not None and s.is_merged(head):
            self._merged(head, chunk, attention, flat)
            return
        if s.shift is not None and self.shift is not None and (views := s.shift_views(head, chunk.rows)):
            hit, source = d[:, views[0][0], views[0][1]], (chunk.images, *views[1])
            self.shift[head].add_((hit * s.values[source]).sum(dtype=self.shift.dtype))
            self.values[source].addcmul_(hit, s.shift[head])
        if gaussian is not None and by_rows is not None:
            self._gaussian(gaussian, chunk, by_rows, d)
        if content is not None and attention is not None:
            self._content(content, chunk, attention, flat)
        elif content is not None:
            self._linear(content, chunk, flat)

    def _gaussian(self, at: int, chunk: Chunk, by_rows: Tensor, d: Tensor) -> None:
        s = self.stream
        n, r, width = chunk.n, chunk.r, s.X * s.channels
        factor = s.columns[at].expand(n * r, s.J, s.X)
        d, by_rows = d.view(n * r, s.J, s.channels), by_rows.view(n * r, s.X, s.channels)
        self.columns[at].add_(torch.bmm(d, by_rows.transpose(1, 2)).sum(0, dtype=s.sum_dtype))
        back = torch.bmm(factor.transpose(1, 2), d, out=s.buffer("d_by_rows", n * r, s.X, s.channels))
        back, values = back.view(n, r, width), s.values[chunk.images].view(n, s.Y, width)
        self.rows[at, chunk.rows].add_(torch.bmm(back, values.transpose(1, 2)).sum(0, dtype=s.sum_dtype))
        weights = s.rows[at, chunk.rows].expand(n, r, s.Y).transpose(1, 2)
        add_product(self.values[chunk.images].view(n, s.Y, width), weights, back)

    def _d_map(self, chunk: Chunk, d: Tensor) -> Tensor:
        """The gradient of a head's whole map, (n, r·J, keys)."""
        s = self.stream
        return torch.bmm(d, s.seen[chunk.images].transpose(1, 2), out=s.buffer("logits", *d.shape[:2], s.num_keys))

    def _merged(self, head: int, chunk: Chunk, attention: Tensor, d: Tensor) -> None:
        s, d_map = self.stream, self._d_map(chunk, d)
        if self.positional is None:
            self.positional = torch.empty(d_map.shape[1:], dtype=s.sum_dtype, device=self.values.device)
        if chunk.images.start == 0:
            torch.sum(d_map, 0, dtype=s.sum_dtype, out=self.positional)
        else:
            self.positional.add_(d_map.sum(0, dtype=s.sum_dtype))
        # before `attention` is needed for the last time, and the map's gradient is written over
        values = self.values[chunk.images].view(chunk.n, s.Y * s.X, s.channels)
        add_product(values, s.mixed(head, attention).transpose(1, 2), d)
        self._logits(s.content_heads.index(head), chunk, attention, d_map)

    def finish(self, head: int) -> None:
        """From the gradient of a merged head's positional map to the factors of its Gaussian and to its shift."""
        s = self.stream
        assert self.positional is not None
        grid = self.positional.view(s.I, s.J, s.Y, s.X)
        _, gaussian = s.head_maps(head)
        if gaussian is not None:
            rows, columns = s.rows[gaussian].to(grid.dtype), s.columns[gaussian].to(grid.dtype)
            self.rows[gaussian] = (grid * columns[:, None]).sum((1, 3))
            self.columns[gaussian] = (grid * rows[:, None, :, None]).sum((0, 2))
        if self.shift is not None and (at := s.shift_index(head, grid.device)):
            self.shift[head] = grid[at].sum(dtype=self.shift.dtype)

    def _content(self, at: int, chunk: Chunk, attention: Tensor, d: Tensor) -> None:
        s = self.stream
        self._logits(at, chunk, attention, self._d_map(chunk, d))
        seen = self.values.view(s.batch, s.Y * s.X, s.channels) if self.seen is None else self.seen
        add_product(seen[chunk.images], attention.transpose(1, 2), d.mul_(s.content[at]))

    def _linear(self, at: int, chunk: Chunk, d: Tensor) -> None:
        """What was gathered is gate · Q S: Σ dA ∘ Q S, the gate's gradient, is Σ (dA Sᵀ) ∘ Q as well."""
        s, part = self.stream, self.stream.part(at)
        q, summaries, gate = s.query[chunk.images, chunk.queries, part], s.key[chunk.images, part], s.content[at]
        d_query = torch.bmm(d, summaries.transpose(1, 2))
        self.content[at].add_((d_query * q).sum(dtype=self.content.dtype))
        self.query[chunk.images, chunk.queries, part] = d_query.mul_(gate)
        self.key[chunk.images, part].add_(torch.bmm(q.transpose(1, 2), d).mul_(gate))

    def _logits(self, at: int, chunk: Chunk, attention: Tensor, d_map: Tensor) -> None:
        """From the gradient of a gated content map to queries, keys and the gate; `d_map` is overwritten."""
        s, part = self.stream, self.stream.part(at)
        # softmax backward: C ∘ (dA − Σ dA ∘ C); that sum over all queries is the gate's gradient
        d_map.mul_(attention)
        inner = d_map.sum(-1, keepdim=True)
        self.content[at].add_(inner.sum(dtype=self.content.dtype))
        d_map.addcmul_(attention, inner, value=-1)
        factor = s.content[at] * s.scale
        q, k = s.query[chunk.images, chunk.queries, part], s.key[chunk.images, :, part]
        self.query[chunk.images, chunk.queries, part] = torch.bmm(d_map, k).mul_(factor)
        self.key[chunk.images, :, part].add_(torch.bmm(d_map.transpose(1, 2), q).mul_(factor))

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """In the order and the types of the operator's inputs."""
        s = self.stream
        if self.seen is not None:
            top, left, height, width = s.window
            seen = self.seen.view(s.batch, height, width, s.channels)
            self.values[:, top : top + height, left : left + width].add_(seen)
        shift = s.content.new_empty(0) if self.shift is None else self.shift
        sums = (self.values, self.query, self.key, self.rows, self.columns)
        values, query, key, rows, columns = (t.to(s.values.dtype) for t in sums)
        return values, query, key, rows, columns, shift, self.content, self.weight.to(s.values.dtype)


def project_backward(dy: Tensor, weight: Tensor, groups: int, out: Tensor) -> None:
    """out (T, C) = dy (T, O) times the transpose of W_out^h."""
    if groups == 1:
        torch.mm(dy, weight, out=out)
    elif weight.shape[0] == groups == out.shape[1]:
        torch.mul(dy, weight[:, 0], out=out)
    else:
        per_group = dy.unflatten(1, (groups, -1)).transpose(0, 1)
        product = torch.bmm(per_group, weight.unflatten(0, (groups, -1)))
        out.unflatten(1, (groups, -1)).copy_(product.transpose(0, 1))


def weight_gradient(dy: Tensor, gathered: Tensor, groups: int, out: Tensor) -> None:
    """out (O, C/g) += dyᵀ gathered, the groups' blocks alone."""
    if groups == 1:
        add_product(out, dy.T, gathered)
    elif out.shape[0] == groups == gathered.shape[1]:
        out[:, 0].add_((dy * gathered).sum(0, dtype=out.dtype))
    else:
        per_group = dy.unflatten(1, (groups, -1)).permute(1, 2, 0)
        product = torch.bmm(per_group, gathered.unflatten(1, (groups, -1)).transpose(0, 1))
        out.add_(product.flatten(0, 1))
