"""The folder of figures: every chart as SVG and PNG for paper, the numbers behind it as CSV, and tables to cite.

DIR/index.csv                     file, run, title and description of every figure; it marks the folder as ours
DIR/NAME.svg .png .csv            figures of all runs together, and of a single run
DIR/RUN/NAME.svg .png .csv        figures of one of several runs
DIR/tables.csv tables.md tables.tex    every number of the arms, with intervals
"""

from __future__ import annotations

import csv
import math
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox

from recast.errors import RecastError
from recast.report.figures.chart import Chart, Drawing
from recast.report.figures.lines import ARM_MARKERS
from recast.report.figures.style import PAPER, styled
from recast.report.group import Group
from recast.report.section import Section
from recast.report.tables import cited

INDEX = "index.csv"
HEADER = ("file", "run", "title", "description")
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
    if any(folder.iterdir()) and not _is_ours(folder):
        raise RecastError(f"{folder} holds other files than figures of recast report: choose a new or an empty folder")


def write_figures(folder: Path, sections: Sequence[Section], groups: Sequence[Group]) -> int:
    """Write every figure and table; returns how many figures.

    All is written beside the folder first, then takes its name: a failure leaves older figures alone.
    """
    check_folder(folder)
    target = folder.resolve()
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        partial.mkdir()
        figures = list(_placed(sections, groups))
        index = []
        for run, place, chart in figures:
            stem = f"{place}{_stem(chart.name)}"
            write_chart(partial / stem, chart)
            index.append((f"{stem}.svg", run, chart.title, chart.story))
        runs = [section.run for section in sections]
        _write_csv(partial / INDEX, HEADER, index)
        _write_csv(partial / "tables.csv", cited.COLUMNS, cited.tidy(runs))
        for name, text in (("tables.md", cited.markdown(runs)), ("tables.tex", cited.latex(runs))):
            (partial / name).write_text(text, encoding="utf-8", newline="\n")
        _swap(partial, target)
    except OSError as error:
        raise RecastError(f"cannot write the figures to {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return len(figures)


def _placed(sections: Sequence[Section], groups: Sequence[Group]) -> Iterable[tuple[str, str, Chart]]:
    """(run, folder, chart): names are unique within a folder."""
    several = len(sections) > 1
    for group in groups:
        own = f"{_stem(group.data)}/" if len(groups) > 1 else ""
        for chart in group.figures():
            yield "", own, chart
    names = [_stem(section.run.name) for section in sections]
    for place, section in enumerate(sections):
        name = names[place] if names.count(names[place]) == 1 else f"{names[place]}-{place + 1}"
        for chart in section.figures():
            yield section.run.name, f"run-{name}/" if several else "", chart


def write_chart(path: Path, chart: Chart) -> None:
    """`path` with .svg, .png and .csv: dark ink on white, the title and the legend above."""
    path.parent.mkdir(exist_ok=True)
    with styled(PAPER):
        drawing = chart.draw(PAPER)
        across, up = _head(drawing, chart)
        # Given, not measured: to measure what a figure covers takes as long as to draw it.
        around = Bbox([[-0.06, -0.04], [across + 0.06, up + 0.06]])
        for suffix in (".svg", ".png"):
            drawing.figure.savefig(
                path.with_name(path.name + suffix),
                dpi=DPI,
                facecolor="white",
                bbox_inches=around,
                metadata={"Title": chart.title} | ({"Date": None} if suffix == ".svg" else {}),
            )
    _write_csv(path.with_name(path.name + ".csv"), chart.data.columns, chart.data.rows)


def _head(drawing: Drawing, chart: Chart) -> tuple[float, float]:
    """Legend and title above the figure; the inches across and up that all takes."""
    figure = drawing.figure
    width, height = figure.get_size_inches() * 72
    up = 1 + 6 / height
    columns_wide = 0
    if chart.keys:
        handles = [
            Line2D(
                [], [], color=PAPER.arms[key.arm] if key.arm else PAPER.depth(key.depth), linewidth=1.8,
                marker=ARM_MARKERS.get(key.arm, "o"), markersize=4.5, label=key.label,
            )
            for key in chart.keys
        ]  # fmt: skip
        columns = 3 if max(len(key.label) for key in chart.keys) < 20 else 1
        columns_wide = columns * (max(len(key.label) for key in chart.keys) + 6)
        figure.legend(
            handles=handles, loc="lower left", bbox_to_anchor=(0, up), ncols=columns, frameon=False, fontsize=8,
            borderaxespad=0, handlelength=1.6, columnspacing=1.4,
        )  # fmt: skip
        up += (13 * math.ceil(len(chart.keys) / columns) + 4) / height
    figure.text(0, up, chart.title, fontsize=9, fontweight="bold", color=PAPER.ink, va="bottom")
    across = max(width, LETTER * len(chart.title), LETTER * columns_wide)
    return across / 72, (up * height + 14) / 72


def _stem(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("._") or "figure"


def _write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_plain(value) for value in row] for row in rows)


def _plain(value: object) -> object:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value


def _is_ours(folder: Path) -> bool:
    index = folder / INDEX
    return index.is_file() and index.read_bytes().startswith(",".join(HEADER).encode())


def _swap(partial: Path, target: Path) -> None:
    if not target.exists():
        partial.rename(target)
        return
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    target.rename(old)
    try:
        partial.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
