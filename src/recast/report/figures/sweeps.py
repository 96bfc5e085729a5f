"""Accuracy against one thing that was varied at test time: size, neighbours, frequencies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from recast.report.figures.arms import arm_keys, is_number, measured_curve, values_after
from recast.report.figures.chart import Chart
from recast.report.figures.lines import Curve, curve_data, line_chart
from recast.report.read.run import ARMS, Run
from recast.report.text import formats
from recast.report.text.words import words
from recast.run.files import mapping

SIZE = re.compile(r"(\d+)x(\d+)")


def sweeps(run: Run) -> list[Chart]:
    """Resolution (T-CNN, Fig. 7), low- and high-passed images, nearest neighbours: those that were measured."""
    return [*_resolution(run), *_frequency(run), *_neighbours(run)]


def _curves(run: Run, points: dict[float, tuple[str, str]]) -> list[Curve]:
    return [curve for arm in ARMS if (curve := measured_curve(run, arm, points))]


def _resolution(run: Run) -> list[Chart]:
    """Over the side of square sizes; sizes that are not square are told below the chart."""
    sizes = {size: SIZE.fullmatch(size) for size in values_after(run, "resolution", "top1@")}
    sides = {size: (int(match[1]), int(match[2])) for size, match in sizes.items() if match}
    curves = _curves(run, {float(h): ("resolution", f"top1@{size}") for size, (h, w) in sides.items() if h == w})
    if not curves:
        return []
    curves = [replace(curve, xnames=[f"{side:g} pixels" for side in curve.x]) for curve in curves]
    best = "; ".join(
        f"{c.label} best at {c.x[max(range(len(c.y)), key=c.y.__getitem__)]:g} with {formats.decimal(max(c.y))} %"
        for c in curves
    )
    trained = mapping(run.recipe.get("data")).get("img_size")
    note = f"Trained at {trained} pixels." if trained else ""
    for size, (height, width) in sides.items():
        if height != width:
            values = {arm: run.value(arm, "resolution", f"top1@{size}") for arm in ARMS}
            told = ", ".join(f"{words(run).arms[arm]} {formats.decimal(v)} %" for arm, v in values.items() if v == v)
            note += f" {height}×{width} (height × width): {told}."
    x = _apart(sorted({side for curve in curves for side in curve.x}))
    draw = line_chart(curves, xlabel="test size, pixels", xticks=x, xnames=[f"{tick:g}" for tick in x], unit=" %")
    data = curve_data(curves, "side", "top1")
    keys = arm_keys(run, [curve.arm for curve in curves])
    story = f"Top-1 by test resolution: {best}. {note}"
    return [Chart("resolution", "Top-1, % by test resolution", story, draw, data, keys, note.strip())]


def _apart(ticks: Sequence[float]) -> list[float]:
    """The ticks whose names do not run into each other, the ends among them."""
    least, kept = 0.13 * (ticks[-1] - ticks[0]), [ticks[0]]
    for tick in ticks[1:-1]:
        if tick - kept[-1] >= least and ticks[-1] - tick >= least:
            kept.append(tick)
    return [*kept, ticks[-1]] if len(ticks) > 1 else kept


def _frequency(run: Run) -> list[Chart]:
    charts = []
    for metric, kept, title in (("low", "below", "Low frequencies alone"), ("high", "above", "High frequencies alone")):
        found = values_after(run, "frequency", f"{metric}@")
        points = {float(edge): ("frequency", f"{metric}@{edge}") for edge in found if is_number(edge)}
        curves = _curves(run, points)
        if not curves:
            continue
        draw = line_chart(curves, xlabel=f"what is {kept} this frequency is kept, ×π", ylim=(0, 102), unit=" %")
        middle = "; ".join(
            f"{c.label} {formats.decimal(c.y[0])} % at {c.x[0]:g}π, {formats.decimal(c.y[-1])} % at {c.x[-1]:g}π"
            for c in curves
        )
        story = f"Top-1 on images with only the frequencies {kept} an edge: {middle}."
        keys = arm_keys(run, [curve.arm for curve in curves])
        data = curve_data(curves, "frequency_pi", "top1")
        charts.append(Chart(f"frequency_{metric}", f"{title}: top-1, %", story, draw, data, keys))
    return charts


def _neighbours(run: Run) -> list[Chart]:
    found = values_after(run, "knn", "top1@")
    curves = _curves(run, {float(k): ("knn", f"top1@{k}") for k in found if is_number(k)})
    if not curves:
        return []
    ends = "; ".join(f"{c.label} {formats.decimal(max(c.y))} % at best" for c in curves)
    draw = line_chart(curves, xlabel="k", whole_x=True, xticks=curves[0].x, unit=" %")
    story = f"Top-1 of the k nearest training images in the space of the features: {ends}."
    keys = arm_keys(run, [curve.arm for curve in curves])
    return [Chart("knn", "k nearest neighbours: top-1, %", story, draw, curve_data(curves, "k", "top1"), keys)]
