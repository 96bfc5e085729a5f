"""Tables as cells of text, printed by the templates of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    """A difference of accuracies in points, drawn from the middle of a track."""

    better: str
    value: float
    low: float  # 95 % interval of the paired difference
    high: float


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str
    small: tuple[str, ...] = ()  # lines below it in smaller letters, such as an interval
    title: str = ""  # shown on hover
    kind: str = ""  # "text": left-aligned; an arm: its mark, in a head; by-ARM: colored by the better arm
    code: bool = False
    link: str = ""
    span: int = 1  # columns
    bar: Bar | None = None


@dataclass(frozen=True)
class PageTable:
    """A table of the page."""

    label: str  # for screen readers
    heads: list[Cell]  # with \n between lines
    groups: dict[str, list[list[Cell]]]  # title above the rows, "" for none → rows
    foot: Sequence[Cell] = ()
    kind: str = ""
    scale: float = 0.0  # percent of a bar's track per point
