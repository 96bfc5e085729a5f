"""What is left out of maps that are too large for a page: queries between others, and pixels put together."""

from __future__ import annotations

from torch import Tensor, nn

MAX_QUERIES, MAX_KEYS = 400, 1024
"""Queries and blocks of keys of a layer whose maps are stored: early layers have thousands of each."""


def step_of(rows: int, columns: int, most: int) -> int:
    """The smallest power of two that leaves at most `most` of rows × columns."""
    step = 1
    while -(-rows // step) * -(-columns // step) > most:
        step *= 2
    return step


def spread(count: int, step: int) -> tuple[int, ...]:
    """Every `step`-th of `count`, from the middle of the first group on."""
    return tuple(range(min(step // 2, count - 1), count, step))


def pooled(maps: Tensor, pool: int) -> Tensor:
    """Sums over blocks of keys: (…, Y, X) → (…, ⌈Y/pool⌉, ⌈X/pool⌉)."""
    if pool == 1:
        return maps
    down, right = (-size % pool for size in maps.shape[-2:])
    padded = nn.functional.pad(maps, (0, right, 0, down))
    return padded.unflatten(-1, (-1, pool)).unflatten(-3, (-1, pool)).sum((-3, -1))
