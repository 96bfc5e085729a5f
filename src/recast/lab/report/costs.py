"""Charts of accuracy against cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

from recast.lab.report import formats
from recast.lab.report.charts import Chart, joined
from recast.lab.report.curves import SMALL, settings
from recast.lab.report.draw import Point, Series, series_chart
from recast.lab.report.labels import CORRUPTIONS, arm_keys, suite_title, words
from recast.lab.report.load import Run
from recast.lab.suites import METRICS, base, of_kind

COSTS = {
    "macs": ("MACs per image", formats.compact),
    "parameters": ("parameters", formats.compact),
    "images_per_second": ("images per second", formats.compact),
    "peak_memory": ("peak memory, bytes", formats.memory),
    "seconds": ("training time", formats.duration),
}
DENSE = {"segmentation": ("miou", "boundary_iou"), "detection": ("ap", "mask_ap")}
MOST_NAMED = 6  # names of more runs would hide the points


def cost_charts(runs: Sequence[Run]) -> dict[str, list[Chart]]:
    """Return charts of accuracy and robustness by cost (T-CNN, Figs. 1 and 2), for runs of one data set."""
    charts: dict[str, list[Chart]] = {}
    for cost, (suite, metric, title) in product(COSTS, _accuracies(runs)):
        if chart := _cost_chart(runs, cost, suite, metric, title):
            charts.setdefault(cost, []).append(chart)
    return charts


def cost_figures(charts: Mapping[str, Sequence[Chart]]) -> list[Chart]:
    """Return the charts of each cost as one figure."""
    figures = []
    for cost, panels in charts.items():
        metrics = "Top-1" if "top1" in panels[0].columns else ", ".join(chart.title for chart in panels)
        figures.append(joined(f"accuracy_{cost}", f"{metrics}, %, against {COSTS[cost][0]}", panels))
    return figures


def _accuracies(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    """Return (suite, metric, title), one per suite; attacks at ε = 1/255 as in the paper, else their strongest."""
    metrics = [("clean", "top1", "Clean images")]
    for suite in of_kind("attack"):
        if strengths := {eps: key for run in runs for eps, key in settings(run, suite).items()}:
            eps = 1.0 if 1.0 in strengths else max(strengths)
            metrics.append((*strengths[eps], f"{suite_title(suite, short=True)}, ε = {eps:g}/255"))
    metrics += [(suite, "top1/mean", suite_title(suite, short=True)) for suite in CORRUPTIONS]
    metrics += [(suite, "top1", suite_title(suite)) for suite in of_kind("test set")]
    metrics += [(suite, metric, METRICS[metric].label) for suite, names in DENSE.items() for metric in names]
    measured = {row.suite for run in runs for row in run.rows}
    return [entry for entry in metrics if entry[0] in measured]


def _cost(run: Run, arm: str, cost: str) -> float:
    """Return the measured cost. Parameters and MACs default to the plan's; a parent's training time is unknown."""
    if cost == "seconds":
        rows = run.control if arm == "finetuned" and not run.is_plain else [] if arm == "parent" else run.metrics
        return sum(row.seconds or 0.0 for row in rows)
    value = run.value(arm, "cost", cost)
    if math.isfinite(value) or cost not in {"macs", "parameters"} or run.plan.totals is None:
        return value
    return float(getattr(run.plan.totals.after if arm == "recast" else run.plan.totals.before, cost))


def _cost_chart(runs: Sequence[Run], cost: str, suite: str, metric: str, title: str) -> Chart | None:
    label, as_text = COSTS[cost]
    rows, dots, lines = list[tuple[Any, ...]](), list[Series](), list[Series]()
    for run in runs:
        points = []
        for arm in words(run).drawn:
            row, x = run.row(arm, suite, metric), _cost(run, arm, cost)
            if row is not None and math.isfinite(row.value) and x > 0:
                name = f"{run.name + ', ' if len(runs) > 1 else ''}{words(run).arms.get(arm, arm)}"
                place = f"{label.partition(',')[0]} {as_text(x)}"
                points.append(Series(name, [Point(x, row.value, row.low, row.high, place)], arm, "points"))
        if points:
            rows += [(run.name, point.role, suite, *point.points[0][:4]) for point in points]
            end = run.name if 1 < len(runs) <= MOST_NAMED else ""
            lines.append(Series("", [point.points[0] for point in points], "muted", "thin", end))
            dots += points
    costs = [dot.points[0].x for dot in dots]
    if len(set(costs)) < 2:
        return None
    name, column, suffix = (suite, "top1", ": top-1") if base(metric) == "top1" else (metric, "percent", "")
    columns = ("run", "arm", "suite", cost, column, "low", "high")
    ticks = partial(formats.compact, digits=4) if as_text is formats.compact else as_text  # close values differ
    axis: dict[str, Any] = {"xlabel": label, "xformat": ticks, "log_x": max(costs) > 8 * min(costs), "size": SMALL}
    subject, keys = f"{title}{suffix} against {label}", arm_keys(runs[0], [dot.role for dot in dots])
    return series_chart(
        f"cost_{cost}_{name}", title, [*lines, *dots], (columns, rows), subject=subject, unit=" %", keys=keys, **axis
    )
