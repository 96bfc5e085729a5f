"""The three arms as tables to cite: tidy CSV, Markdown, LaTeX."""

from __future__ import annotations

import math
from collections.abc import Sequence

from recast.report.read.run import ARMS, Run
from recast.report.tables.arms import Gap, Line, swept, three_arms
from recast.report.text import formats
from recast.report.text.words import PARENT, words

COLUMNS = ("run", "suite", "dataset", "metric", "quantity", "value", "low", "high", "n")
"""quantity: an arm, or a difference such as recast-finetuned."""


def tidy(runs: Sequence[Run]) -> list[tuple[str | float | int | None, ...]]:
    """Every row of rows.csv and differences.csv; a difference that was not measured as one has no interval."""
    rows: list[tuple[str | float | int | None, ...]] = []
    for run in runs:
        for row in run.rows:
            rows.append((run.name, row.suite, row.dataset, row.metric, row.model, row.value, row.low, row.high, row.n))
            if row.model != "recast":
                continue
            for other in ("parent", "finetuned"):
                paired = run.difference("recast", other, row.suite, row.metric)
                value = paired.value if paired else row.value - run.value(other, row.suite, row.metric)
                if math.isfinite(value):
                    ends = (paired.low, paired.high) if paired else (None, None)
                    key = (run.name, row.suite, row.dataset, row.metric, f"recast-{other}")
                    rows.append((*key, value, *ends, row.n))
    return rows


def markdown(runs: Sequence[Run]) -> str:
    """A table per run."""
    parts = []
    for run in runs:
        head = ["", *_heads(run)]
        lines = [f"## {run.name}: {run.model} on {run.dataset}", "", _bar(head), _bar(["---", *["---:"] * 6])]
        for title, line in _lines(run):
            lines.append(_bar([f"**{title}**", *[""] * 6]) if line is None else _bar([line.label, *_cells(line)]))
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n\n" + NOTE + "\n"


NOTE = "In brackets: 95 % intervals over the images, of differences paired; where they were measured."


def latex(runs: Sequence[Run]) -> str:
    """A tabular per run that needs no package."""
    parts = []
    for run in runs:
        head = " & ".join(_tex(cell) for cell in ["", *_heads(run)])
        lines = [f"% {run.name}: {run.model} on {run.dataset}", r"\begin{tabular}{lrrrrrr}", r"\hline"]
        lines += [rf"{head} \\", r"\hline"]
        for title, line in _lines(run):
            if line is None:
                lines.append(rf"\multicolumn{{7}}{{l}}{{\textbf{{{_tex(title)}}}}} \\")
            else:
                lines.append(" & ".join(_tex(cell) for cell in [line.label, *_cells(line)]) + r" \\")
        parts.append("\n".join([*lines, r"\hline", r"\end{tabular}"]))
    return "\n\n".join(parts) + f"\n\n% {NOTE}\n"


def _heads(run: Run) -> list[str]:
    names = (PARENT if run.is_plain else words(run)).arms
    short = {arm: names[arm].rpartition(", ")[2].lower() for arm in ("parent", "finetuned")}
    return [*(names[arm] for arm in ARMS), *(f"Recast − {name}" for name in short.values()), "Images"]


def _lines(run: Run) -> list[tuple[str, Line | None]]:
    found: list[tuple[str, Line | None]] = []
    for group in [*three_arms(run), *swept(run)]:
        found.append((group.title, None))
        found += [("", line) for line in group.lines]
    return found


def _cells(line: Line) -> list[str]:
    values = [_with(line.values[arm], line.intervals[arm]) for arm in ARMS]
    return [*values, _gap(line.to_parent), _gap(line.to_finetuned), line.n]


def _gap(gap: Gap) -> str:
    return _with(gap.text, gap.interval)


def _with(value: str, interval: str) -> str:
    return f"{value} [{interval}]" if interval else value


def _bar(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace(formats.NBSP, " ") for cell in cells) + " |"


SYMBOLS = {"\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}"}
SYMBOLS |= {"$": r"\$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "−": r"$-$", "–": "--"}
SYMBOLS |= {"ε": r"$\varepsilon$", "π": r"$\pi$", "∞": r"$\infty$", "×": r"$\times$", formats.NBSP: "~"}


def _tex(text: str) -> str:
    return "".join(SYMBOLS.get(letter, letter) for letter in text)
