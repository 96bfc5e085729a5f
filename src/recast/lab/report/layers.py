"""Charts of the layers of a network: frequencies, attention distances, similarity, and gates of every head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from recast.analysis.records import FourierLine, HeadLine
from recast.files import number
from recast.lab.records import ARMS
from recast.lab.report import formats
from recast.lab.report.charts import Chart, Key, lines_table
from recast.lab.report.draw import Point, Series, draw_heat_map, layer_ticks, series_chart
from recast.lab.report.labels import words
from recast.lab.report.load import Run
from recast.lab.report.maps import head_labels
from recast.lab.report.tables import last_heads

SMALL = (3.5, 2.5)
YLABEL = "Δ log amplitude"
AT = {"_third_pi": (1 / 3, "π/3"), "_two_thirds_pi": (2 / 3, "2π/3"), "": (1.0, "π")}
"""End of a chart's name → the frequency that it shows by depth, in units of π, and its name (PRS, Figs. 2 and 3)."""
BY_DEPTH: dict[str, Any] = {"xlabel": "depth (0: before the first block, 1: the last)", "size": SMALL}
PI = {0.0: "0", 0.25: "π/4", 0.5: "π/2", 0.75: "3π/4", 1.0: "π"}
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
    names = words(run).arms
    room = 0.05 * (max(deltas) - min(deltas)) or 0.1
    axis: dict[str, Any] = {"xlabel": "frequency", "xticks": PI, "ylim": (min(deltas) - room, max(deltas) + room)}
    charts = []
    for arm, blocks in arms.items():
        series = [
            Series(name, [Point(p.frequency, p.delta_log_amplitude) for p in curve], curve[0].depth, "bare")
            for name, curve in blocks.items()
        ]
        table = lines_table([line for curve in blocks.values() for line in curve])
        keys = [Key(series[0].label, 0.0), Key(series[-1].label, 1.0)]
        title = f"{names[arm]}: {YLABEL} by frequency"
        charts.append(series_chart(f"fourier_{arm}", title, series, table, size=SMALL, keys=keys, **axis))
    return charts


def depth_charts(run: Run) -> list[Chart]:
    """Return a chart of the arms by depth for each frequency of `AT` (PRS, Fig. 2)."""
    deep = {arm: blocks for arm in ARMS if len(blocks := _blocks(run, arm)) > 1}
    charts = []
    for end, (frequency, at) in AT.items() if deep else ():
        table = lines_table([line for blocks in deep.values() for line in _lines(blocks, frequency)])
        series = [_by_depth(words(run).arms[arm], blocks, frequency, arm) for arm, blocks in deep.items()]
        charts.append(series_chart(f"fourier_depth{end}", f"{YLABEL} at {at}, by depth", series, table, **BY_DEPTH))
    return charts


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
        series, rows = [], list[tuple[Any, ...]]()
        for place, (run, first, blocks) in enumerate(curves):
            when = "before training" if first == 0 else "never" if math.isinf(first) else f"from epoch {first}"
            label = f"{run.name}, {when if when == 'never' else f'recast {when}'}"
            series.append(_by_depth(label, blocks, frequency, place / (len(curves) - 1), run.name))
            rows += [(run.name, when, *astuple(line)) for line in _lines(blocks, frequency)]
        columns = ("run", "when_recast", *(column.name for column in fields(FourierLine)))
        title = f"{YLABEL} at {at}, by depth"
        charts.append(series_chart(f"fourier_runs{name}", title, series, (columns, rows), right=0.8, **BY_DEPTH))
    return charts


def _lines(blocks: Blocks, frequency: float) -> list[FourierLine]:
    """Return the point of every block's curve that is nearest to a frequency."""
    return [min(curve, key=lambda line: abs(line.frequency - frequency)) for curve in blocks.values()]


def _by_depth(label: str, blocks: Blocks, frequency: float, role: str | float, end: str = "") -> Series:
    points = [Point(line.depth, line.delta_log_amplitude, place=line.block) for line in _lines(blocks, frequency)]
    return Series(label, points, role, end=end)


def distance_charts(run: Run) -> list[Chart]:
    """Return the mean attention distance of every head by depth, and by epoch if saved checkpoints were measured."""
    layers = last_heads(run)
    if not layers:
        return []
    dots: dict[bool, list[Point]] = {False: [], True: []}
    means = []
    for place, (name, heads) in enumerate(layers.items()):
        means.append(Point(place, _mean(heads), place=name))
        for head in heads:
            dots[head.is_convolution].append(Point(place, number(head.distance), place=f"{name}, head {head.head}"))
    series = [
        Series("Mean", means, "ink", "thick"),
        Series("Attention", dots[False], look="points"),
        Series("Still its convolution", dots[True], look="rings"),
    ]
    highest = max((dot.y for points in dots.values() for dot in points if math.isfinite(dot.y)), default=0.0)
    by_depth = series_chart(
        "distance_depth", "Mean attention distance, pixels, by layer, input at the left", series,
        lines_table([head for heads in layers.values() for head in heads]),
        note="Rings are heads that still equal their convolution; the dark line is the mean of each layer.",
        unit=" pixels", keys=[Key("a head", "recast")], xticks=layer_ticks(list(layers)),
        xlim=(-0.5, len(layers) - 0.5), ylim=(0, 1.08 * highest or 1),
    )  # fmt: skip
    return [by_depth, *_distance_by_epoch(run)]


def _mean(heads: Sequence[HeadLine]) -> float:
    distances = [head.distance for head in heads if head.distance is not None]
    return sum(distances) / len(distances) if distances else math.nan


def _distance_by_epoch(run: Run) -> list[Chart]:
    heads = [head for head in run.heads if head.model == "recast"]
    by_layer: dict[str, dict[int, list[HeadLine]]] = {}
    for head in heads:
        epoch = run.epochs if head.epoch is None else head.epoch
        by_layer.setdefault(head.layer, {}).setdefault(epoch, []).append(head)
    if len({epoch for epochs in by_layer.values() for epoch in epochs}) < 2:
        return []
    series = [
        Series(layer, [Point(epoch, _mean(epochs[epoch])) for epoch in sorted(epochs)], i / max(len(by_layer) - 1, 1))
        for i, (layer, epochs) in enumerate(by_layer.items())
    ]
    return [
        series_chart(
            "distance_epochs", "Mean attention distance, pixels, by epoch", series, lines_table(heads),
            keys=None if len(series) <= 6 else (), xlabel="epoch", whole_x=True, unit=" pixels",
        )
    ]  # fmt: skip


def similarity_charts(run: Run) -> list[Chart]:
    """Return the linear CKA of the layers of two arms: a heat map for each pair of arms."""
    pairs = list(dict.fromkeys((line.model_a, line.model_b) for line in run.cka))
    pairs.sort(key=lambda pair: (pair[0] == pair[1], "recast" not in pair))  # pairs with the recast arm first
    charts = []
    for first, second in pairs:
        lines = [line for line in run.cka if (line.model_a, line.model_b) == (first, second)]
        a, b = (words(run).arms.get(arm, arm) for arm in (first, second))
        columns = list(dict.fromkeys(line.layer_a for line in lines))
        rows = list(dict.fromkeys(line.layer_b for line in lines))
        values = np.full((len(rows), len(columns)), np.nan)
        for line in lines:
            values[rows.index(line.layer_b), columns.index(line.layer_a)] = number(line.cka)
        same = {line.layer_a: line.cka for line in lines if line.layer_a == line.layer_b and line.cka is not None}
        note = ""
        if same and first != second:
            least = min(same, key=same.__getitem__)
            note = f"The same layer in both networks: at least {formats.decimal(same[least], 2)} ({least})."
        title = f"CKA: {a} (across) and {b if first != second else 'itself'} (up)"
        story = f"Similarity of {len(columns)} layers of {a} and {len(rows)} layers of {b}. {note}".strip()
        panel = partial(draw_heat_map, values=values, columns=columns, rows=rows, a=a, b=b)
        charts.append(Chart(f"cka_{first}_{second}", title, story, *lines_table(lines), panel, (4.0, 3.6), note=note))
    return charts


QUANTITIES = {
    "gamma": ("γ", "gate of the content map", 0.0),
    "s": ("s", "spread: one-hot shift (0) to Gaussian (1)", 0.0),
    "sigma": ("σ(λ)", "share of the positional map", math.nan),
    "span": ("1/α", "attention span of the Gaussian", math.nan),
}
"""Name in metrics.jsonl → symbol, meaning, and the value of a head that equals its convolution."""


class HeadPanel(NamedTuple):
    """A quantity of a layer; `chart` is None if there is only one epoch."""

    symbol: str
    meaning: str
    reading: str
    chart: Chart | None


def head_charts(run: Run, budget: int) -> tuple[dict[str, list[HeadPanel]], int]:
    """Return charts of the gates and spans of every head by layer, and the number of layers beyond `budget` bytes."""
    kernels = {step.name: step.kernel for step in run.plan.steps}
    recorded = [row for row in run.metrics if row.layers]
    values = {
        (name, quantity): epochs
        for name in (recorded[-1].layers if recorded else ())
        for quantity in QUANTITIES
        if (epochs := _values(run, name, quantity))
    }
    limits: dict[str, tuple[float, float]] = {}
    for quantity, (_, _, start) in QUANTITIES.items():  # one scale for all layers, so that they can be compared
        numbers = [x for (_, q), epochs in values.items() if q == quantity for heads in epochs.values() for x in heads]
        numbers = [x for x in (start, *numbers) if math.isfinite(x)] or [0.0, 1.0]
        room = 0.08 * (max(numbers) - min(numbers)) or max(0.1 * abs(max(numbers)), 0.01)
        limits[quantity] = (min(numbers) - room, max(numbers) + room)
    # layers that became attention at different epochs share an axis
    xlim = (-0.02 * run.epochs, 1.02 * run.epochs) if run.is_scheduled and run.epochs else None
    layers: dict[str, list[HeadPanel]] = {}
    spent, names = 0, dict.fromkeys(name for name, _ in values)
    for name in names:
        panels = [
            _head_panel(name, quantity, values[name, quantity], kernels.get(name, ()), limits[quantity], xlim)
            for quantity in QUANTITIES
            if (name, quantity) in values
        ]
        spent += sum(len(panel.chart.svg) for panel in panels if panel.chart)
        if layers and spent > budget:
            break
        layers[name] = panels
    return layers, len(names) - len(layers)


def _values(run: Run, name: str, quantity: str) -> dict[float, list[float]]:
    """Return epoch → a quantity of the heads of a layer, without the epochs before its switch."""
    rows = {float(row.epoch): list(map(number, row.layers.get(name, {}).get(quantity) or ())) for row in run.metrics}
    heads = max(map(len, rows.values()))
    return {epoch: values for epoch, values in rows.items() if heads and len(values) == heads}


def _head_panel(
    name: str, quantity: str, values: dict[float, list[float]], kernel: Sequence[int], ylim: tuple[float, float],
    xlim: tuple[float, float] | None,
) -> HeadPanel:  # fmt: skip
    """Draw thin lines for the heads and a thick one for their mean (after T-CNN, Fig. 4 B and C)."""
    symbol, meaning, start = QUANTITIES[quantity]
    epochs, heads = list(values), np.array(list(values.values()))
    labels = head_labels(heads.shape[1], kernel)
    reading = _reading(heads[-1], labels)
    if len(epochs) < 2:
        return HeadPanel(symbol, meaning, reading, None)
    lines = [list(map(Point, epochs, column)) for column in (*heads.T.tolist(), heads.mean(axis=1).tolist())]
    series = [Series("", line, "recast", "thin", label) for line, label in zip(lines, labels, strict=False)]
    rows = [(name, label, epoch, value) for epoch in epochs for label, value in zip(labels, values[epoch], strict=True)]
    subject = f"{name}: {symbol} of {len(labels)} heads by epoch, {meaning}. At the end: {reading}"
    chart = series_chart(
        f"{quantity}_{name}", f"{symbol}, {meaning}: {name}", [*series, Series("", lines[-1], "ink", "thick")],
        (("layer", "head", "epoch", quantity), rows), subject=subject, size=SMALL, right=0.86, xlabel="epoch",
        whole_x=True, ylim=ylim, xlim=xlim, level=(start, "muted"),
    )  # fmt: skip
    return HeadPanel(symbol, meaning, reading, chart)


def _reading(last: np.ndarray, labels: Sequence[str]) -> str:
    finite = np.flatnonzero(np.isfinite(last))
    if not finite.size:
        return "not finite"
    low, high = finite[np.argmin(last[finite])], finite[np.argmax(last[finite])]
    mean = f"mean {formats.decimal(float(last[finite].mean()), 3)}"
    ends = [f"{formats.decimal(float(last[place]), 3)} (head {labels[place]})" for place in (low, high)]
    return mean if last[low] == last[high] else f"{mean}, from {ends[0]} to {ends[1]}"
