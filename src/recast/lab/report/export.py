"""Write a folder of figures: every chart as SVG and PNG for paper, its numbers as CSV, and tables.

DIR/index.csv                     file, run, title and description of every figure; identifies the folder
DIR/NAME.svg .png .csv            figures of all runs together, or of a single run
DIR/runN-RUN/NAME.svg .png .csv   figures of one of several runs; dataN-DATA/ for one of several data sets
DIR/tables.csv tables.md tables.tex    every number of the arms, with intervals
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from matplotlib.lines import Line2D

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
COLUMNS = ("run", "suite", "dataset", "metric", "quantity", "value", "low", "high", "n")  # quantity: arm or recast-ARM
DPI = 200


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


def write_figures(folder: Path, runs: Sequence[Part], groups: Sequence[Part]) -> None:
    """Write every figure and table to a temporary folder and rename it, so that a failure keeps older figures."""
    target = folder.resolve()
    try:
        with TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
            new, old = Path(temporary, "new"), Path(temporary, "old")
            new.mkdir()
            index = []
            for place, part in _placed(runs, groups):
                for chart in part["figures"]():
                    stem = f"{place}{_stem(chart.name)}"
                    write_chart(new / stem, chart)
                    index.append((f"{stem}.svg", part["run"].name if "run" in part else "", chart.title, chart.story))
            write_csv(new / INDEX, HEADER, index)
            _write_tables(new, [part["run"] for part in runs])
            if target.exists():
                target.rename(old)
            try:
                new.rename(target)
            except OSError:
                if old.exists():
                    old.rename(target)
                raise
    except OSError as error:
        raise RecastError(f"cannot write the figures to {folder}: {error.strerror or error}") from error


def _placed(runs: Sequence[Part], groups: Sequence[Part]) -> Iterator[tuple[str, Part]]:
    """Yield groups and runs with their folders, numbered as on the page."""
    for parts in (groups, runs):
        for part in parts:
            name = part["run"].name if "run" in part else part["data"]
            yield f"{part['anchor']}-{_stem(name)}/" if len(parts) > 1 else "", part


def write_chart(path: Path, chart: Chart) -> None:
    """Write a chart as .svg, .png and .csv: dark ink on white, title and legend on top."""
    path.parent.mkdir(exist_ok=True)
    with styled(PAPER):
        figure, _ = chart.draw(PAPER)
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
            metadata = {"Title": chart.title} | ({"Date": None} if suffix == ".svg" else {})
            name = path.with_name(path.name + suffix)
            figure.savefig(name, dpi=DPI, facecolor="white", bbox_inches=around, metadata=metadata)
    write_csv(path.with_name(path.name + ".csv"), chart.columns, _written(chart.rows))


def _write_tables(folder: Path, runs: Sequence[Run]) -> None:
    """Write rows.csv and differences.csv as tidy CSV, and the tables of the page as Markdown and LaTeX."""
    write_csv(folder / "tables.csv", COLUMNS, _written(tidy(runs)))
    texts: dict[str, list[str]] = {"tables.md": [], "tables.tex": []}
    for run in runs:
        title = f"{run.name}: {run.recipe.model.name} on {run.recipe.data.name}"
        tables = [arms_table(run, which) for which in LABELS]
        texts["tables.md"].append(f"## {title}\n\n{markdown(tables)}")
        texts["tables.tex"].append(f"% {title}\n{latex(tables)}")
    for (name, parts), note in zip(texts.items(), (NOTE, f"% {NOTE}"), strict=True):
        write_text(folder / name, "\n\n".join([*parts, note]) + "\n")


def tidy(runs: Sequence[Run]) -> Cells:
    """Return all rows and differences; a difference that was not measured in pairs has no interval."""
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
    """Convert cells as in the CSV files of a run: "true", "false", and an empty cell for NaN."""
    for row in rows:
        yield [str(cell).lower() if isinstance(cell, bool) else "" if cell != cell else cell for cell in row]
