"""What of a call of the streaming operator is no tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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

    def taps_of(self, head: int) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Rows and columns of the queries whose tap is a pixel, and of these pixels: an index of (I, J, Y, X) maps."""
        if (views := self.shift_views(head, 0, self.size[0])) is None:
            return None
        ends = (self.size[0], self.size[1], 2**31, 2**31)
        i, j, y, x = (torch.arange(*v.indices(n)) for v, n in zip((*views[0], *views[1]), ends, strict=True))
        return i[:, None], j, y[:, None], x

    @classmethod
    def of(
        cls,
        size: Sequence[int],
        content_heads: Sequence[int],
        gaussian_heads: Sequence[int],
        taps: Sequence[int],
        stride: Sequence[int],
        window: Sequence[int],
    ) -> Layout:
        """From the lists of numbers that an operator takes."""
        (rows, columns), (s, t), (top, left, height, width) = size, stride, window
        return cls(
            (rows, columns),
            tuple(content_heads),
            tuple(gaussian_heads),
            tuple(taps),
            (s, t),
            (top, left, height, width),
        )
