"""Backward pass from the gradient of the gathers to all operands, a chunk at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from recast.layers.functional.streaming.stream import Chunk, Layout, Operands, Stream, add_product


class Backward(Stream):
    """A stream and the sums of its gradients over chunks and heads; half precision sums in fp32."""

    def __init__(self, operands: Operands, layout: Layout) -> None:
        super().__init__(operands, layout)

        def zeros(like: Tensor) -> Tensor:
            return torch.zeros_like(like, dtype=self.sum_dtype)

        self.d_values, self.d_weight = zeros(self.values), zeros(self.weight)
        self.d_key = [zeros(part) for part in ([self.key] if self.linear else self.keys)]
        self.d_visible = [self.d_values.new_zeros(self.batch, self.channels, part.shape[-1]) for part in self.keys]
        """By tile, channel by channel: a product with the maps themselves takes half the time of one with them
        transposed."""
        self.d_query, self.d_rows, self.d_columns = torch.empty_like(self.query), zeros(self.rows), zeros(self.columns)
        self.d_shift = self.content.new_empty(0) if self.shift is None else torch.zeros_like(self.shift)
        self.d_content = torch.zeros_like(self.content)

    def add(self, head: int, chunk: Chunk, norm: Tensor, by_content: Tensor, by_rows: Tensor | None, d: Tensor) -> None:
        """Add the gradients from `d` (n, r, J, C), the gradient of the gathers of `head` in a chunk; overwrites `d`.

        `by_content` holds the gathers of its content map.
        """
        content, gaussian = self.head_maps(head)
        flat = d.view(chunk.n, chunk.r * self.J, self.channels)
        if self.shift is not None and (views := self.shift_views(head, chunk.rows)):
            queries, pixels = views
            d_shifted, source = d[:, *queries], (chunk.images, *pixels)
            self.d_shift[head].add_((d_shifted * self.values[source]).sum(dtype=self.d_shift.dtype))
            self.d_values[source].addcmul_(d_shifted, self.shift[head])
        if gaussian is not None and by_rows is not None:
            self._gaussian(gaussian, chunk, by_rows, d)
        if content is not None and self.linear:
            self._linear(content, chunk, flat)
        elif content is not None:
            self._content(content, chunk, norm[content, chunk.images, chunk.queries], by_content.view_as(flat), flat)

    def _gaussian(self, at: int, chunk: Chunk, by_rows: Tensor, d: Tensor) -> None:
        n, r, width = chunk.n, chunk.r, self.X * self.channels
        factor = self.columns[at].expand(n * r, self.J, self.X)
        d, by_rows = d.view(n * r, self.J, self.channels), by_rows.view(n * r, self.X, self.channels)
        self.d_columns[at].add_(torch.bmm(d, by_rows.transpose(1, 2)).sum(0, dtype=self.sum_dtype))
        back = torch.bmm(factor.transpose(1, 2), d, out=self.buffer("d_by_rows", n * r, self.X, self.channels))
        back, values = back.view(n, r, width), self.values[chunk.images].view(n, self.Y, width)
        self.d_rows[at, chunk.rows].add_(torch.bmm(back, values.transpose(1, 2)).sum(0, dtype=self.sum_dtype))
        weights = self.rows[at, chunk.rows].expand(n, r, self.Y).transpose(1, 2)
        add_product(self.d_values[chunk.images].view(n, self.Y, width), weights, back)

    def _linear(self, at: int, chunk: Chunk, d: Tensor) -> None:
        """Add the gradients of gate · Q S: that of the gate, Σ dA ∘ Q S, equals Σ (dA Sᵀ) ∘ Q."""
        part, gate = self.channels_of(at), self.content[at]
        q, summaries = self.query[chunk.images, chunk.queries, part], self.key[chunk.images, part]
        d_query = torch.bmm(d, summaries.transpose(1, 2))
        self.d_content[at].add_((d_query * q).sum(dtype=self.d_content.dtype))
        self.d_query[chunk.images, chunk.queries, part] = d_query.mul_(gate)
        self.d_key[0][chunk.images, part].add_(torch.bmm(q.transpose(1, 2), d).mul_(gate))

    def _content(self, at: int, chunk: Chunk, norm: Tensor, by_content: Tensor, d: Tensor) -> None:
        """Add the gradients of a gated content map's gathers to queries, keys, values and the gate, tile by tile."""
        gate, query = self.content[at], self.scaled_query(at, chunk)
        top = self.top(at, chunk.images, query)
        # softmax backward: C ∘ (dA − Σ dA ∘ C); that sum, over queries the gate's gradient, is d · what was gathered,
        # but of that half precision has too few digits
        inner = (d * by_content).sum(-1, keepdim=True) if self.by_parts else None
        if inner is not None:  # C is norm · weights
            self.d_content[at].add_(inner.sum())
            d.mul_(norm)
            inner.mul_(norm)
        by_channels = (d * gate).transpose(1, 2).contiguous()
        by_width = (query * gate).transpose(1, 2).contiguous()
        narrow = query.new_zeros(chunk.n, self.head_dim, d.shape[1])
        # in half precision a closed gate comes before what overflows: infinity times 0 is NaN
        factor, is_half = gate * self.scale, query.dtype == torch.float16
        tiles = zip(self.tiles(at, chunk.images), self.d_key, self.d_visible, strict=True)
        for (keys, values), d_key, d_visible in tiles:
            weights = self.weights(query, keys, top)
            d_logits = torch.bmm(d, values.transpose(1, 2), out=self.buffer("d_map", *weights.shape))
            if inner is not None:
                d_logits.sub_(inner).mul_(weights)
            else:
                inner_sum = d_logits.mul_(weights).sum(-1, keepdim=True)
                self.d_content[at].add_(inner_sum.sum(dtype=self.d_content.dtype))
                d_logits.addcmul_(weights, inner_sum, value=-1)
            add_product(d_visible[chunk.images], by_channels, weights)
            # the narrow side first: a head of 7 channels takes a fifth of the other order's time
            add_product(narrow, keys * factor if is_half else keys, d_logits.transpose(1, 2))
            add_product(d_key[at, chunk.images], by_width, d_logits)
        d_query = narrow.transpose(1, 2).mul_(1 if is_half else factor)
        self.d_query[chunk.images, chunk.queries, self.channels_of(at)] = d_query

    def results(self) -> tuple[Tensor, ...]:
        """Return the gradients in the order and the dtypes of the operator's inputs."""
        if self.num_keys:
            top, left, height, width = self.window
            d_visible = torch.cat(self.d_visible, 2).transpose(1, 2).unflatten(1, (height, width))
            self.d_values[:, top : top + height, left : left + width].add_(d_visible)
        d_key = self.d_key[0] if self.linear else torch.cat(self.d_key, -1).permute(1, 3, 0, 2).flatten(2)
        sums = (self.d_values, self.d_query, d_key, self.d_rows, self.d_columns)
        gates = (self.d_shift, self.d_content)
        return (*(t.to(self.values.dtype) for t in sums), *gates, self.d_weight.flatten(1, 2).to(self.values.dtype))


def add_weight_gradient(dy: Tensor, gathered: Tensor, out: Tensor) -> None:
    """Add the groups' blocks of dyᵀ gathered to out (g, O/g, C/g)."""
    groups, a, b = out.shape
    if groups == 1:
        add_product(out[0], dy.T, gathered)
    elif a == b == 1:
        out[:, 0, 0].add_((dy * gathered).sum(0, dtype=out.dtype))
    else:
        per_group = dy.unflatten(1, (groups, -1)).permute(1, 2, 0)
        out.add_(torch.bmm(per_group, gathered.unflatten(1, (groups, -1)).transpose(0, 1)))
