"""Tables as cells of text, printed by the templates of the page, or as Markdown and LaTeX."""

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
    low: float  # 95 % interval of the paired difference, else ± one standard error around 0
    high: float
    paired: bool


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
class Group:
    """Rows below a title; "" for none."""

    title: str
    rows: list[list[Cell]]


@dataclass(frozen=True)
class PageTable:
    """A table of the page."""

    label: str  # for screen readers
    heads: list[Cell]  # with \n between lines
    groups: list[Group]
    foot: Sequence[Cell] = ()
    kind: str = ""
    scale: float = 0.0  # percent of a bar's track per point


def cited(tables: Sequence[PageTable]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of tables with the same columns as text; the title of a group is a row of one cell."""
    heads = ["", *(cell.text.replace("\n", " ") for cell in tables[0].heads[1:])]
    rows = []
    for group in (group for table in tables for group in table.groups):
        rows += [[group.title], *([cell.cited for cell in row] for row in group.rows)]
    return heads, rows


def markdown(tables: Sequence[PageTable]) -> str:
    """Return tables with the same columns as one Markdown table."""
    heads, rows = cited(tables)
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    lines += [row if len(row) > 1 else [f"**{row[0]}**", *[""] * (len(heads) - 1)] for row in rows]
    texts = [" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines]
    return "\n".join(f"| {text} |" for text in texts).replace(NBSP, " ")


def latex(tables: Sequence[PageTable]) -> str:
    """Return tables with the same columns as one LaTeX tabular, which needs no package."""
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
