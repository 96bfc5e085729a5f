"""From the gradient of what heads gathered, a chunk at a time, to all that it was made from."""

from __future__ import annotations

import torch
from torch import Tensor

from recast.layers.functional.streaming.forward import Stream
from recast.layers.functional.streaming.projection import add_bmm


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

    def add(
        self, head: int, i0: int, i1: int, b: int, e: int, maps: tuple[Tensor | None, Tensor | None], d: Tensor
    ) -> None:
        """Of what `head` gathered in a chunk, `d` (n, r, J, C), back to all that it was made from."""
        s, (content, gaussian) = self.stream, self.stream.head_maps(head)
        attention, by_rows = maps
        if attention is not None and s.is_merged(head):
            self._merged(head, b, e, attention, d)
            return
        if s.shift is not None and self.shift is not None and (views := s.layout.shift_views(head, i0, i1)):
            hit, source = d[:, views[0][0], views[0][1]], (slice(b, e), *views[1])
            self.shift[head].add_((hit * s.values[source]).sum(dtype=self.shift.dtype))
            self.values[source].addcmul_(hit, s.shift[head])
        if gaussian is not None and by_rows is not None:
            self._gaussian(gaussian, i0, i1, b, e, by_rows, d)
        if content is not None and attention is not None:
            self._content(content, i0, i1, b, e, attention, d)
        elif content is not None:
            self._linear(content, i0, i1, b, e, d)

    def _gaussian(self, at: int, i0: int, i1: int, b: int, e: int, by_rows: Tensor, d: Tensor) -> None:
        s = self.stream
        n, r, width = e - b, i1 - i0, s.X * s.channels
        factor = s.columns[at].expand(n * r, s.J, s.X)
        d, by_rows = d.view(n * r, s.J, s.channels), by_rows.view(n * r, s.X, s.channels)
        self.columns[at].add_(torch.bmm(d, by_rows.transpose(1, 2)).sum(0, dtype=s.sum_dtype))
        back = torch.bmm(factor.transpose(1, 2), d, out=s.buffer("d_by_rows", n * r, s.X, s.channels))
        back, values = back.view(n, r, width), s.values[b:e].view(n, s.Y, width)
        self.rows[at, i0:i1].add_(torch.bmm(back, values.transpose(1, 2)).sum(0, dtype=s.sum_dtype))
        add_bmm(self.values[b:e].view(n, s.Y, width), s.rows[at, i0:i1].expand(n, r, s.Y).transpose(1, 2), back)

    def _merged(self, head: int, b: int, e: int, attention: Tensor, d: Tensor) -> None:
        s = self.stream
        n, tokens = e - b, s.I * s.J
        d = d.view(n, tokens, s.channels)
        d_map = torch.bmm(d, s.seen[b:e].transpose(1, 2), out=s.buffer("logits", n, tokens, s.num_keys))
        d_positional = self.sum_buffer(tokens, s.num_keys)
        if b == 0:
            torch.sum(d_map, 0, dtype=s.sum_dtype, out=d_positional)
        else:
            d_positional.add_(d_map.sum(0, dtype=s.sum_dtype))
        # before `attention` is needed for the last time, and the map's gradient is written over
        values = self.values[b:e].view(n, s.Y * s.X, s.channels)
        add_bmm(values, s.mixed(head, attention).transpose(1, 2), d)
        self._logits(s.layout.content_heads.index(head), 0, s.I, b, e, attention, d_map)

    def sum_buffer(self, *shape: int) -> Tensor:
        """The gradient of a merged head's positional map, (N, keys)."""
        if self.positional is None:
            self.positional = torch.empty(shape, dtype=self.stream.sum_dtype, device=self.values.device)
        return self.positional

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
        if self.shift is not None and (at := s.layout.taps_of(head)):
            self.shift[head] = grid[tuple(t.to(grid.device) for t in at)].sum(dtype=self.shift.dtype)

    def _content(self, at: int, i0: int, i1: int, b: int, e: int, attention: Tensor, d: Tensor) -> None:
        s = self.stream
        n, tokens = e - b, (i1 - i0) * s.J
        d = d.view(n, tokens, s.channels)
        d_map = torch.bmm(d, s.seen[b:e].transpose(1, 2), out=s.buffer("logits", n, tokens, s.num_keys))
        self._logits(at, i0, i1, b, e, attention, d_map)
        seen = self.values.view(s.batch, s.Y * s.X, s.channels) if self.seen is None else self.seen
        add_bmm(seen[b:e], attention.transpose(1, 2), d.mul_(s.content[at]))

    def _linear(self, at: int, i0: int, i1: int, b: int, e: int, d: Tensor) -> None:
        """What was gathered is gate · Q S: Σ dA ∘ Q S, the gate's gradient, is Σ (dA Sᵀ) ∘ Q as well."""
        s, part, queries = self.stream, self.stream.part(at), slice(i0 * self.stream.J, i1 * self.stream.J)
        d = d.view(e - b, -1, s.channels)
        q, summaries, gate = s.query[b:e, queries, part], s.key[b:e, part], s.content[at]
        d_query = torch.bmm(d, summaries.transpose(1, 2))
        self.content[at].add_((d_query * q).sum(dtype=self.content.dtype))
        self.query[b:e, queries, part] = d_query.mul_(gate)
        self.key[b:e, part].add_(torch.bmm(q.transpose(1, 2), d).mul_(gate))

    def _logits(self, at: int, i0: int, i1: int, b: int, e: int, attention: Tensor, d_map: Tensor) -> None:
        """From the gradient of a gated content map to queries, keys and the gate; `d_map` is overwritten."""
        s = self.stream
        # softmax backward: C ∘ (dA − Σ dA ∘ C); that sum over all queries is the gate's gradient
        d_map.mul_(attention)
        inner = d_map.sum(-1, keepdim=True)
        self.content[at].add_(inner.sum(dtype=self.content.dtype))
        d_map.addcmul_(attention, inner, value=-1)
        gate = s.content[at]
        part = s.part(at)
        q, k = s.query[b:e, i0 * s.J : i1 * s.J, part], s.key[b:e, :, part]
        self.query[b:e, i0 * s.J : i1 * s.J, part] = torch.bmm(d_map, k).mul_(gate * s.scale)
        self.key[b:e, :, part].add_(torch.bmm(d_map.transpose(1, 2), q).mul_(gate * s.scale))

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
