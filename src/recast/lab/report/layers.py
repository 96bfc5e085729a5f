"""Charts of the layers of a network: frequencies, gates and spans."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from recast.lab.folder.files import number
from recast.lab.folder.records import ARMS, FourierLine
from recast.lab.pages import formats
from recast.lab.pages.charts import Chart, LegendEntry, Point, Series, series_chart
from recast.lab.report.labels import words
from recast.lab.report.load import Run

SMALL = (3.5, 2.5)
YLABEL = "Δ log amplitude"
AT = {"_third_pi": (1 / 3, "π/3"), "_two_thirds_pi": (2 / 3, "2π/3"), "": (1.0, "π")}
"""End of a chart's name → the frequency that it shows by depth, in units of π, and its name (PRS, Figs. 2 and 3)."""
BY_DEPTH: dict[str, Any] = {"xlabel": "depth (0: before the first block, 1: the last)", "size": SMALL}
PI = {0.0: "0", 0.25: "π/4", 0.5: "π/2", 0.75: "3π/4", 1.0: "π"}
MOST_LAYERS = 24  # whose gates are drawn, to keep the page small
QUANTITIES = {
    "gamma": ("γ", "gate of the content map", 0.0),
    "s": ("s", "spread: one-hot shift (0) to Gaussian (1)", 0.0),
    "sigma": ("σ(λ)", "share of the positional map", math.nan),
    "span": ("1/α", "attention span of the Gaussian", math.nan),
}
"""Name in metrics.jsonl → symbol, meaning, and the value of a head that equals its convolution."""
MAPS = {"gamma": "entropy", "sigma": "entropy", "s": "span", "span": "span"}
"""Quantity → the one that is null or 0 for heads without the map it is about, content or Gaussian."""
Blocks = Mapping[str, Sequence[FourierLine]]


def _blocks(run: Run, arm: str) -> Blocks:
    """Return the curve of every block, in the order of the network."""
    blocks: dict[str, list[FourierLine]] = {}
    for line in sorted(run.fourier, key=lambda line: (line.index, line.frequency)):
        if line.model == arm and math.isfinite(line.delta_log_amplitude):
            blocks.setdefault(line.block, []).append(line)
    return blocks


def fourier_charts(run: Run) -> list[Chart]:
    """Return a chart of curves per arm, on one scale."""
    arms = {arm: blocks for arm in ARMS if (blocks := _blocks(run, arm))}
    deltas = [line.delta_log_amplitude for blocks in arms.values() for curve in blocks.values() for line in curve]
    if not deltas:
        return []
    room = 0.05 * (max(deltas) - min(deltas)) or 0.1
    axis: dict[str, Any] = {"xlabel": "frequency", "xticks": PI, "ylim": (min(deltas) - room, max(deltas) + room)}
    charts = []
    for arm, blocks in arms.items():
        series = [
            Series(name, [Point(p.frequency, p.delta_log_amplitude) for p in curve], curve[0].depth, "bare")
            for name, curve in blocks.items()
        ]
        keys = [LegendEntry(series[0].label, 0.0), LegendEntry(series[-1].label, 1.0)]
        title = f"{words(run).arms[arm]}: {YLABEL} by frequency"
        charts.append(series_chart(f"fourier_{arm}", title, series, size=SMALL, keys=keys, **axis))
    return charts


def depth_charts(run: Run) -> list[Chart]:
    """Return a chart of the arms by depth for each frequency of `AT` (PRS, Fig. 2)."""
    deep = {arm: blocks for arm in ARMS if len(blocks := _blocks(run, arm)) > 1}
    return [
        series_chart(
            f"fourier_depth{end}",
            f"{YLABEL} at {at}, by depth",
            [Series(words(run).arms[arm], _by_depth(blocks, frequency), arm) for arm, blocks in deep.items()],
            **BY_DEPTH,
        )
        for end, (frequency, at) in AT.items()
        if deep
    ]


def joint_fourier(runs: Sequence[Run]) -> list[Chart]:
    """Return the recast networks of several runs by depth, ordered by when they were recast (PRS, Fig. 3)."""
    curves = []
    for run in runs:
        switches = run.switching.switches if run.switching else []
        first = switches[0].epoch if switches else math.inf if run.is_scheduled else 0
        if len(blocks := _blocks(run, "recast")) > 1:
            curves.append((run, first, blocks))
    curves.sort(key=lambda entry: -entry[1])
    charts = []
    for name, (frequency, at) in AT.items() if len(curves) > 1 else ():
        series = []
        for place, (run, first, blocks) in enumerate(curves):
            when = "never recast" if math.isinf(first) else f"recast from epoch {first}" if first else "recast at once"
            color = place / (len(curves) - 1)
            series.append(Series(f"{run.name}, {when}", _by_depth(blocks, frequency), color, end=run.name))
        charts.append(series_chart(f"fourier_runs{name}", f"{YLABEL} at {at}, by depth", series, right=0.8, **BY_DEPTH))
    return charts


def _by_depth(blocks: Blocks, frequency: float) -> list[Point]:
    """Return the point of every block's curve that is nearest to a frequency."""
    nearest = [min(curve, key=lambda line: abs(line.frequency - frequency)) for curve in blocks.values()]
    return [Point(line.depth, line.delta_log_amplitude) for line in nearest]


def head_charts(run: Run) -> dict[str, list[Chart]]:
    """Return charts of the gates and spans by epoch of the heads that have them, for the first `MOST_LAYERS` layers.

    By layer; by quantity, with a chart for each layer, if there is only one.
    """
    kernels = {step.name: step.geometry.kernel for step in run.steps if not step.beside}
    layers = next((row.layers for row in reversed(run.metrics) if row.layers), {})
    values = {
        (layer, quantity): epochs
        for layer, quantity in product(layers, QUANTITIES)
        if len(epochs := _values(run, layer, quantity)) > 1 and _with_map(run, layer, quantity)
    }
    limits: dict[str, tuple[float, float]] = {}
    for quantity, (_, _, start) in QUANTITIES.items():  # one scale for all layers, so that they can be compared
        numbers = [x for (_, q), epochs in values.items() if q == quantity for heads in epochs.values() for x in heads]
        numbers = [x for x in (start, *numbers) if math.isfinite(x)] or [0.0, 1.0]
        room = 0.08 * (max(numbers) - min(numbers)) or max(0.1 * abs(max(numbers)), 0.01)
        limits[quantity] = (min(numbers) - room, max(numbers) + room)
    # layers that became attention at different epochs share an axis
    xlim = (-0.02 * run.epochs, 1.02 * run.epochs) if run.is_scheduled else None
    charts: dict[str, list[Chart]] = {}
    for (layer, quantity), epochs in values.items():
        if layer in charts or len(charts) < MOST_LAYERS:
            heads, axis = _with_map(run, layer, quantity), {"xlim": xlim, "ylim": limits[quantity]}
            chart = _head_chart(layer, quantity, epochs, heads, kernels.get(layer, ()), **axis)
            charts.setdefault(layer, []).append(chart)
    titles = {chart.title for panels in charts.values() for chart in panels}
    if len(titles) == 1:
        return {titles.pop(): [replace(chart, title=layer) for layer, (chart,) in charts.items()]}
    return charts


def _values(run: Run, name: str, quantity: str) -> dict[float, list[float]]:
    """Return epoch → a quantity of the heads of a layer, without the epochs before its switch."""
    rows = {float(row.epoch): list(map(number, row.layers.get(name, {}).get(quantity) or ())) for row in run.metrics}
    heads = max(map(len, rows.values()))
    return {epoch: values for epoch, values in rows.items() if heads and len(values) == heads}


def _with_map(run: Run, name: str, quantity: str) -> list[int]:
    """Return the heads of a layer that have the map of a quantity; all of them if that was not recorded."""
    heads = max(len(row.layers.get(name, {}).get(quantity) or ()) for row in run.metrics)
    rows = [row.layers.get(name, {}).get(MAPS[quantity]) or () for row in run.metrics]
    rows = [row for row in rows if len(row) == heads]
    return [head for head in range(heads) if not rows or any(row[head] not in (None, 0) for row in rows)]


def has_mean(chart: Chart) -> bool:
    """Return True if a chart of `head_charts` shows the mean of several heads."""
    return any(series.look == "thick" for series in chart.panel.keywords["series"])


def _head_chart(
    name: str, quantity: str, values: Mapping[float, list[float]], heads: list[int], kernel: Sequence[int], **axis: Any
) -> Chart:
    """Draw thin lines for these heads and a thick one for their mean (after T-CNN, Fig. 4 B and C)."""
    symbol, meaning, start = QUANTITIES[quantity]
    every = np.array(list(values.values()))
    lines = [list(map(Point, values, column)) for column in every.T.tolist()]
    labels = formats.head_labels(len(lines), kernel)
    series = [Series("", lines[head], "recast", "thin", labels[head]) for head in heads]
    if len(heads) > 1:
        series.append(Series("", list(map(Point, values, every[:, heads].mean(axis=1).tolist())), "ink", "thick"))
    axis |= {"size": SMALL, "right": 0.86, "xlabel": "epoch", "whole_x": True, "level": (start, "muted")}
    return series_chart(f"{quantity}_{name}", f"{symbol}, {meaning}", series, **axis)
