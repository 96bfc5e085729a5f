"""Tables of the plan, and of several runs side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from recast.lab.records import ARMS
from recast.lab.report import formats
from recast.lab.report.arms_table import PLANNED, arm_heads, write
from recast.lab.report.labels import is_accuracy, measured, suite_title, words
from recast.lab.report.load import Run
from recast.lab.report.table import Cell, PageTable
from recast.lab.report.verdict import accuracy, is_exact, why_no_mean
from recast.lab.statistics import mean_interval
from recast.lab.suites import METRICS, PER_CORRUPTION, base
from recast.tracing.cost import Cost

PLAN_COSTS = {"parameters": formats.compact, "macs": formats.compact, "activation_bytes": formats.memory}


def steps_table(run: Run) -> PageTable | None:
    """Return a row per recast convolution; None if there is none."""
    if run.plan is None or not run.steps:
        return None
    rows = []
    for step in run.steps:
        sizes = f"{_times(step.geometry.kernel)}, {_times(step.input)} → {_times(step.output)}"
        name, tokens = Cell(step.name, (sizes,), code=True), Cell(f"{step.queries:,} × {step.keys:,}")
        start = Cell("exact" if step.exact else "not exact", kind="text")
        rows.append([name, Cell(str(step.geometry.num_heads)), tokens, *_costs(step.before, step.after), start])
    heads = ["Layer", "Heads", "Tokens,\nquery × key", "Parameters", "MACs", "Activation memory"]
    foot = [Cell("Whole model"), Cell("", span=2), *_costs(run.plan.before, run.plan.after), Cell("")]
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
        detail = f"{start}{formats.plural(run.epochs, 'epoch')}, seed {run.recipe.seed}"
        row = [Cell(run.name, (run.title, detail), link=f"#run{number_of_run}")]
        row += [Cell(formats.decimal(accuracy(run, arm)), kind=arm) for arm in names.arms]
        for arm in names.others:
            paired = run.difference(arm, *run.main)
            small = (formats.interval(paired.low, paired.high),) if paired else ()
            row.append(Cell(formats.signed(accuracy(run, "recast") - accuracy(run, arm)), small))
        rows.append(row)
    foot: list[Cell] = []
    if not why_no_mean(runs):
        foot = [Cell("Mean of the seeds", ("and its 95 % interval",))]
        foot += [_mean([accuracy(run, arm) for run in runs], formats.decimal) for arm in names.arms]
        foot += [_mean([accuracy(run, "recast") - accuracy(run, arm) for run in runs]) for arm in names.others]
    return PageTable("All runs", [Cell("Run"), *arm_heads(*runs)], {"": rows}, foot, "stack")


def _mean(
    values: Sequence[float], as_text: Any = formats.signed, digits: int = 1, better: tuple[str, str] = ("", "")
) -> Cell:
    """Return mean and interval, colored by the better arm of (above 0, below 0) if the interval excludes 0."""
    if not all(map(math.isfinite, values)):
        return Cell(formats.MISSING)
    mean, low, high = mean_interval(values)
    arm = better[mean < 0] if formats.leaves_out_zero(low, high, digits) else ""
    return Cell(as_text(mean, digits), (formats.interval(low, high, digits),), kind=f"by-{arm}" if arm else "")


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
            gaps = [recast - other for recast, other in zip(arms["recast"], arms[arm], strict=True)]
            cells.append(_mean(gaps, digits=digits, better=("recast", arm) if is_accuracy(metric) else ("", "")))
        rows.append(cells)
    heads = [Cell("Measured"), *arm_heads(*runs)]
    return PageTable("All metrics over the seeds", heads, {"": rows}, kind="stack") if rows else None
