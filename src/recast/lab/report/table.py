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
class Table:
    label: str
    """What it is, for readers who do not see it."""
    heads: list[Cell]
    """Breaks of their lines are \\n."""
    groups: list[Group]
    foot: Sequence[Cell] = ()
    kind: str = ""
    scale: float = 0.0
    """Percent of a bar's track that a point takes."""


def markdown(groups: Sequence[Group], heads: Sequence[str]) -> str:
    lines = [_bar(heads), _bar(["---", *["---:"] * (len(heads) - 1)])]
    for group in groups:
        lines.append(_bar([f"**{group.title}**", *[""] * (len(heads) - 1)]))
        lines += [_bar([cell.cited for cell in row]) for row in group.rows]
    return "\n".join(lines)


def latex(groups: Sequence[Group], heads: Sequence[str]) -> str:
    """A tabular that needs no package."""
    lines = [rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}", r"\hline"]
    lines += [" & ".join(map(_tex, heads)) + r" \\", r"\hline"]
    for group in groups:
        lines.append(rf"\multicolumn{{{len(heads)}}}{{l}}{{\textbf{{{_tex(group.title)}}}}} \\")
        lines += [" & ".join(_tex(cell.cited) for cell in row) + r" \\" for row in group.rows]
    return "\n".join([*lines, r"\hline", r"\end{tabular}"])


def _bar(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace(NBSP, " ") for cell in cells) + " |"


SYMBOLS = {"\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}"}
SYMBOLS |= {"$": r"\$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "−": r"$-$", "–": "--"}
SYMBOLS |= {"ε": r"$\varepsilon$", "π": r"$\pi$", "∞": r"$\infty$", "×": r"$\times$", NBSP: "~"}


def _tex(text: str) -> str:
    return "".join(SYMBOLS.get(letter, letter) for letter in text)
