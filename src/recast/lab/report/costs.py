"""Charts of accuracy against cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from recast.errors import RecastError
from recast.lab.config import Recipe
from recast.lab.evaluation.suites import METRICS, SUITES, base, of_kind
from recast.lab.folder.records import FrontierLine
from recast.lab.folder.run import RunFolder
from recast.lab.pages import formats
from recast.lab.pages.charts import Chart, LegendEntry, Point, Role, Series, series_chart
from recast.lab.report.curves import settings
from recast.lab.report.labels import CORRUPTIONS, suite_title, words
from recast.lab.report.load import Run, read_epochs

SMALL = (3.5, 2.4)
BY_TIME: dict[str, Any] = {"xlabel": "milliseconds per image", "xformat": "{:.3g}".format, "size": SMALL}
COSTS = {
    "macs": ("MACs per image", partial(formats.compact, digits=4)),  # 4, since close values differ
    "parameters": ("parameters", partial(formats.compact, digits=4)),
    "images_per_second": ("images per second", partial(formats.compact, digits=4)),
    "peak_memory": ("peak memory, bytes", formats.memory),
    "seconds": ("training time", formats.duration),
    "total_seconds": ("training time with the parent's", formats.duration),
}
TOTAL = "total_seconds"
MOST_NAMED = 6  # names of more runs would hide the points


def cost_charts(runs: Sequence[Run]) -> dict[str, list[Chart]]:
    """Return charts of accuracy and robustness by cost (T-CNN, Figs. 1 and 2).

    The training time counts that of the parents, if all are known.
    """
    charts: dict[str, list[Chart]] = {}
    costs = [cost for cost in COSTS if cost not in (TOTAL, "seconds")]
    costs.append("seconds" if any(math.isnan(parent_seconds(run.path, run.recipe)) for run in runs) else TOTAL)
    for cost, (suite, metric, title) in product(costs, _accuracies(runs)):
        if chart := _cost_chart(runs, cost, suite, metric, title):
            charts.setdefault(cost, []).append(chart)
    return charts


def _accuracies(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    """Return (suite, metric, title), one per suite; attacks at ε = 1/255 as in the paper, else their strongest."""
    metrics = [("clean", "top1", "Clean images")]
    for suite in of_kind("attack"):
        if strengths := {eps: key for run in runs for eps, key in settings(run, suite).items()}:
            eps = 1.0 if 1.0 in strengths else max(strengths)
            metrics.append((*strengths[eps], f"{suite_title(suite, short=True)}, ε = {eps:g}/255"))
    metrics += [(suite, "top1/mean", suite_title(suite, short=True)) for suite in CORRUPTIONS]
    metrics += [(suite, "top1", suite_title(suite)) for suite in of_kind("test set")]
    metrics += [(suite, metric, METRICS[metric].label) for suite, entry in SUITES.items() for metric in entry.by_cost]
    measured = {row.suite for run in runs for row in run.rows}
    return [entry for entry in metrics if entry[0] in measured]


def _cost(run: Run, arm: str, cost: str) -> float:
    """Return the measured cost. Parameters and MACs default to the plan's."""
    if cost in ("seconds", TOTAL):
        rows = run.control if arm == "finetuned" and not run.is_plain else [] if arm == "parent" else run.metrics
        before = parent_seconds(run.path, run.recipe) if cost == TOTAL else 0.0
        return before + sum(row.seconds or 0.0 for row in rows)
    value = run.value(arm, "cost", cost)
    if math.isfinite(value) or cost not in {"macs", "parameters"} or run.plan is None:
        return value
    return float(getattr(run.plan.after if arm == "recast" else run.plan.before, cost))


def parent_seconds(folder: Path, recipe: Recipe) -> float:
    """Return the seconds of training behind the weights that a run started from, those of their own parents included.

    0 for random weights, NaN for weights that are of no run folder that can be read.
    """
    checkpoint = recipe.model.checkpoint
    if checkpoint is None:
        return math.nan if recipe.model.pretrained else 0.0
    arm = RunFolder((folder / checkpoint).resolve().parent)
    above = RunFolder(arm.path.parent)
    earlier = above if arm.path == above.control else arm
    if earlier.path == folder.resolve() or not (earlier.is_run and arm.metrics.is_file()):
        return math.nan
    try:
        seconds = sum(row.seconds or 0.0 for row in read_epochs(arm.metrics))
        return seconds + parent_seconds(earlier.path, earlier.recipe())
    except RecastError:
        return math.nan


def _cost_chart(runs: Sequence[Run], cost: str, suite: str, metric: str, title: str) -> Chart | None:
    dots, lines = list[Series](), list[Series]()
    for run in runs:
        points = []
        for arm in words(run).drawn:
            row, x = run.row(arm, suite, metric), _cost(run, arm, cost)
            if row is not None and math.isfinite(row.value) and x > 0:
                name = f"{run.name + ', ' if len(runs) > 1 else ''}{words(run).arms[arm]}"
                points.append(Series(name, [Point(x, row.value, row.low, row.high)], arm, "points"))
        if points:
            end = run.name if 1 < len(runs) <= MOST_NAMED else ""
            lines.append(Series("", [dot.points[0] for dot in points], "muted", "thin", end))
            dots += points
    costs = [dot.points[0].x for dot in dots]
    if len(set(costs)) < 2:
        return None
    xlabel, as_text = COSTS[cost]
    axis: dict[str, Any] = {"xlabel": xlabel, "xformat": as_text, "log_x": max(costs) > 8 * min(costs)}
    roles = {dot.role for dot in dots}
    keys = [LegendEntry(label, arm) for arm, label in words(*runs).arms.items() if arm in roles]
    name = f"cost_{cost}_{suite if base(metric) == 'top1' else metric}"
    return series_chart(name, title, [*lines, *dots], size=SMALL, keys=keys, **axis)


def frontier(run: Run) -> list[Chart]:
    """Return accuracy against time as the heads of the recast network are closed one by one, beside the other arms."""
    by_arm = {arm: [line for line in run.frontier if line.model == arm] for arm in words(run).drawn}
    networks = [(words(run).arms[arm], arm, lines) for arm, lines in by_arm.items() if lines]
    return _frontier_charts("frontier", networks) if by_arm.get("recast") else []


def joint_frontier(runs: Sequence[Run]) -> list[Chart]:
    """Return the recast networks of several runs as their heads are closed; none unless two were measured."""
    by_run = {run.name: [line for line in run.frontier if line.model == "recast"] for run in runs}
    measured = [(name, lines) for name, lines in by_run.items() if lines]
    if len(measured) < 2:
        return []
    networks = [(name, place / (len(measured) - 1), lines) for place, (name, lines) in enumerate(measured)]
    return _frontier_charts("frontier_runs", networks)


def _frontier_charts(name: str, networks: Sequence[tuple[str, Role, list[FrontierLine]]]) -> list[Chart]:
    """Return a chart per metric of (label, color, lines); a line connects the best points of a recast network."""
    charts = []
    for metric, title in (("top1", "Clean images"), ("noise", "Gaussian noise")):
        series = []
        for label, color, lines in networks:
            points = [Point(line.ms, getattr(line, metric)) for line in lines]
            series.append(Series(label, points, color, "points"))
            if lines[0].model == "recast":
                series.append(Series("", _best(points), color, "thin"))
        charts.append(series_chart(f"{name}_{metric}", title, series, **BY_TIME))
    return charts


def _best(points: Sequence[Point]) -> list[Point]:
    """Return the points that no faster one reaches."""
    front: list[Point] = []
    for point in sorted(points, key=lambda point: (point.x, -point.y)):
        if not front or point.y > front[-1].y:
            front.append(point)
    return front
