"""The folder of figures: every chart as SVG and PNG for paper, the numbers behind it as CSV, and tables to cite.

DIR/index.csv                     file, run, title and description of every figure; it marks the folder as ours
DIR/NAME.svg .png .csv            figures of all runs together, and of a single run
DIR/RUN/NAME.svg .png .csv        figures of one of several runs
DIR/tables.csv tables.md tables.tex    every number of the arms, with intervals
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox

from recast.errors import RecastError
from recast.files import write_text
from recast.lab.report.arms_table import LABELS, arms_table
from recast.lab.report.charts import PAPER, Cells, Chart, styled
from recast.lab.report.draw import MARKERS
from recast.lab.report.labels import words
from recast.lab.report.load import Run
from recast.lab.report.page import Part
from recast.lab.report.table import NOTE, latex, markdown
from recast.tables import write_csv

INDEX = "index.csv"
HEADER = ("file", "run", "title", "description")
COLUMNS = ("run", "suite", "dataset", "metric", "quantity", "value", "low", "high", "n")
"""quantity: an arm, or a difference such as recast-finetuned."""
DPI = 200
LETTER = 5.6
"""Points that a letter of a title takes at most, on average."""


def check_folder(folder: Path) -> None:
    """Raise RecastError unless figures may be written to `folder`: it is new, empty, or holds figures of ours."""
    if not folder.exists():
        if not folder.resolve().parent.is_dir():
            raise RecastError(f"the folder for the figures' folder does not exist: {folder.resolve().parent}")
        return
    if not folder.is_dir():
        raise RecastError(f"figures need a folder, got the file {folder}: choose another name")
    index = folder / INDEX
    is_ours = index.is_file() and index.read_bytes().startswith(",".join(HEADER).encode())
    if any(folder.iterdir()) and not is_ours:
        raise RecastError(f"{folder} holds other files than figures of recast report: choose a new or an empty folder")


def write_figures(folder: Path, runs: Sequence[Part], groups: Sequence[Part]) -> None:
    """Write every figure and table.

    All is written beside the folder first, then takes its name: a failure leaves older figures alone.
    """
    target = folder.resolve()
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        partial.mkdir()
        index = []
        for place, part in _placed(runs, groups):
            for chart in part["figures"]():
                stem = f"{place}{_stem(chart.name)}"
                write_chart(partial / stem, chart)
                index.append((f"{stem}.svg", part["run"].name if "run" in part else "", chart.title, chart.story))
        write_csv(partial / INDEX, HEADER, index)
        _write_tables(partial, [part["run"] for part in runs])
        _swap(partial, target)
    except OSError as error:
        raise RecastError(f"cannot write the figures to {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _swap(partial: Path, target: Path) -> None:
    """`partial` takes the name of `target`; what stood there goes last, or comes back."""
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    if target.exists():
        target.rename(old)
    try:
        partial.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _placed(runs: Sequence[Part], groups: Sequence[Part]) -> Iterator[tuple[str, Part]]:
    """The groups and the runs with their folders."""
    for parts, names in (
        (groups, [_stem(group["data"]) for group in groups]),
        (runs, [f"run-{_stem(part['run'].name)}" for part in runs]),
    ):
        for name, part in zip(_apart(names), parts, strict=True):
            yield f"{name}/" if len(parts) > 1 else "", part


def _apart(names: Sequence[str]) -> list[str]:
    """The names, no two alike: where some are, with their places behind them."""
    placed = [f"{name}-{place}" for place, name in enumerate(names, start=1)]
    some = [name if names.count(name) == 1 else longer for name, longer in zip(names, placed, strict=True)]
    return some if len({*some}) == len(names) else placed


def write_chart(path: Path, chart: Chart) -> None:
    """`path` with .svg, .png and .csv: dark ink on white, the title and the legend above."""
    path.parent.mkdir(exist_ok=True)
    with styled(PAPER):
        figure, _ = chart.draw(PAPER)
        across, up = _head(figure, chart)
        # Given, not measured: to measure what a figure covers takes as long as to draw it.
        around = Bbox([[-0.06, -0.04], [across + 0.06, up + 0.06]])
        for suffix in (".svg", ".png"):
            metadata = {"Title": chart.title} | ({"Date": None} if suffix == ".svg" else {})
            name = path.with_name(path.name + suffix)
            figure.savefig(name, dpi=DPI, facecolor="white", bbox_inches=around, metadata=metadata)
    write_csv(path.with_name(path.name + ".csv"), chart.columns, _written(chart.rows))


def _head(figure: Figure, chart: Chart) -> tuple[float, float]:
    """Legend and title above the figure; the inches across and up that all takes."""
    width, height = figure.get_size_inches() * 72
    up, columns_wide = 1 + 6 / height, 0
    if chart.keys:
        handles = [
            Line2D([], [], color=PAPER.color(key.role), alpha=key.opacity, linewidth=1.8,
                   marker=MARKERS.get(str(key.role), "o"), markersize=4.5, label=key.label)
            for key in chart.keys
        ]  # fmt: skip
        longest = max(len(key.label) for key in chart.keys)
        columns = 3 if longest < 20 else 1
        columns_wide = columns * (longest + 6)
        figure.legend(
            handles=handles, loc="lower left", bbox_to_anchor=(0, up), ncols=columns, frameon=False, fontsize=8,
            borderaxespad=0, handlelength=1.6, columnspacing=1.4,
        )  # fmt: skip
        up += (13 * math.ceil(len(chart.keys) / columns) + 4) / height
    figure.text(0, up, chart.title, fontsize=9, fontweight="bold", color=PAPER["ink"], va="bottom")
    across = max(width, LETTER * len(chart.title), LETTER * columns_wide)
    return across / 72, (up * height + 14) / 72


def _write_tables(folder: Path, runs: Sequence[Run]) -> None:
    """Every row of rows.csv and differences.csv as tidy CSV, and the tables of the page as Markdown and LaTeX."""
    write_csv(folder / "tables.csv", COLUMNS, _written(tidy(runs)))
    found = []
    for run in runs:
        tables = [arms_table(run, which) for which in LABELS]
        heads = ["", *(cell.text.replace("\n", " ") for cell in tables[0].heads[1:])]
        groups = [group for table in tables for group in table.groups]
        found.append((f"{run.name}: {run.recipe.model.name} on {run.recipe.data.name}", groups, heads))
    texts = {
        "tables.md": [*(f"## {title}\n\n{markdown(groups, heads)}" for title, groups, heads in found), NOTE],
        "tables.tex": [*(f"% {title}\n{latex(groups, heads)}" for title, groups, heads in found), f"% {NOTE}"],
    }
    for name, parts in texts.items():
        write_text(folder / name, "\n\n".join(parts) + "\n")


def tidy(runs: Sequence[Run]) -> Cells:
    """Every row of rows.csv and differences.csv; a difference that was not measured as one has no interval."""
    rows = []
    for run in runs:
        for row in run.rows:
            key = (run.name, row.suite, row.dataset, row.metric)
            rows.append((*key, row.model, row.value, row.low, row.high, row.n))
            for other in words(run).others if row.model == "recast" else ():
                paired = run.difference(other, row.suite, row.metric)
                value = paired.value if paired else row.value - run.value(other, row.suite, row.metric)
                if math.isfinite(value):
                    ends = (paired.low, paired.high) if paired else (None, None)
                    rows.append((*key, f"recast-{other}", value, *ends, row.n))
    return rows


def _stem(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("._") or "figure"


def _written(rows: Cells) -> Iterator[list[object]]:
    """As in every CSV file of a run: "true" and "false"; nothing where there is no number."""
    for row in rows:
        yield [str(cell).lower() if isinstance(cell, bool) else "" if cell != cell else cell for cell in row]
