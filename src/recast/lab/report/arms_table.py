"""Compare the arms: every measured number, the differences to the recast network, and their intervals."""

from __future__ import annotations

import math

from recast.lab.records import ARMS
from recast.lab.report import formats
from recast.lab.report.labels import TEST_SETS, is_accuracy, measured, suite_title, words, worth_a_line
from recast.lab.report.load import Run
from recast.lab.report.table import Bar, Cell, PageTable
from recast.lab.suites import METRICS, PER_CORRUPTION, SUITES, base, is_of_class

LABELS = {"arms": "All measurements of all networks", "classes": "Results by class"}
"""Tables of a run. Classes, which may be many, have their own."""
PLANNED = ("parameters", "macs")  # costs that do not depend on images


def arm_heads(*runs: Run) -> list[Cell]:
    """Return the heads of the columns of the arms and of their differences."""
    names = words(*runs)
    gaps = [f"Recast − {names.arms[arm].rpartition(', ')[2].lower()}" for arm in names.others]
    heads = [*names.arms.items(), *(("", gap) for gap in gaps)]
    return [Cell(name.replace(" ", "\n").replace("\n−", " −"), kind=arm) for arm, name in heads]  # one word per line


def arms_table(run: Run, name: str = "arms") -> PageTable:
    """Return a table of `LABELS`, grouped by suite, costs last; single corruptions are in rows.csv alone."""
    order = {suite: index for index, suite in enumerate(SUITES)}
    suites: dict[str, dict[tuple[str, str], None]] = {}
    for row in sorted(worth_a_line(run.rows), key=lambda row: order.get(row.suite, order["cost"] - 0.5)):
        if is_of_class(row.metric) == (name == "classes") and not PER_CORRUPTION.match(row.metric):
            title = "Other test sets: top-1, %" if row.suite in TEST_SETS else suite_title(row.suite)
            suites.setdefault(title, {})[row.suite, row.metric] = None
    groups = {title: [_cells(run, *line) for line in lines] for title, lines in suites.items()}
    bars = [cell.bar for rows in groups.values() for row in rows for cell in row if cell.bar]
    largest = max((abs(end) for bar in bars for end in (bar.value, bar.low, bar.high)), default=0.0)
    heads = [Cell("Measured"), *arm_heads(run), Cell("Images")]
    kind = "arms both" if len(words(run).others) > 1 else "arms"
    return PageTable(LABELS[name], heads, groups, kind=kind, scale=50 / largest if largest else 0.0)


def _baseline(run: Run) -> str:
    """Return the arm that colors and bars compare with."""
    has_control = any(row.model == "finetuned" for row in run.rows)
    return "finetuned" if has_control or "parent" not in words(run).others else "parent"


def _cells(run: Run, suite: str, metric: str) -> list[Cell]:
    rows = {arm: row for arm in ARMS if (row := run.row(arm, suite, metric))}
    name, images, names = base(metric), max((row.n for row in rows.values()), default=0), words(run)
    digits = 3 if name in METRICS and METRICS[name].is_fraction else 2 if images >= 2000 else 1
    cells = [Cell(measured(suite, metric), title=METRICS[name].meaning if name in METRICS else "")]
    for arm in names.arms:
        row, value = rows.get(arm), run.value(arm, suite, metric)
        small: tuple[str, ...] = ()
        if row and row.low is not None and row.high is not None:
            small = (f"{write(name, row.low, digits)} to {write(name, row.high, digits)}",)
        cells.append(Cell(write(name, value, digits), small, f"{value:,.10g}" if math.isfinite(value) else "", arm))
    cells += [_difference(run, suite, metric, other, digits) for other in names.others]
    return [*cells, Cell("" if name in PLANNED else f"{images:,}")]


def write(name: str, value: float, digits: int) -> str:
    """Format a value of the metric `name`."""
    if name == "peak_memory":
        return formats.memory(value)
    return formats.compact(value) if METRICS.get(name) and METRICS[name].is_cost else formats.decimal(value, digits)


def _difference(run: Run, suite: str, metric: str, other: str, digits: int) -> Cell:
    """Return a difference, colored by the better arm unless it is a tie or its interval includes 0."""
    recast, value = (run.value(arm, suite, metric) for arm in ("recast", other))
    gain, entry, paired = recast - value, METRICS.get(base(metric)), run.difference(other, suite, metric)
    if not math.isfinite(gain):
        return Cell(formats.MISSING)
    text = formats.share(recast, value, 1) if entry and entry.is_cost else formats.signed(gain, digits)
    better = "" if gain == 0 else "recast" if (gain > 0) != (entry is not None and entry.lower_is_better) else other
    if paired is None:
        return Cell(text, kind=f"by-{better}")
    better = better if formats.leaves_out_zero(paired.low, paired.high, digits) else ""
    bar = None
    if is_accuracy(metric) and other == _baseline(run):
        bar = Bar("recast" if gain > 0 else other, gain, paired.low, paired.high)
    return Cell(text, (formats.interval(paired.low, paired.high, digits),), kind=f"by-{better}", bar=bar)
