"""A table as cells of text, which the page's templates print, and how it is cited: Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recast.lab.report.formats import NBSP

NOTE = "In brackets: 95 % intervals over the images, of differences paired; where they were measured."
"""Below a table that is cited."""


@dataclass(frozen=True)
class Bar:
    """A difference of accuracies in points, from the middle of a track."""

    better: str
    value: float
    low: float
    high: float
    """The 95 % interval of the paired difference where there is one, otherwise ± one standard error around 0."""
    paired: bool


@dataclass(frozen=True)
class Cell:
    """What stands in one place of a table."""

    text: str
    small: tuple[str, ...] = ()
    """Below it in smaller letters: an interval, or what else there is to say."""
    title: str = ""
    """Shown on hover."""
    kind: str = ""
    """"text" is aligned at the left; an arm has its mark in a head; by-ARM is coloured by the arm that does better."""
    code: bool = False
    link: str = ""
    span: int = 1
    """Columns that it takes."""
    bar: Bar | None = None
    strength: int = 0
    """0..100: how strongly a cell of a heat map is coloured."""

    @property
    def cited(self) -> str:
        """In one line."""
        return f"{self.text} [{self.small[0]}]" if self.small else self.text


@dataclass(frozen=True)
class Group:
    """Rows under a title of their own; "" where there is none."""

    title: str
    rows: list[list[Cell]]


@dataclass(frozen=True)
class PageTable:
    label: str
    """What it is, for readers who do not see it."""
    heads: list[Cell]
    """Breaks of their lines are \\n."""
    groups: list[Group]
    foot: Sequence[Cell] = ()
    kind: str = ""
    scale: float = 0.0
    """Percent of a bar's track that a point takes."""


def cited(tables: Sequence[PageTable]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of tables with the same columns, as text; a group's title is a row of one cell."""
    heads = ["", *(cell.text.replace("\n", " ") for cell in tables[0].heads[1:])]
    rows = []
    for group in (group for table in tables for group in table.groups):
        rows.append([group.title])
        rows += [[cell.cited for cell in row] for row in group.rows]
    return heads, rows


def markdown(tables: Sequence[PageTable]) -> str:
    heads, rows = cited(tables)
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    lines += [row if len(row) > 1 else [f"**{row[0]}**", *[""] * (len(heads) - 1)] for row in rows]
    texts = [" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines]
    return "\n".join(f"| {text} |" for text in texts).replace(NBSP, " ")


def latex(tables: Sequence[PageTable]) -> str:
    """A tabular that needs no package."""
    heads, rows = cited(tables)
    lines = [[cell.translate(SYMBOLS) for cell in row] for row in (heads, *rows)]
    title = rf"\multicolumn{{{len(heads)}}}{{l}}{{\textbf{{%s}}}}"
    head, *body = [(" & ".join(line) if len(line) > 1 else title % line[0]) + r" \\" for line in lines]
    opening = rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}"
    return "\n".join([opening, r"\hline", head, r"\hline", *body, r"\hline", r"\end{tabular}"])


SYMBOLS = str.maketrans(
    {"\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}", "$": r"\$"}
    | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "−": r"$-$", "–": "--", NBSP: "~"}
    | {"ε": r"$\varepsilon$", "π": r"$\pi$", "∞": r"$\infty$", "×": r"$\times$"}
)
