"""Line charts: the arms over epochs or strengths, and the gates of every head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recast.report.svg import ARM_COLORS, INK, MUTED, inline_svg, new_figure, page_style

ARM_MARKERS = {"parent": "D", "finetuned": "s", "recast": "o"}
POINTS = 200
"""Longer curves of an arm are thinned to this many points."""
HEAD_POINTS = 80
"""The same for the curves of heads, of which there are many."""
ALL_LABELLED = 12
"""With more heads than this only the three highest and the three lowest are labelled."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    x: Sequence[float]
    y: Sequence[float]
    arm: str
    dotted: bool = False


def line_chart(
    curves: Sequence[Curve],
    description: str,
    *,
    xlabel: str,
    reference: float = math.nan,
    whole_x: bool = False,
    ylim: tuple[float, float] | None = None,
    xticks: Sequence[float] | None = None,
    switches: Sequence[float] = (),
    size: tuple[float, float] = (4.0, 2.4),
) -> Markup:
    """Curves of the arms; `reference` is a dashed horizontal line in the parent's grey; inches for `size`.

    At each x of `switches` stands a light vertical line.
    """
    with page_style():
        figure, axes = _axes(size, right=0.97)
        mark_switches(axes, switches)
        if math.isfinite(reference):
            axes.axhline(reference, color=ARM_COLORS["parent"], linewidth=1.4, dashes=(4, 3))
        for curve in curves:
            x, y = thin(curve.x, curve.y)
            axes.plot(
                x,
                y,
                color=ARM_COLORS[curve.arm],
                linewidth=1.3 if curve.dotted else 2.0,
                linestyle=(0, (1, 1.6)) if curve.dotted else "-",
                marker=ARM_MARKERS[curve.arm] if len(x) <= 30 and not curve.dotted else None,
                markersize=4.2,
                zorder=3 if curve.arm == "recast" else 2.5,
            )
        if ylim is not None:
            axes.set_ylim(*ylim)
        _finish(axes, xlabel, whole_x)
        if xticks is not None and len(xticks) <= 8:
            axes.set_xticks(xticks, [f"{tick:g}" for tick in xticks])
        return inline_svg(figure, description)


def head_chart(
    epochs: Sequence[float],
    heads: np.ndarray,
    labels: Sequence[str],
    description: str,
    *,
    ylim: tuple[float, float],
    xlim: tuple[float, float] | None = None,
    baseline: float = math.nan,
    size: tuple[float, float] = (3.5, 2.5),
) -> Markup:
    """Thin lines for the heads, (epochs, heads), a thick one for their mean (after T-CNN, Fig. 4 B and C).

    The heads' labels stand at the end of their lines, moved apart where they would overlap. `xlim` gives layers that
    became attention at different times one axis.
    """
    with page_style():
        figure, axes = _axes(size, right=0.86)
        if math.isfinite(baseline):
            axes.axhline(baseline, color=MUTED, linewidth=0.9, dashes=(2, 2))
        for index in range(heads.shape[1]):
            x, y = thin(epochs, heads[:, index], HEAD_POINTS)
            axes.plot(x, y, color=ARM_COLORS["recast"], linewidth=0.9, alpha=0.75)
        x, y = thin(epochs, heads.mean(axis=1), HEAD_POINTS)
        axes.plot(x, y, color=INK, linewidth=2.6, zorder=3)
        axes.set_ylim(*ylim)
        if xlim is not None:
            axes.set_xlim(*xlim)
        axes.margins(x=0.02)
        _finish(axes, "epoch", whole_x=True)
        _label_ends(axes, heads[-1], labels, height=size[1] * 72 * axes.get_position().height)
        return inline_svg(figure, description)


def mark_switches(axes: Axes, switches: Sequence[float]) -> None:
    """A light vertical line at each of `switches`, where layers became attention."""
    for edge in switches:
        axes.axvline(edge, color=MUTED, linewidth=0.7, alpha=0.55, dashes=(2, 2), zorder=1)


def _label_ends(axes: Axes, last: np.ndarray, labels: Sequence[str], height: float) -> None:
    low, high = axes.get_ylim()
    order = [int(index) for index in np.argsort(last) if math.isfinite(last[index])]
    if len(order) > ALL_LABELLED:
        order = order[:3] + order[-3:]
    size, gap = 7.2, 8.6 / height
    true = [(float(last[index]) - low) / (high - low) for index in order]
    for index, end, position in zip(order, true, _spread(true, gap), strict=True):
        axes.plot(
            [1.005, 1.045],
            [end, position],
            transform=axes.transAxes,
            color=ARM_COLORS["recast"],
            linewidth=0.6,
            alpha=0.75,
            clip_on=False,
        )
        place: dict[str, Any] = {"transform": axes.transAxes, "va": "center_baseline"}
        axes.text(1.06, position, labels[index], fontsize=size, color=MUTED, **place)


def _spread(positions: Sequence[float], gap: float) -> list[float]:
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


def _axes(size: tuple[float, float], right: float) -> tuple[Figure, Axes]:
    figure = new_figure(size)
    # Fixed margins: a layout engine costs more time than the whole drawing.
    left, bottom = 36 / (72 * size[0]), 34 / (72 * size[1])
    axes = figure.add_axes((left, bottom, right - left, 0.96 - bottom))
    axes.patch.set_visible(False)
    return figure, axes


def _finish(axes: Axes, xlabel: str, whole_x: bool) -> None:
    axes.set_xlabel(xlabel)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=whole_x))
    axes.yaxis.set_major_locator(MaxNLocator(5))


def thin(x: Sequence[float], y: Sequence[float] | np.ndarray, points: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    across, up = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if len(across) > points:
        keep = np.unique(np.linspace(0, len(across) - 1, points).round().astype(int))
        return across[keep], up[keep]
    return across, up
