"""Layer by layer what the heads do: distance, non-locality, entropy, and which stayed convolutional."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from recast.report.figures.distance import last_heads
from recast.report.read.analysis import Head
from recast.report.read.run import Run
from recast.report.text import formats


@dataclass(frozen=True)
class LayerLine:
    layer: str
    heads: str
    stayed: str
    """How many heads are still their convolution, and which."""
    distance: str
    nonlocality: str
    entropy: str
    span: str
    n: str


def head_lines(run: Run) -> list[LayerLine]:
    """Mean and range over the heads of each layer, as they are at the end; empty where nothing was measured."""
    return [_line(layer, heads) for layer, heads in last_heads(run).items()]


def _line(layer: str, heads: Sequence[Head]) -> LayerLine:
    stayed = [head for head in heads if head.is_convolution]
    names = ", ".join(f"{head.tap[0]},{head.tap[1]}" if head.tap else str(head.head) for head in stayed)
    which = f" ({names})" if 0 < len(stayed) < len(heads) and len(stayed) <= 9 else ""
    return LayerLine(
        layer,
        str(len(heads)),
        f"{len(stayed)} of {len(heads)}{which}",
        _range([head.distance for head in heads]),
        _range([head.nonlocality for head in heads]),
        _range([head.entropy for head in heads]),
        _range([head.span for head in heads]),
        f"{max(head.n for head in heads):,}",
    )


def _range(values: Sequence[float]) -> str:
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return formats.MISSING
    mean = formats.decimal(sum(known) / len(known), 2)
    return f"{mean} ({formats.interval(min(known), max(known), 2)})" if min(known) < max(known) else mean
