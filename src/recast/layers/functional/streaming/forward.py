"""What heads gather, a chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from recast.layers.functional.streaming.layout import Layout

MAP_NUMBERS = {"cpu": 2**20, "cuda": 2**26}
"""Numbers of a content map that are held at a time: 4 MiB on a CPU, whose cache they should stay in."""
MERGE_KEYS = 2
"""Keys per channel up to which a head's content map is mixed with its other two before the product with the values."""
VALUE_NUMBERS = {"cpu": 2**20, "cuda": 2**26}
"""Numbers of a head's gathers that are held at a time: enough queries for a fast product."""


class Stream:
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
        linear: bool,
    ) -> None:
        self.values, self.query, self.key, self.rows, self.columns = values, query, key, rows, columns
        self.shift, self.content, self.layout, self.groups, self.linear = shift, content, layout, groups, linear
        self.heads = weight.shape[0]
        self.batch, self.Y, self.X, self.channels = values.shape
        self.I, self.J = layout.size
        # half precision sums over the heads in fp32
        self.sum_dtype = values.dtype if values.dtype in (torch.float32, torch.float64) else torch.float32
        top, left, height, width = layout.window
        self.whole = (height, width) == (self.Y, self.X)
        self.seen = values if self.whole else values[:, top : top + height, left : left + width].contiguous()
        self.seen = self.seen.flatten(1, 2)
        self.num_keys = height * width if layout.content_heads and not linear else 0
        self.head_dim = query.shape[-1] // max(1, len(layout.content_heads))
        self.scale = max(1, self.head_dim) ** -0.5
        kind = "cpu" if values.device.type == "cpu" else "cuda"
        per_row = self.J * max(1, self.num_keys)
        queries = VALUE_NUMBERS[kind] // self.channels
        self.chunk_rows = min(self.I, max(1, min(MAP_NUMBERS[kind] // per_row, queries // self.J)))
        images = min(MAP_NUMBERS[kind] // (per_row * self.I), queries // (self.J * self.I))
        self.chunk_images = max(1, min(self.batch, images)) if self.chunk_rows == self.I else 1
        is_short = self.num_keys <= MERGE_KEYS * self.channels
        self.merges = self.whole and self.chunk_rows == self.I and is_short and not linear
        self.positional_of = -1
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

    def part(self, at: int) -> slice:
        """Channels of the queries and keys of the content head `at`."""
        return slice(at * self.head_dim, (at + 1) * self.head_dim)

    def content_map(self, at: int, i0: int, i1: int, b: int, e: int) -> Tensor:
        """softmax(Q Kᵀ / √D) of a chunk, (n, r·J, keys)."""
        shape = (e - b, (i1 - i0) * self.J, self.num_keys)
        logits, attention = self.buffer("logits", *shape), self.buffer("attention", *shape)
        q, k = self.query[b:e, i0 * self.J : i1 * self.J, self.part(at)], self.key[b:e, :, self.part(at)]
        torch.baddbmm(logits, q, k.transpose(1, 2), beta=0, alpha=self.scale, out=logits)
        return torch.softmax(logits, -1, out=attention)

    def is_merged(self, head: int) -> bool:
        """Whether `head`'s three maps are mixed: on short maps that is cheaper than a product for each."""
        return self.merges and head in self.layout.content_heads

    def positional(self, head: int) -> Tensor:
        """shift · S + R ⊗ K of a merged head, (N, keys): the same for all images, made once a head."""
        out = self.buffer("positional", self.I * self.J, self.num_keys)
        if self.positional_of == head:
            return out
        self.positional_of = head
        grid, (_, gaussian) = out.view(self.I, self.J, self.Y, self.X), self.head_maps(head)
        if gaussian is None:
            grid.zero_()
        else:
            torch.mul(self.rows[gaussian][:, None, :, None], self.columns[gaussian][:, None], out=grid)
        if self.shift is not None and (at := self.layout.taps_of(head)):
            taps = tuple(t.to(out.device) for t in at)
            grid[taps] += self.shift[head].to(out.dtype)
        return out

    def mixed(self, head: int, attention: Tensor) -> Tensor:
        """All three maps of a merged head, its content `attention` given: (n, N, keys)."""
        gate = self.content[self.layout.content_heads.index(head)].to(attention.dtype)
        return torch.addcmul(self.positional(head), attention, gate, out=self.buffer("mixed", *attention.shape))

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
            None if content is None or self.linear else self.content_map(content, i0, i1, b, e),
            None if gaussian is None or self.is_merged(head) else self.by_rows(gaussian, i0, i1, b, e),
        )

    def gather(
        self, head: int, i0: int, i1: int, b: int, e: int, maps: tuple[Tensor | None, Tensor | None], out: Tensor
    ) -> None:
        """What `head` gathers for a chunk, into `out` (n, r, J, C)."""
        content, gaussian = self.head_maps(head)
        attention, by_rows = maps
        n, r = e - b, i1 - i0
        if attention is not None and self.is_merged(head):
            torch.bmm(self.mixed(head, attention), self.seen[b:e], out=out.view(n, r * self.J, self.channels))
            return
        if content is not None:
            if attention is None:  # linear: `key` holds the head's summaries of the values
                factors = (
                    self.query[b:e, i0 * self.J : i1 * self.J, self.part(content)],
                    self.key[b:e, self.part(content)],
                )
            else:
                factors = attention, self.seen[b:e]
            torch.bmm(*factors, out=out.view(n, r * self.J, self.channels))
            out.mul_(self.content[content])
        if by_rows is not None:
            product = out.view(n * r, self.J, self.channels)
            factor = self.columns[gaussian].expand(n * r, self.J, self.X)
            by_rows = by_rows.view(n * r, self.X, self.channels)
            if content is None:
                torch.bmm(factor, by_rows, out=product)
            else:
                product.baddbmm_(factor, by_rows)
        if content is None and gaussian is None:
            out.zero_()
        if self.shift is not None and (views := self.layout.shift_views(head, i0, i1)):
            hit = out[:, views[0][0], views[0][1]]
            hit.addcmul_(self.values[b:e, views[1][0], views[1][1]], self.shift[head])
