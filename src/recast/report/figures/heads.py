"""Gates and spans of every head over the epochs, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recast.report.figures.chart import Chart, Data
from recast.report.figures.lines import head_chart
from recast.report.figures.maps import head_labels
from recast.report.read.run import Run
from recast.report.text import formats
from recast.run.files import number

QUANTITIES = {
    "gamma": ("γ", "share of content attention", 0.0),
    "s": ("s", "spread: one-hot shift (0) to Gaussian (1)", 0.0),
    "sigma": ("σ(λ)", "share of positional attention", math.nan),
    "span": ("1/α", "attention span of the Gaussian", math.nan),
}


@dataclass(frozen=True)
class HeadPanel:
    """One quantity of one layer; `chart` is None where one epoch is no curve and the reading says it all."""

    symbol: str
    meaning: str
    reading: str
    chart: Chart | None


@dataclass(frozen=True)
class HeadLayer:
    name: str
    panels: list[HeadPanel]


def head_charts(run: Run, budget: int) -> tuple[list[HeadLayer], int]:
    """Charts of every head's gates and span, layer by layer, and how many layers were left out for their weight."""
    steps = [step for step in run.plan["steps"] if len(step.get("kernel") or ()) == 2]
    kernels = {str(step["name"]): (int(step["kernel"][0]), int(step["kernel"][1])) for step in steps}
    recorded = [row for row in run.metrics if isinstance(row.get("layers"), dict) and row["layers"]]
    names = list(recorded[-1]["layers"]) if recorded else []
    series = {name: _series(recorded, name) for name in names}
    limits: dict[str, tuple[float, float]] = {}
    for quantity in QUANTITIES:  # one scale for all layers, so that they can be compared
        found = [layer[quantity][1].ravel() for layer in series.values() if quantity in layer]
        limits[quantity] = _limits(np.concatenate(found), quantity) if found else (0.0, 1.0)
    layers: list[HeadLayer] = []
    # layers that became attention at different times share an axis too
    room = 0.02 * run.epochs
    xlim = (-room, run.epochs + room) if run.is_scheduled and run.epochs else None
    spent = 0
    for name in names:
        panels = []
        for quantity, (epochs, values) in series[name].items():
            labels = head_labels(values.shape[1], kernels.get(name))
            symbol, meaning, baseline = QUANTITIES[quantity]
            reading = _reading(values[-1], labels)
            chart = None
            if len(epochs) > 1:
                chart = Chart(
                    f"{quantity}_{name}",
                    f"{symbol}, {meaning}: {name}",
                    f"{name}: {symbol} of {values.shape[1]} heads by epoch, {meaning}. At the end: {reading}.",
                    head_chart(epochs, values, labels, ylim=limits[quantity], xlim=xlim, baseline=baseline),
                    _data(name, quantity, epochs, values, labels),
                )
            panels.append(HeadPanel(symbol, meaning, reading, chart))
        spent += sum(len(panel.chart.svg) for panel in panels if panel.chart)
        if layers and spent > budget:
            break
        layers.append(HeadLayer(name, panels))
    return layers, len(names) - len(layers)


def _data(name: str, quantity: str, epochs: Sequence[float], values: np.ndarray, labels: Sequence[str]) -> Data:
    rows = [
        (name, label, epoch, float(values[row, column]))
        for row, epoch in enumerate(epochs)
        for column, label in enumerate(labels)
    ]
    return Data(("layer", "head", "epoch", quantity), list(rows))


def _series(recorded: Sequence[dict[str, Any]], name: str) -> dict[str, tuple[list[float], np.ndarray]]:
    """quantity → (epochs, (epochs, heads)) of one layer; epochs before its switch are absent."""
    rows = [(number(row["epoch"]), row["layers"][name]) for row in recorded if name in row["layers"]]
    found: dict[str, tuple[list[float], np.ndarray]] = {}
    for quantity in QUANTITIES:
        heads = len(rows[-1][1].get(quantity) or ())
        kept = [(epoch, layer[quantity]) for epoch, layer in rows if heads and len(layer.get(quantity) or ()) == heads]
        if kept:
            found[quantity] = (
                [epoch for epoch, _ in kept],
                np.array([[number(value) for value in values] for _, values in kept]),
            )
    return found


def _limits(values: np.ndarray, quantity: str) -> tuple[float, float]:
    known = values[np.isfinite(values)]
    if not known.size:
        return (0.0, 1.0)
    low, high = float(known.min()), float(known.max())
    if quantity in {"gamma", "s"}:
        low, high = min(low, 0.0), max(high, 0.0)
    room = 0.08 * (high - low) or max(0.1 * abs(high), 0.01)
    return (low - room, high + room)


def _reading(last: np.ndarray, labels: Sequence[str]) -> str:
    known = np.flatnonzero(np.isfinite(last))
    if not known.size:
        return "not finite"
    low, high = known[np.argmin(last[known])], known[np.argmax(last[known])]
    mean = formats.decimal(float(last[known].mean()), 3)
    if low == high or last[low] == last[high]:
        return f"mean {mean}"
    return (
        f"mean {mean}, from {formats.decimal(float(last[low]), 3)} (head {labels[low]}) "
        f"to {formats.decimal(float(last[high]), 3)} (head {labels[high]})"
    )
