"""Gathers of the heads, a chunk at a time, and their product with W_out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

MAP_NUMBERS = 2**20
"""Numbers of a content map that are held at a time: 4 MiB, which should stay in the processor's cache."""
LONG, TILE = 1024, 512
"""Keys above which a map is long, and how many of a long map's are held at a time."""
LIMIT = 40.0
"""Logits whose exponentials, and what is made of them, fp32 holds: e^±40 is 4e-18 to 2e17."""
VALUE_NUMBERS = 2**20
"""Numbers of a head's gathers that are held at a time: enough queries for a fast product."""


class Chunk(NamedTuple):
    """n images and r query rows: all rows of some images, or some rows of one image."""

    images: slice
    rows: slice
    queries: slice
    """The same rows among the I·J queries."""
    n: int
    r: int


def goes_by_parts(values: Tensor, window: Sequence[int]) -> bool:
    """Return True if the softmax is split: exponentials tile by tile, then one division of the gathers."""
    in_full = values.dtype in (torch.float32, torch.float64)
    return values.device.type == "cpu" and in_full and window[2] * window[3] > LONG


class Operands(NamedTuple):
    """Tensors of a call, for h heads. All are of one dtype, but for the gates `shift` and `content`."""

    values: Tensor
    """(B, Y, X, C), contiguous."""
    query: Tensor
    """(B, N, H_c·D); for linear content softmax_D(Q)."""
    key: Tensor
    """(B, keys, H_c·D); for linear content softmax_tokens(K)ᵀ V, (B, H_c·D, C)."""
    rows: Tensor
    """(H_g, I, Y): the Gaussian's factor over the rows, times its gate."""
    columns: Tensor
    """(H_g, J, X): its factor over the columns."""
    shift: Tensor | None
    """(h,)"""
    content: Tensor
    """(H_c,)"""
    weight: Tensor
    """(h, O, C/g)"""


class Layout(NamedTuple):
    """Numbers of a call: which heads have which map, and where."""

    content_heads: Sequence[int]
    """Those of the h heads that have a content map."""
    gaussian_heads: Sequence[int]
    """Those that have a Gaussian."""
    spans: Sequence[int]
    """Where the heads' shifts are (`Stream.shift_views`); empty without."""
    stride: Sequence[int]
    window: Sequence[int]
    """First row, first column, rows and columns of the values that content sees."""
    groups: int
    linear: bool
    """Content is linear."""


class Stream:
    """The steps of a call that both passes share. Buffers hold one chunk."""

    def __init__(self, operands: Operands, layout: Layout) -> None:
        self.values, self.query, self.key, self.rows, self.columns, self.shift, self.content, weight = operands
        values, window = self.values, layout.window
        self.weight = weight.unflatten(1, (layout.groups, -1))
        self.content_heads, self.gaussian_heads = list(layout.content_heads), list(layout.gaussian_heads)
        self.spans, self.stride, self.window, self.linear = layout.spans, layout.stride, window, layout.linear
        self.batch, self.Y, self.X, self.channels = values.shape
        self.I, self.J = self.rows.shape[1], self.columns.shape[1]
        # half precision sums over the heads in fp32
        self.sum_dtype = torch.promote_types(values.dtype, torch.float32)
        top, left, height, width = window
        self.visible = values[:, top : top + height, left : left + width].contiguous().flatten(1, 2)
        self.num_keys = height * width if self.content_heads and not self.linear else 0
        self.head_dim = self.query.shape[-1] // max(1, len(self.content_heads))
        self.scale = max(1, self.head_dim) ** -0.5
        self.by_parts = self.num_keys > 0 and goes_by_parts(values, window)
        self.tile = TILE if self.by_parts else max(1, self.num_keys)
        shape = (len(self.content_heads), self.head_dim)
        keys = () if self.linear else self.key.unflatten(2, shape).permute(2, 0, 3, 1).split(self.tile, -1)
        self.keys = [part.contiguous() for part in keys]
        """By tile, (H_c, B, D, keys): a head's lie together, as its products want them."""
        per_row, queries = self.J * self.tile, VALUE_NUMBERS // self.channels
        self.chunk_rows = min(self.I, max(1, min(MAP_NUMBERS // per_row, queries // self.J)))
        images = min(MAP_NUMBERS // (per_row * self.I), queries // (self.J * self.I))
        self.chunk_images = max(1, min(self.batch, images)) if self.chunk_rows == self.I else 1
        self.buffers: dict[str, Tensor] = {}

    @cached_property
    def is_small(self) -> bool:
        """True if |q| |k| / √D, which no logit exceeds, is so small that no maximum need be subtracted."""
        tokens = (t.unflatten(-1, (-1, self.head_dim)) for t in (self.query, self.key))
        query, key = (torch.linalg.vector_norm(t, dim=-1).amax() for t in tokens)
        return bool(query * key * self.scale < LIMIT)

    def chunks(self) -> Iterator[Chunk]:
        """Yield every query of every image once."""
        for i0 in range(0, self.I, self.chunk_rows):
            i1 = min(self.I, i0 + self.chunk_rows)
            for b in range(0, self.batch, self.chunk_images):
                e = min(self.batch, b + self.chunk_images)
                yield Chunk(slice(b, e), slice(i0, i1), slice(i0 * self.J, i1 * self.J), e - b, i1 - i0)

    def buffer(self, name: str, *shape: int) -> Tensor:
        """Return memory that every chunk reuses: touched pages are fast."""
        size = math.prod(shape)
        buffer = self.buffers.get(name)
        if buffer is None or buffer.numel() < size:
            self.buffers[name] = buffer = self.values.new_empty(size)
        return buffer[:size].view(shape)

    # --- where the heads' maps are ------------------------------------------------------------------------------------

    def head_maps(self, head: int) -> tuple[int | None, int | None]:
        """Return the index of `head` among the content heads and among the Gaussian ones."""
        c, g = self.content_heads, self.gaussian_heads
        return c.index(head) if head in c else None, g.index(head) if head in g else None

    def channels_of(self, at: int) -> slice:
        """Return the channels of the queries and keys of the content head `at`."""
        return slice(at * self.head_dim, (at + 1) * self.head_dim)

    def shift_views(self, head: int, rows: slice) -> tuple[tuple[slice, slice], tuple[slice, slice]] | None:
        """Return the slices of the queries in `rows` that are shifted to a pixel, and those of the pixels.

        `spans` holds (i₀, i₁, y₀, j₀, j₁, x₀) per head: queries i₀ ≤ i < i₁ look at row y₀ + (i − i₀)·stride.
        """
        a, b, y0, c, d, x0 = self.spans[6 * head : 6 * head + 6]
        first, last = max(a, rows.start), min(b, rows.stop)
        if first >= last or c >= d:
            return None
        y, (s, t) = y0 + (first - a) * self.stride[0], self.stride
        at = (slice(first - rows.start, last - rows.start), slice(c, d))
        return at, (slice(y, y + (last - first - 1) * s + 1, s), slice(x0, x0 + (d - c - 1) * t + 1, t))

    # --- the content maps ---------------------------------------------------------------------------------------------

    def tiles(self, at: int, images: slice) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield keys (n, D, tile) of the content head `at` and values (n, tile, C), tile by tile."""
        return (
            (keys[at, images], v[images]) for keys, v in zip(self.keys, self.visible.split(self.tile, 1), strict=True)
        )

    def scaled_query(self, at: int, chunk: Chunk) -> Tensor:
        """Return Q / √D of the content head `at`, (n, r·J, D)."""
        return self.query[chunk.images, chunk.queries, self.channels_of(at)] * self.scale

    def _logits(self, query: Tensor, keys: Tensor) -> Tensor:
        logits = torch.bmm(query, keys, out=self.buffer("logits", *query.shape[:2], keys.shape[2]))
        return logits.nan_to_num_() if logits.dtype == torch.float16 else logits  # as `finite_half`, in place

    def top(self, at: int, images: slice, query: Tensor) -> Tensor | None:
        """Return the largest logit of every query, (n, r·J, 1); None where it need not be subtracted."""
        if not self.by_parts or self.is_small:
            return None
        tops = [self._logits(query, keys).amax(-1, keepdim=True) for keys, _ in self.tiles(at, images)]
        return torch.stack(tops).amax(0)

    def weights(self, query: Tensor, keys: Tensor, top: Tensor | None) -> Tensor:
        """Return softmax(Q Kᵀ / √D) over all keys or, `by_parts`, exp(Q Kᵀ / √D − top) of a tile."""
        logits = self._logits(query, keys)
        if not self.by_parts:
            return torch.softmax(logits, -1, out=self.buffer("weights", *logits.shape))
        return (logits if top is None else logits.sub_(top)).exp_()

    def attend(self, at: int, chunk: Chunk, norm: Tensor, out: Tensor) -> None:
        """Write the gathers of the content head `at`, softmax(Q Kᵀ / √D) V, into `out` (n, r·J, C).

        `norm` (n, r·J, 1) becomes the factor that normalises its `weights`.
        """
        query, totals = self.scaled_query(at, chunk), list[Tensor]()
        top = self.top(at, chunk.images, query)
        for keys, values in self.tiles(at, chunk.images):
            weights = self.weights(query, keys, top)
            if totals:
                add_product(out, weights, values)
            else:
                torch.bmm(weights, values, out=out)
            if self.by_parts:
                totals.append(weights.sum(-1, keepdim=True))
        if self.by_parts:
            torch.reciprocal(sum(totals[1:], totals[0]), out=norm)
            out.mul_(norm)

    # --- gathers ------------------------------------------------------------------------------------------------------

    def by_rows(self, head: int, chunk: Chunk) -> Tensor | None:
        """Return R V of a chunk, (n, r, X·C); None if `head` has no Gaussian."""
        if (gaussian := self.head_maps(head)[1]) is None:
            return None
        values = self.values[chunk.images].view(chunk.n, self.Y, self.X * self.channels)
        weights = self.rows[gaussian, chunk.rows].expand(chunk.n, chunk.r, self.Y)
        return torch.bmm(weights, values, out=self.buffer("by_rows", chunk.n, chunk.r, values.shape[2]))

    def gather_by_content(self, head: int, chunk: Chunk, norm: Tensor, out: Tensor) -> None:
        """Write the gathers of the content map of `head`, if it has one, into `out` (n, r, J, C)."""
        if (content := self.head_maps(head)[0]) is None:
            return
        flat = out.view(chunk.n, chunk.r * self.J, self.channels)
        if self.linear:  # `key` holds the head's summaries of the values
            q = self.query[chunk.images, chunk.queries, self.channels_of(content)]
            torch.bmm(q, self.key[chunk.images, self.channels_of(content)], out=flat)
        else:
            self.attend(content, chunk, norm[content, chunk.images, chunk.queries], flat)

    def gather(self, head: int, chunk: Chunk, by_content: Tensor, by_rows: Tensor | None, out: Tensor) -> None:
        """Write the gathers of `head` into `out` (n, r, J, C), from those of its content map, which may be `out`."""
        content, gaussian = self.head_maps(head)
        if content is not None:
            torch.mul(by_content, self.content[content], out=out)
        if by_rows is not None:
            rows = chunk.n * chunk.r
            by_columns = out.view(rows, self.J, self.channels)
            factor = self.columns[gaussian].expand(rows, self.J, self.X)
            by_columns.baddbmm_(factor, by_rows.view(rows, self.X, self.channels), beta=0 if content is None else 1)
        if content is None and gaussian is None:
            out.zero_()
        if self.shift is not None and (views := self.shift_views(head, chunk.rows)):
            queries, pixels = views
            out[:, *queries].addcmul_(self.values[chunk.images, *pixels], self.shift[head])


def project(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Add x (T, g·a) times the g blocks of `weight` (g, a, b) to out (T, g·b)."""
    groups, a, b = weight.shape
    if groups == 1:
        add_product(out, x, weight[0])
    elif a == b == 1:
        out.addcmul_(x, weight[:, 0, 0])
    else:
        product = torch.bmm(x.unflatten(1, (groups, -1)).transpose(0, 1), weight)
        out.unflatten(1, (groups, -1)).add_(product.transpose(0, 1))


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b, matrices or batches of them, to `out`; half precision is summed in the dtype of `out`."""
    if out.dtype != a.dtype:
        out.add_(a @ b)
    elif out.dim() == 2:
        out.addmm_(a, b)
    else:
        out.baddbmm_(a, b)
