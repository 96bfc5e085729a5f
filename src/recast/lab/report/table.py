"""Tables as cells of text, printed by the templates of the page, or as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recast.lab.report.formats import NBSP

NOTE = "Brackets: 95 % confidence intervals over the images (paired for differences), where measured."


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
    strength: int = 0  # 0..100, saturation of a cell of a heat map

    @property
    def cited(self) -> str:
        """The cell in one line."""
        return f"{self.text} [{self.small[0]}]" if self.small else self.text


@dataclass(frozen=True)
class PageTable:
    """A table of the page."""

    label: str  # for screen readers
    heads: list[Cell]  # with \n between lines
    groups: dict[str, list[list[Cell]]]  # title above the rows, "" for none → rows
    foot: Sequence[Cell] = ()
    kind: str = ""
    scale: float = 0.0  # percent of a bar's track per point


def texts(tables: Sequence[PageTable]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of tables with the same columns as text; the first column is the title of the group."""
    heads = ["Suite", *(cell.text.replace("\n", " ") for cell in tables[0].heads)]
    groups = [group for table in tables for group in table.groups.items()]
    return heads, [[title, *(cell.cited for cell in row)] for title, rows in groups for row in rows]


def markdown(tables: Sequence[PageTable]) -> str:
    """Return tables with the same columns as one Markdown table."""
    heads, rows = texts(tables)
    lines = [" | ".join(cell.replace("|", "\\|") for cell in line) for line in (heads, ["---"] * len(heads), *rows)]
    return "\n".join(f"| {line} |" for line in lines).replace(NBSP, " ")
