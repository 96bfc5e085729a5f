"""Line charts: arms over epochs, strengths or sizes, and the gates of every head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from recast.report.figures.chart import Data, Draw, DrawAxes, Drawing, alone
from recast.report.figures.style import Hit, Palette, new_axes, new_figure
from recast.report.text import formats

ARM_MARKERS = {"parent": "D", "finetuned": "s", "recast": "o"}
POINTS = 200
"""Longer curves of an arm are thinned to this many points."""
HEAD_POINTS = 80
"""The same for the curves of heads, of which there are many."""
ALL_LABELLED = 12
"""With more heads than this only the three highest and the three lowest are labelled."""
MOST_TICKS = 8
"""With more than this a chart chooses its own."""
MOST_MARKED = 30
"""Longer curves have neither markers nor values to point at."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    x: Sequence[float]
    y: Sequence[float]
    arm: str
    dotted: bool = False
    low: Sequence[float | None] = ()
    """Intervals of `y`, drawn as whiskers; () or None where there are none."""
    high: Sequence[float | None] = ()
    label: str = ""
    """The arm's name, and what else tells the line from others."""
    xnames: Sequence[str] = ()
    """What the places on `x` are called, where a number does not say it."""

    def interval(self, place: int) -> tuple[float, float] | None:
        low = self.low[place] if self.low else None
        high = self.high[place] if self.high else None
        return None if low is None or high is None else (low, high)


def curve_data(curves: Sequence[Curve], x: str, y: str) -> Data:
    """The points of arms as a tidy table."""
    rows: list[tuple[str | float | int | None, ...]] = []
    for curve in curves:
        for place, (across, up) in enumerate(zip(curve.x, curve.y, strict=True)):
            low, high = curve.interval(place) or (None, None)
            rows.append((curve.arm, curve.label, across, up, low, high))
    return Data(("arm", "label", x, y, "low", "high"), rows)


def line_panel(
    curves: Sequence[Curve],
    *,
    xlabel: str,
    reference: float = math.nan,
    whole_x: bool = False,
    ylim: tuple[float, float] | None = None,
    xticks: Sequence[float] | None = None,
    xnames: Sequence[str] | None = None,
    switches: Sequence[float] = (),
    unit: str = "",
) -> DrawAxes:
    """Curves of the arms; `reference` is a dashed horizontal line in the parent's grey.

    At each x of `switches` stands a light vertical line. `unit` follows the values that a reader points at.
    """

    def draw(axes: Axes, palette: Palette) -> list[Hit]:
        hits: list[Hit] = []
        mark_switches(axes, switches, palette)
        if math.isfinite(reference):
            axes.axhline(reference, color=palette.arms["parent"], linewidth=1.4, dashes=(4, 3))
        for curve in curves:
            hits += draw_curve(axes, curve, palette, xlabel, unit)
        if ylim is not None:
            axes.set_ylim(*ylim)
        axes.set_xlabel(xlabel)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=whole_x))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        if xticks is not None and len(xticks) <= MOST_TICKS:
            axes.set_xticks(xticks, xnames or [f"{tick:g}" for tick in xticks])
        return hits

    return draw


def line_chart(curves: Sequence[Curve], *, size: tuple[float, float] = (4.0, 2.4), **settings: Any) -> Draw:
    """`line_panel` as a figure of `size` inches."""
    return alone(line_panel(curves, **settings), size)


def draw_curve(axes: Axes, curve: Curve, palette: Palette, xlabel: str, unit: str) -> list[Hit]:
    """One arm with its whiskers; the values that can be pointed at."""
    x, y = thin(curve.x, curve.y)
    marked = len(curve.x) <= MOST_MARKED and not curve.dotted
    color = palette.arms[curve.arm]
    order = 3 if curve.arm == "recast" else 2.5
    axes.plot(
        x,
        y,
        color=color,
        linewidth=1.3 if curve.dotted else 2.0,
        linestyle=(0, (1, 1.6)) if curve.dotted else "-",
        marker=ARM_MARKERS[curve.arm] if marked else None,
        markersize=4.2,
        zorder=order,
    )
    hits = []
    for place in range(len(curve.x) if marked else 0):
        across, up, interval = curve.x[place], curve.y[place], curve.interval(place)
        if not math.isfinite(up):
            continue
        if interval is not None:
            axes.vlines(across, *interval, color=color, linewidth=1.2, alpha=0.7, zorder=order - 0.2)
        where = curve.xnames[place] if curve.xnames else f"{xlabel} {across:g}"
        text = f"{curve.label or curve.arm}, {where}: {formats.significant(up, 4)}{unit}"
        if interval is not None:
            text += f" ({formats.interval(*interval)})"
        hits.append(Hit(axes, float(across), float(up), text))
    return hits


def head_chart(
    epochs: Sequence[float],
    heads: np.ndarray,
    labels: Sequence[str],
    *,
    ylim: tuple[float, float],
    xlim: tuple[float, float] | None = None,
    baseline: float = math.nan,
    size: tuple[float, float] = (3.5, 2.5),
) -> Draw:
    """Thin lines for the heads, (epochs, heads), a thick one for their mean (after T-CNN, Fig. 4 B and C).

    The heads' labels stand at the end of their lines, moved apart where they would overlap. `xlim` gives layers that
    became attention at different times one axis.
    """

    def draw(palette: Palette) -> Drawing:
        figure = new_figure(size)
        axes = new_axes(figure, right=0.86)
        if math.isfinite(baseline):
            axes.axhline(baseline, color=palette.muted, linewidth=0.9, dashes=(2, 2))
        for index in range(heads.shape[1]):
            x, y = thin(epochs, heads[:, index], HEAD_POINTS)
            axes.plot(x, y, color=palette.arms["recast"], linewidth=0.9, alpha=0.75)
        x, y = thin(epochs, heads.mean(axis=1), HEAD_POINTS)
        axes.plot(x, y, color=palette.ink, linewidth=2.6, zorder=3)
        axes.set_ylim(*ylim)
        if xlim is not None:
            axes.set_xlim(*xlim)
        axes.margins(x=0.02)
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        height = size[1] * 72 * axes.get_position().height
        label_ends(axes, heads[-1], labels, height, [palette.arms["recast"]] * len(labels), palette)
        return Drawing(figure)

    return draw


def mark_switches(axes: Axes, switches: Sequence[float], palette: Palette) -> None:
    """A light vertical line at each of `switches`, where layers became attention."""
    for edge in switches:
        axes.axvline(edge, color=palette.muted, linewidth=0.7, alpha=0.55, dashes=(2, 2), zorder=1)


def label_ends(
    axes: Axes, last: np.ndarray, labels: Sequence[str], height: float, colors: Sequence[str], palette: Palette
) -> None:
    """A label right of the end of each line, `height` points of the axes; the outermost six where there are many."""
    low, high = axes.get_ylim()
    order = [int(index) for index in np.argsort(last) if math.isfinite(last[index])]
    if len(order) > ALL_LABELLED:
        order = order[:3] + order[-3:]
    size, gap = 7.2, 8.6 / height
    true = [(float(last[index]) - low) / (high - low) for index in order]
    for index, end, position in zip(order, true, spread(true, gap), strict=True):
        axes.plot(
            [1.005, 1.045],
            [end, position],
            transform=axes.transAxes,
            color=colors[index],
            linewidth=0.6,
            alpha=0.75,
            clip_on=False,
        )
        place: dict[str, Any] = {"transform": axes.transAxes, "va": "center_baseline"}
        axes.text(1.06, position, labels[index], fontsize=size, color=palette.muted, **place)


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Ascending positions, moved as little as can be (least squares) so that neighbours are `gap` apart, within 0..1.

    Less `gap` per place, that is isotonic regression: neighbours in the wrong order are pooled and take their mean.
    """
    pools: list[tuple[float, int]] = []
    for place, position in enumerate(positions):
        mean, size = position - place * gap, 1
        while pools and pools[-1][0] > mean:
            other, members = pools.pop()
            mean, size = (mean * size + other * members) / (size + members), size + members
        pools.append((mean, size))
    low, high = 0.0, 1.0 - gap * (len(positions) - 1)
    flat = [min(max(mean, low), max(high, low)) for mean, size in pools for _ in range(size)]
    return [position + place * gap for place, position in enumerate(flat)]


def thin(x: Sequence[float], y: Sequence[float] | np.ndarray, points: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    across, up = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if len(across) > points:
        keep = np.unique(np.linspace(0, len(across) - 1, points).round().astype(int))
        return across[keep], up[keep]
    return across, up
