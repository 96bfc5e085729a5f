"""Tables of the page, as cells of text that the templates print.

The arms: every measured number, the differences to the recast network, and their intervals. The plan. Several runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recast.lab.evaluation.intervals import Interval
from recast.lab.evaluation.suites import METRICS, PER_CORRUPTION, SUITES, base, is_of_class
from recast.lab.folder.records import ARMS, Difference
from recast.lab.pages import formats
from recast.lab.report.labels import TEST_SETS, is_accuracy, measured, suite_title, words, worth_a_line
from recast.lab.report.load import Run
from recast.lab.report.verdict import accuracy, epochs_text, is_exact, mean_of, why_no_mean
from recast.tracing.cost import Cost

ARM_TABLES = {"arms": "All measurements of all networks", "classes": "Results by class"}
"""Tables of a run. Classes, which may be many, have their own."""
PLANNED = ("parameters", "macs")  # costs that do not depend on images
PLAN_COSTS = {"parameters": formats.compact, "macs": formats.compact, "activation_bytes": formats.memory}


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str
    small: tuple[str, ...] = ()  # lines below it in smaller letters, such as an interval
    title: str = ""  # shown on hover
    kind: str = ""  # "text": left-aligned; an arm: its mark, in a head; by-ARM: colored by the better arm
    code: bool = False
    link: str = ""
    bar: Difference | None = None  # of accuracies in points, drawn from the middle of a track


@dataclass(frozen=True)
class PageTable:
    """A table of the page."""

    label: str  # for screen readers
    heads: list[Cell]  # with \n between lines
    groups: dict[str, list[list[Cell]]]  # title above the rows, "" for none → rows
    foot: Sequence[Cell] = ()
    kind: str = ""
    scale: float = 0.0  # percent of a bar's track per point


def arm_heads(*runs: Run) -> list[Cell]:
    """Return the heads of the columns of the arms and of their differences."""
    names = words(*runs)
    gaps = [f"Recast − {names.arms[arm].rpartition(', ')[2].lower()}" for arm in names.others]
    heads = [*names.arms.items(), *(("", gap) for gap in gaps)]
    return [Cell(name.replace(" ", "\n").replace("\n−", " −"), kind=arm) for arm, name in heads]  # one word per line


def arms_table(run: Run, name: str = "arms") -> PageTable:
    """Return a table of `ARM_TABLES`, grouped by suite, costs last; single corruptions are in rows.csv alone."""
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
    return PageTable(ARM_TABLES[name], heads, groups, kind=kind, scale=50 / largest if largest else 0.0)


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
    bar = paired if is_accuracy(metric) and other == _baseline(run) else None
    return Cell(text, (formats.bounds(paired.low, paired.high, digits),), kind=f"by-{better}", bar=bar)


def steps_table(run: Run) -> PageTable | None:
    """Return a row per recast convolution; None if there is none."""
    if run.plan is None or not run.steps:
        return None
    rows = []
    for step in run.steps:
        sizes = f"{_times(step.geometry.kernel)}, {_times(step.input)} → {_times(step.output)}"
        name, tokens = Cell(step.name, (sizes,), code=True), Cell(f"{step.queries:,} × {step.keys:,}")
        start = Cell("exact" if step.exact else "not exact", kind="text")
        rows.append([name, Cell(str(step.heads)), tokens, *_costs(step.before, step.after), start])
    heads = ["Layer", "Heads", "Tokens,\nquery × key", "Parameters", "MACs", "Activation memory"]
    foot = [Cell("Whole model"), Cell(""), Cell(""), *_costs(run.plan.before, run.plan.after), Cell("")]
    return PageTable("The plan", [*map(Cell, heads), Cell("Start", kind="text")], {"": rows}, foot, "stack")


def _times(sizes: Sequence[int]) -> str:
    return "×".join(map(str, sizes))


def _costs(before: Cost, after: Cost) -> list[Cell]:
    """Return every cost before → after with its relative change."""
    cells = []
    for key, as_text in PLAN_COSTS.items():
        old, new = getattr(before, key), getattr(after, key)
        cells.append(Cell(f"{as_text(old)} → {as_text(new)}", (formats.share(new, old),), f"{old:,} → {new:,}"))
    return cells


def unchanged_by_reason(run: Run) -> dict[str, list[str]]:
    """Return reason → names of the unchanged layers."""
    reasons: dict[str, list[str]] = {}
    for layer in run.plan.left if run.plan else ():
        reasons.setdefault(layer.reason, []).append(layer.name)
    return reasons


def runs_table(runs: Sequence[Run]) -> PageTable:
    """Return a row per run; at its foot, mean and 95 % interval if the runs differ in the seed only."""
    names = words(*runs)
    rows = []
    for number_of_run, run in enumerate(runs, start=1):
        start = "unmeasured" if run.verify is None else "exact" if is_exact(run) else "inexact"
        start = "" if run.is_plain else "recast during training, " if run.is_scheduled else f"{start} start, "
        detail = f"{start}{epochs_text(run)}, seed {run.recipe.seed}"
        row = [Cell(run.name, (run.title, detail), link=f"#run{number_of_run}")]
        row += [Cell(formats.decimal(accuracy(run, arm)), kind=arm) for arm in names.arms]
        for arm in names.others:
            paired = run.difference(arm, *run.main)
            small = (formats.bounds(paired.low, paired.high),) if paired else ()
            row.append(Cell(formats.signed(accuracy(run, "recast") - accuracy(run, arm)), small))
        rows.append(row)
    foot: list[Cell] = []
    if not why_no_mean(runs):
        foot = [Cell("Mean of the seeds", ("and its 95 % interval",))]
        foot += [_mean(mean_of(runs, *runs[0].main, arm), formats.decimal) for arm in names.arms]
        foot += [_mean(mean_of(runs, *runs[0].main, "recast", arm)) for arm in names.others]
    return PageTable("All runs", [Cell("Run"), *arm_heads(*runs)], {"": rows}, foot, "stack")


def _mean(line: Interval, as_text: Any = formats.signed, digits: int = 1, better: tuple[str, str] = ("", "")) -> Cell:
    """Return mean and interval, colored by the better arm of (above 0, below 0) if the interval excludes 0."""
    if not math.isfinite(line.mean):
        return Cell(formats.MISSING)
    if not math.isfinite(line.high):
        return Cell(as_text(line.mean, digits))
    arm = better[line.mean < 0] if formats.leaves_out_zero(line.low, line.high, digits) else ""
    small = (formats.bounds(line.low, line.high, digits),)
    return Cell(as_text(line.mean, digits), small, kind=f"by-{arm}" if arm else "")


def seeds_table(runs: Sequence[Run]) -> PageTable | None:
    """Return every metric that all runs have, paired over the seeds; None if the runs cannot be averaged."""
    if why_no_mean(runs):
        return None
    rows = []
    names = words(*runs)
    for suite, metric in dict.fromkeys((row.suite, row.metric) for row in runs[0].rows):
        arms = {arm: [run.value(arm, suite, metric) for run in runs] for arm in ARMS}
        name = base(metric)
        if PER_CORRUPTION.match(metric) or name in PLANNED or not all(map(math.isfinite, arms["recast"])):
            continue
        digits = 3 if name in METRICS and METRICS[name].is_fraction else 1
        cells = [Cell(f"{suite_title(suite)}: {measured(suite, metric)}")]
        cells += [Cell(write(name, sum(arms[arm]) / len(runs), digits), kind=arm) for arm in names.arms]
        for arm in names.others:
            line = mean_of(runs, suite, metric, "recast", arm)
            cells.append(_mean(line, digits=digits, better=("recast", arm) if is_accuracy(metric) else ("", "")))
        rows.append(cells)
    heads = [Cell("Measured"), *arm_heads(*runs)]
    return PageTable("All metrics over the seeds", heads, {"": rows}, kind="stack") if rows else None
