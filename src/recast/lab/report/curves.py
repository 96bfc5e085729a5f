"""Charts of the arms of a run: training, attacks, corruptions, and test sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from recast.lab.evaluation.suites import CATEGORIES, of_kind
from recast.lab.folder.files import number
from recast.lab.pages.charts import Chart, LegendEntry, Point, Series, series_chart
from recast.lab.report.labels import CORRUPTIONS, suite_title, words
from recast.lab.report.load import Run
from recast.lab.report.verdict import accuracy, differing, settings_of

MOST_SWITCHES = 24  # more vertical lines would hide the curves
MOST_FIELDS = 2  # a line of a figure is named by so many settings, else by its run
PERCENT = (-2.5, 102)  # with room for markers at 0
Keyed = dict[float, tuple[str, str]]
"""Position on the horizontal axis → (suite, metric) of rows.csv."""


def training_series(run: Run, quantity: str, look: str = "line") -> list[Series]:
    """Return the arms by epoch; `quantity` is a field of `Epoch` or the name of a metric."""
    arms = {"finetuned": run.metrics} if run.is_plain else {"finetuned": run.control, "recast": run.metrics}
    series = []
    for arm, rows in arms.items():
        values = [number(row.metrics.get(quantity, getattr(row, quantity, None))) for row in rows]
        points = [Point(float(row.epoch), value) for row, value in zip(rows, values, strict=True)]
        series += [Series(words(run).arms[arm], points, arm, look)] if points else []
    return series


def training(run: Run) -> list[Chart]:
    """Return accuracy and loss by epoch, with a vertical line at every switch, which precedes its epoch."""
    if run.epochs == 0:
        return []
    switches = [switch.epoch - 1 for switch in run.switching.switches] if run.switching else []
    axis: dict[str, Any] = {
        "xlabel": "epoch",
        "whole_x": True,
        "switches": switches if len(switches) <= MOST_SWITCHES else [],
    }
    parent = accuracy(run, "parent") if "parent" in words(run).drawn else math.nan
    top1 = training_series(run, run.main[1])
    keys = [LegendEntry(words(run).arms["parent"], "dashed")] if math.isfinite(parent) else []
    keys += [LegendEntry(series.label, series.role) for series in top1]
    losses = training_series(run, "val_loss") + training_series(run, "train_loss", "dotted")
    return [
        series_chart("training_accuracy", f"{run.judged}, %", top1, level=(parent, "parent"), keys=keys, **axis),
        series_chart("training_loss", "Loss: validation (solid), training (dotted)", losses, **axis),
    ]


def settings(run: Run, suite: str) -> Keyed:
    """Return setting → (suite, metric), `0.5` → `top1@0.5`; of square test sizes the side."""
    keyed: Keyed = {}
    for row in run.rows:
        name, _, setting = row.metric.partition("@")
        height, _, width = setting.partition("x")
        if row.suite == suite and name == "top1" and setting and width in ("", height):
            keyed[float(height)] = (suite, row.metric)
    return keyed


def arms_chart(run: Run, name: str, title: str, points: Keyed, **options: Any) -> list[Chart]:
    """Return a chart of the arms with their intervals; none if no arm has two finite values.

    Args:
        points: position → (suite, metric).
    """
    lines = {arm: _line(run, arm, points) for arm in words(run).drawn}
    series = [Series(words(run).arms[arm], line, arm) for arm, line in lines.items() if len(line) > 1]
    return [series_chart(name, title, series, **options)] if series else []


def _line(run: Run, arm: str, points: Keyed) -> list[Point]:
    """Return the finite values of an arm with their intervals, by position."""
    rows = [(position, run.row(arm, *key)) for position, key in sorted(points.items())]
    return [Point(x, row.value, row.low, row.high) for x, row in rows if row and math.isfinite(row.value)]


def attacks(run: Run) -> list[Chart]:
    """Return a chart per attack, by its strength; strength 0 is the clean images, if their number is the same."""
    charts = []
    for suite in of_kind("attack"):
        counts = [{row.n for row in run.rows if row.suite == name} for name in ("clean", suite)]
        clean: Keyed = {0.0: ("clean", "top1")} if counts[0] == counts[1] else {}
        points = settings(run, suite) | clean
        title = f"{suite_title(suite, short=True)}: top-1, % by ε in 1/255"
        ticks = {strength: f"{strength:g}" for strength in points}
        charts += arms_chart(
            run, f"adversarial_{suite}", title, points, xlabel="ε in 1/255", xticks=ticks, ylim=PERCENT
        )
    return charts


def resolutions(run: Run) -> list[Chart]:
    """Return a chart of test resolution (T-CNN, Fig. 7)."""
    points = settings(run, "resolution")
    return arms_chart(run, "resolution", "Top-1, % by test resolution", points, xlabel="test size, pixels")


def of_runs(runs: Sequence[Run]) -> list[Chart]:
    """Return what each of several runs trained, by epoch (T-CNN, Fig. 6), by test size (Fig. 7) and by length."""
    by_epoch, by_size = list[Series](), list[Series]()
    for place, run in enumerate(runs):
        arm, role = "finetuned" if run.is_plain else "recast", place / max(len(runs) - 1, 1)
        epochs = [Point(float(row.epoch), number(row.metrics.get(run.main[1]))) for row in run.metrics]
        sizes = _line(run, arm, settings(run, "resolution"))
        for series, points in ((by_epoch, epochs), (by_size, sizes)):
            series += [Series(run.name, points, role, end=run.name)] if len(points) > 1 else []
    label = f"{runs[0].judged}, %, by"
    return [
        series_chart(name, title, series, xlabel=xlabel, right=0.8, whole_x=True)
        for name, title, series, xlabel in (
            ("training_runs", f"{label} epoch", by_epoch, "epoch"),
            ("resolution_runs", f"{label} test size", by_size, "test size, pixels"),
        )
        if len(series) > 1
    ] + _by_length(runs)


def _by_length(runs: Sequence[Run]) -> list[Chart]:
    """Return the final accuracy against the epochs of training (DeiT's, CaiT's, DeiT III's and PatchConvNet's figures).

    A line has the runs that differ in the length alone; its points are means over seeds. Unfinished runs have none.
    """
    finished = [run for run in runs if not run.unfinished]
    settings = [{key: value for key, value in settings_of(run).items() if key != "epochs"} for run in finished]
    varied = differing(settings)
    lines: dict[str, dict[int, list[float]]] = {}
    for run, fields in zip(finished, settings, strict=True):
        label = ", ".join(f"{key.rpartition('.')[2]} {fields.get(key)}" for key in varied[:MOST_FIELDS])
        label += f", {run.name}" * (len(varied) > MOST_FIELDS)
        value = accuracy(run, "finetuned" if run.is_plain else "recast")
        lines.setdefault(label, {}).setdefault(run.recipe.epochs, []).append(value)
    if max(map(len, lines.values()), default=0) < 2:
        return []
    series = []
    for place, (label, values) in enumerate(lines.items()):
        points = [Point(float(epochs), fmean(each)) for epochs, each in sorted(values.items())]
        series.append(Series(label, points, place / max(len(lines) - 1, 1), end=label))
    title = f"{runs[0].judged} at the end, %, by epochs of training"
    return [series_chart("length_runs", title, series, xlabel="epochs of training", right=0.8, whole_x=True)]


def relative(run: Run) -> list[Chart]:
    """Return 100·(recast − other)/other by category and by severity of corruptions (T-CNN, Fig. 3), for each suite.

    Intervals are those of the paired difference divided by the accuracy of the other arm.
    """
    charts = []
    for suite in CORRUPTIONS:
        categories = {name: f"top1/{name}" for name in CATEGORIES}
        metrics = dict.fromkeys(row.metric for row in run.rows if row.suite == suite)
        severities = {metric.rpartition("/")[2]: metric for metric in metrics if metric.startswith("top1/mean/")}
        for name, groups in (("category", categories), ("severity", severities)):
            gains = [_gains(run, suite, arm, groups) for arm in reversed(words(run).others)]
            if not any(bars.points for bars in gains):
                continue
            title = f"{suite_title(suite, short=True)}: relative improvement, %, by {name}"
            ticks = dict(enumerate(groups))
            charts.append(series_chart(f"relative_{suite}_{name}", title, gains, xlabel=name, xticks=ticks))
    return charts


def _gains(run: Run, suite: str, against: str, groups: Mapping[str, str]) -> Series:
    points = []
    for place, metric in enumerate(groups.values()):
        recast, other = (run.value(arm, suite, metric) for arm in ("recast", against))
        if other > 0 and math.isfinite(recast):
            paired = run.difference(against, suite, metric)
            low, high = (100 * paired.low / other, 100 * paired.high / other) if paired else (None, None)
            points.append(Point(place, 100 * (recast - other) / other, low, high))
    name = words(run).arms.get(against, against)
    look = "bars" if against == "finetuned" else "pale bars"
    return Series(f"Recast against {name[0].lower()}{name[1:]}", points, "recast", look)
