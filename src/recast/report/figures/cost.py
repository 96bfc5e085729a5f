"""Accuracy and robustness against cost, of one or several runs (T-CNN, Figs. 1 and 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from recast.report.figures.arms import arm_keys, is_number, values_after
from recast.report.figures.chart import Chart, Data, DrawAxes, alone, joined
from recast.report.figures.lines import ARM_MARKERS, spread
from recast.report.figures.style import Hit, Palette
from recast.report.read.run import ARMS, Run
from recast.report.tables.names import CORRUPTIONS, COSTS, SHORT
from recast.report.text import formats
from recast.report.text.words import words
from recast.run.files import mapping, number

AXES = {
    "macs": "MACs per image",
    "parameters": "parameters",
    "images_per_second": "images per second",
    "peak_memory": "peak memory, bytes",
}
MOST_NAMED = 6
"""With more runs than this their names would hide the points."""


@dataclass(frozen=True)
class CostAxis:
    """One choice of the horizontal axis, with a chart per measure of accuracy."""

    cost: str
    label: str
    charts: list[Chart]

    def figure(self) -> Chart:
        """The charts as one figure."""
        return joined(f"accuracy_{self.cost}", f"Top-1, %, against {AXES[self.cost]}", self.charts)


@dataclass(frozen=True)
class Point:
    run: str
    arm: str
    label: str
    """What the arm is called."""
    cost: float
    value: float
    low: float | None
    high: float | None


def cost_axes(runs: Sequence[Run]) -> list[CostAxis]:
    """Charts for each cost that is known of some arm; runs of one data set only."""
    measures = _measures(runs)
    axes = []
    for cost in (name for name in AXES if name in COSTS):
        charts = []
        for suite, metric, title in measures:
            points = [point for run in runs for point in _points(run, cost, suite, metric)]
            if len({point.cost for point in points}) > 1:
                charts.append(_chart(runs, points, cost, suite, title))
        if charts:
            axes.append(CostAxis(cost, AXES[cost].partition(",")[0], charts))
    return axes


def _measures(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    """(suite, metric, title): one number per suite; of an attack at ε = 1/255 as in the paper, or its strongest."""
    found = [("clean", "top1", "Clean images")]
    for suite in ("fgsm", "pgd", "autoattack"):
        strengths = {eps for run in runs for eps in values_after(run, suite, "top1@") if is_number(eps)}
        if strengths:
            eps = "1" if "1" in strengths else max(strengths, key=float)
            found.append((suite, f"top1@{eps}", f"{SHORT[suite]}, ε = {eps}/255"))
    found += [(suite, "top1/mean", SHORT[suite]) for suite in CORRUPTIONS]
    sets = ("imagenet-a", "imagenet-r", "imagenet-v2", "imagenet-sketch", "imagenet-real")
    found += [(suite, "top1", SHORT[suite]) for suite in sets]
    return [measure for measure in found if any(row.suite == measure[0] for run in runs for row in run.rows)]


def _points(run: Run, cost: str, suite: str, metric: str) -> list[Point]:
    points = []
    for arm in ARMS:
        row, across = run.row(arm, suite, metric), _cost(run, arm, cost)
        if row is not None and math.isfinite(row.value) and across > 0:
            points.append(Point(run.name, arm, words(run).arms.get(arm, arm), across, row.value, row.low, row.high))
    return points


def _cost(run: Run, arm: str, cost: str) -> float:
    """As measured; parameters and MACs else from the plan."""
    measured = run.value(arm, "cost", cost)
    if math.isfinite(measured) or cost not in {"macs", "parameters"}:
        return measured
    when = "after" if arm == "recast" else "before"
    return number(mapping(mapping(run.plan.get("totals")).get(when)).get(cost))


def _chart(runs: Sequence[Run], points: Sequence[Point], cost: str, suite: str, title: str) -> Chart:
    told = "; ".join(
        f"{point.run + ', ' if len(runs) > 1 else ''}{point.label} {formats.percent(point.value)} at "
        f"{_write(cost, point.cost)}"
        for point in points
    )
    panel = _panel(points, cost, len({run.name for run in runs}))
    rows = [(p.run, p.arm, suite, p.cost, p.value, p.low, p.high) for p in points]
    return Chart(
        f"cost_{cost}_{suite}",
        title,
        f"{title}: top-1 against {AXES[cost]}. {told}.",
        alone(panel, (3.5, 2.5)),
        Data(("run", "arm", "suite", cost, "top1", "low", "high"), list(rows)),
        arm_keys(runs[0], [point.arm for point in points]),
        panel=panel,
    )


def _write(cost: str, value: float) -> str:
    return formats.memory(value) if cost == "peak_memory" else formats.compact(value)


def _panel(points: Sequence[Point], cost: str, runs: int) -> DrawAxes:
    def draw(axes: Axes, palette: Palette) -> list[Hit]:
        hits = []
        for run in dict.fromkeys(point.run for point in points):
            own = [point for point in points if point.run == run]
            axes.plot([p.cost for p in own], [p.value for p in own], color=palette.muted, linewidth=0.9, alpha=0.7)
        for point in points:
            color = palette.arms[point.arm]
            if point.low is not None and point.high is not None:
                axes.vlines(point.cost, point.low, point.high, color=color, linewidth=1.4, alpha=0.7)
            marker = ARM_MARKERS[point.arm]
            axes.plot([point.cost], [point.value], marker, color=color, markersize=6, zorder=3)
            text = f"{point.label}: {formats.percent(point.value)}"
            text = f"{point.run}, {text}" if runs > 1 else text
            if point.low is not None and point.high is not None:
                text += f" ({formats.interval(point.low, point.high)})"
            hits.append(Hit(axes, point.cost, point.value, f"{text} at {_write(cost, point.cost)}"))
        axes.margins(x=0.16 if runs > 1 else 0.12, y=0.14)
        costs = [point.cost for point in points]
        if max(costs) > 8 * min(costs):
            axes.set_xscale("log")
        else:
            axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(lambda value, _: _write(cost, value))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlabel(AXES[cost])
        if 1 < runs <= MOST_NAMED:
            _name_runs(axes, points, palette)
        return hits

    return draw


def _name_runs(axes: Axes, points: Sequence[Point], palette: Palette) -> None:
    """Each run's name right of its last point, moved apart where they would overlap."""
    last = {point.run: point for point in points}
    low, high = axes.get_ylim()
    order = sorted(last.values(), key=lambda point: point.value)
    places = spread([(point.value - low) / (high - low) for point in order], 0.065)
    blended = axes.get_xaxis_transform()
    for point, place in zip(order, places, strict=True):
        axes.annotate(
            point.run,
            (point.cost, place),
            xycoords=blended,
            xytext=(7, 0),
            textcoords="offset points",
            va="center_baseline",
            fontsize=6.8,
            color=palette.muted,
        )
