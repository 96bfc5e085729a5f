"""Write a folder of figures: every chart as SVG and PNG for paper, its numbers as CSV, and tables.

DIR/index.csv                     file, run and title of every figure; identifies the folder
DIR/NAME.svg .png .csv            figures of all runs together, or of a single run
DIR/runN-RUN/NAME.svg .png .csv   figures of one of several runs
DIR/tables.md tables.tex          every number of the arms, with intervals (LaTeX: needs booktabs)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.lines import Line2D

from recast.errors import RecastError
from recast.files import write_text
from recast.lab.report.arms_table import LABELS, arms_table
from recast.lab.report.charts import PAPER, Chart, styled
from recast.lab.report.draw import MARKERS
from recast.lab.report.formats import NBSP
from recast.lab.report.load import Run
from recast.lab.report.page import Part
from recast.lab.report.table import NOTE, markdown, texts

INDEX, HEADER = "index.csv", ["file", "run", "title"]
DPI = 200
SYMBOLS = str.maketrans(
    {"−": "$-$", "–": "--", NBSP: "~", "ε": r"$\varepsilon$", "π": r"$\pi$", "∞": r"$\infty$", "×": r"$\times$"}
)


def check_folder(folder: Path) -> None:
    """Raise RecastError unless `folder` is new, empty, or holds figures of an earlier report."""
    if not folder.exists():
        if not folder.resolve().parent.is_dir():
            raise RecastError(f"cannot create {folder}: {folder.resolve().parent} does not exist")
        return
    if not folder.is_dir():
        raise RecastError(f"--figures must be a folder, got the file {folder}")
    index = folder / INDEX
    is_ours = index.is_file() and index.read_bytes().startswith(",".join(HEADER).encode())
    if any(folder.iterdir()) and not is_ours:
        raise RecastError(f"{folder} holds files that recast report did not write: choose a new or empty folder")


def write_figures(folder: Path, runs: Sequence[Part], joint: Part | None) -> None:
    """Write every figure and table; the index is first, so that a folder that is not complete is ours too."""
    figures = [(_stem(chart.name), "", chart) for chart in joint["figures"]] if joint else []
    for part in runs:
        place, name = "", part["run"].name
        if joint:
            place = f"{part['anchor']}-{_stem(name)}/"
        figures += [(place + _stem(chart.name), name, chart) for chart in part["figures"]]
    try:
        folder.mkdir(exist_ok=True)
        _write_csv(folder / INDEX, HEADER, [(f"{stem}.svg", name, chart.title) for stem, name, chart in figures])
        for stem, _, chart in figures:
            write_chart(folder / stem, chart)
        _write_tables(folder, [part["run"] for part in runs])
    except OSError as error:
        raise RecastError(f"cannot write the figures to {folder}: {error.strerror or error}") from error


def write_chart(path: Path, chart: Chart) -> None:
    """Write a chart as .svg, .png and .csv: dark ink on white, title and legend on top."""
    path.parent.mkdir(exist_ok=True)
    with styled(PAPER):
        figure = chart.draw(PAPER)
        handles = [
            Line2D([], [], color=PAPER.color(key.role), alpha=key.opacity, linewidth=1.8,
                   marker=MARKERS.get(str(key.role), "o"), markersize=4.5, label=key.label)
            for key in chart.keys
        ]  # fmt: skip
        longest = max((len(key.label) for key in chart.keys), default=0)
        figure.legend(
            handles=handles, ncols=3 if longest < 20 else 1, fontsize=8, frameon=False, handlelength=1.6,
            title=chart.title, title_fontproperties={"size": 9, "weight": "bold"}, alignment="left",
            loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0, columnspacing=1.4,
        )  # fmt: skip
        around = figure.get_tightbbox().padded(0.08)
        for suffix in (".svg", ".png"):
            name = path.with_name(path.name + suffix)
            metadata = {"Date": None} if suffix == ".svg" else {}
            figure.savefig(name, dpi=DPI, facecolor="white", bbox_inches=around, metadata=metadata)
    _write_csv(path.with_name(path.name + ".csv"), chart.columns, chart.rows)


def _write_csv(path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    pd.DataFrame(rows, columns=list(columns)).to_csv(path, index=False, errors="backslashreplace")


def _write_tables(folder: Path, runs: Sequence[Run]) -> None:
    """Write the tables of the page as Markdown and LaTeX."""
    pages, papers = [], []
    for run in runs:
        title = f"{run.name}: {run.recipe.model.name} on {run.data}"
        tables = [arms_table(run, name) for name in LABELS]
        heads, rows = texts(tables)
        pages.append(f"## {title}\n\n{markdown(tables)}")
        papers.append(f"% {title}\n{pd.DataFrame(rows, columns=heads).to_latex(index=False, escape=True)}")
    write_text(folder / "tables.md", "\n\n".join([*pages, NOTE]) + "\n")
    write_text(folder / "tables.tex", "\n\n".join([*papers, f"% {NOTE}"]).translate(SYMBOLS) + "\n")


def _stem(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("._") or "figure"
