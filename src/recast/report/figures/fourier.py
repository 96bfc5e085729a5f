"""Fourier curves of the blocks: log amplitude against frequency, and the highest frequency against depth (PRS)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from recast.report.figures.arms import arm_keys
from recast.report.figures.chart import Chart, Data, Draw, Drawing, Key
from recast.report.figures.lines import ARM_MARKERS, label_ends
from recast.report.figures.style import Hit, Palette, new_axes, new_figure
from recast.report.read.analysis import FourierPoint
from recast.report.read.run import ARMS, Run
from recast.report.text import formats
from recast.report.text.words import joint_words, words

YLABEL = "Δ log amplitude"


def fourier_mode(run: Run) -> str:
    """The mode that is drawn: true frequencies where they were measured."""
    modes = {point.mode for point in run.analysis.fourier}
    return "true" if "true" in modes or not modes else min(modes)


def fourier_note(run: Run) -> str:
    """On how many images, and how frequencies were taken; empty where nothing was measured."""
    points = _points(run)
    if not points:
        return ""
    if fourier_mode(run) == "true":
        how = "True frequencies: π is the fastest change that a map of its size can hold."
    else:
        how = "Frequencies as how-do-vits-work’s notebook labels them: for maps of even size, its π is less than π."
    return f"{how} Means over {max(point.n for point in points):,} images and all channels, after the logarithm."


def fourier_charts(run: Run) -> list[Chart]:
    """A chart of curves per arm, on one scale (PRS, Fig. 2 left), then the arms by depth (right)."""
    points = _points(run)
    if not points:
        return []
    names = words(run).arms
    deltas = [point.delta for point in points if math.isfinite(point.delta)]
    room = 0.05 * (max(deltas, default=0) - min(deltas, default=-1)) or 0.1
    limits = (min(deltas, default=-1) - room, max(deltas, default=0) + room)
    charts = []
    for arm in ARMS:
        blocks = _blocks([point for point in points if point.model == arm])
        if not blocks:
            continue
        ends = {name: curve[-1] for name, curve in blocks.items()}
        told = "; ".join(f"{name} {formats.decimal(end.delta, 2)}" for name, end in _outer(ends))
        charts.append(
            Chart(
                f"fourier_{arm}",
                f"{names[arm]}: {YLABEL} by frequency",
                f"{names[arm]}: {YLABEL} of {len(blocks)} blocks by frequency. At the highest: {told}.",
                _curves(blocks, limits),
                _data(blocks),
                [Key(next(iter(blocks)), depth=0.0), Key(list(blocks)[-1], depth=1.0)],
            )
        )
    by_depth = {arm: _highest([point for point in points if point.model == arm]) for arm in ARMS}
    by_depth = {arm: found for arm, found in by_depth.items() if len(found) > 1}
    if by_depth:
        charts.append(_depth_chart(run, by_depth))
    return charts


def joint_fourier(runs: Sequence[Run]) -> Chart | None:
    """The recast networks of several runs by depth, in order of how early they were recast (PRS, Fig. 3)."""
    found = [(run, _highest([point for point in _points(run) if point.model == "recast"])) for run in runs]
    found = [(run, blocks) for run, blocks in found if len(blocks) > 1]
    if len(found) < 2:
        return None
    found.sort(key=lambda pair: -_first_switch(pair[0]))
    rows = [(run.name, _when(run), p.block, p.index, p.depth, p.delta, p.n) for run, blocks in found for p in blocks]
    told = "; ".join(f"{run.name} ({_when(run)}) ends at {formats.decimal(p[-1].delta, 2)}" for run, p in found)
    series = {run.name: blocks for run, blocks in found}
    which = joint_words(runs).arms["recast"].lower()
    last = len(found) - 1
    return Chart(
        "fourier_runs",
        f"{YLABEL} at the highest frequency, by depth",
        f"{YLABEL} at the highest frequency by depth of the {which} networks: {told}.",
        _runs(series),
        Data(("run", "recast", "block", "index", "depth", "delta_log_amplitude", "n"), list(rows)),
        [Key(f"{run.name}, {_when(run)}", depth=place / last) for place, (run, _) in enumerate(found)],
    )


def _first_switch(run: Run) -> float:
    switches = run.schedule.switches if run.schedule else []
    return float(switches[0].epoch) if switches else math.inf if run.is_scheduled else 0.0


def _when(run: Run) -> str:
    first = _first_switch(run)
    return "before training" if first == 0 else "never" if math.isinf(first) else f"from epoch {first:.0f}"


def _points(run: Run) -> list[FourierPoint]:
    mode = fourier_mode(run)
    return [point for point in run.analysis.fourier if point.mode == mode and math.isfinite(point.delta)]


def _blocks(points: Sequence[FourierPoint]) -> dict[str, list[FourierPoint]]:
    """Block → its curve, in the network's order."""
    blocks: dict[str, list[FourierPoint]] = {}
    for point in sorted(points, key=lambda point: (point.index, point.frequency)):
        blocks.setdefault(point.block, []).append(point)
    return blocks


def _highest(points: Sequence[FourierPoint]) -> list[FourierPoint]:
    """Of every block the point of the highest frequency."""
    return [curve[-1] for curve in _blocks(points).values()]


def _outer(ends: Mapping[str, FourierPoint]) -> list[tuple[str, FourierPoint]]:
    pairs = list(ends.items())
    return pairs if len(pairs) <= 2 else [pairs[0], pairs[-1]]


def _data(blocks: Mapping[str, Sequence[FourierPoint]]) -> Data:
    columns = ("arm", "block", "index", "depth", "frequency_pi", "delta_log_amplitude", "mode", "n")
    points = [point for curve in blocks.values() for point in curve]
    return Data(columns, [(p.model, p.block, p.index, p.depth, p.frequency, p.delta, p.mode, p.n) for p in points])


def _curves(blocks: Mapping[str, Sequence[FourierPoint]], limits: tuple[float, float]) -> Draw:
    def draw(palette: Palette) -> Drawing:
        figure = new_figure((3.5, 2.5))
        axes = new_axes(figure)
        hits = []
        for name, curve in blocks.items():
            x, y = [point.frequency for point in curve], [point.delta for point in curve]
            axes.plot(x, y, color=palette.depth(curve[0].depth), linewidth=1.5)
            hits.append(Hit(axes, x[-1], y[-1], f"{name}: {formats.decimal(y[-1], 2)} at {x[-1]:g}π"))
        axes.set_ylim(*limits)
        axes.set_xlabel("frequency")
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "π/4", "π/2", "3π/4", "π"])
        axes.yaxis.set_major_locator(MaxNLocator(5))
        return Drawing(figure, hits)

    return draw


def _depth_chart(run: Run, by_depth: Mapping[str, Sequence[FourierPoint]]) -> Chart:
    names = words(run).arms
    told = "; ".join(
        f"{names[arm]} from {formats.decimal(p[0].delta, 2)} to {formats.decimal(p[-1].delta, 2)}"
        for arm, p in by_depth.items()
    )

    def draw(palette: Palette) -> Drawing:
        figure = new_figure((3.5, 2.5))
        axes = new_axes(figure)
        hits: list[Hit] = []
        for arm, points in by_depth.items():
            x, y = [point.depth for point in points], [point.delta for point in points]
            marker = ARM_MARKERS[arm] if len(points) <= 40 else None
            axes.plot(x, y, color=palette.arms[arm], linewidth=1.8, marker=marker, markersize=3.8)
            hits += _depth_hits(axes, names[arm], points)
        axes.set_xlabel("depth (0: first block, 1: last)")
        axes.yaxis.set_major_locator(MaxNLocator(5))
        return Drawing(figure, hits)

    rows = [(p.model, p.block, p.index, p.depth, p.delta, p.n) for points in by_depth.values() for p in points]
    return Chart(
        "fourier_depth",
        f"{YLABEL} at the highest frequency, by depth",
        f"{YLABEL} at the highest frequency by depth: {told}.",
        draw,
        Data(("arm", "block", "index", "depth", "delta_log_amplitude", "n"), list(rows)),
        arm_keys(run, list(by_depth)),
    )


def _depth_hits(axes: Axes, name: str, points: Sequence[FourierPoint]) -> list[Hit]:
    return [Hit(axes, p.depth, p.delta, f"{name}, {p.block}: {formats.decimal(p.delta, 2)}") for p in points]


def _runs(series: Mapping[str, Sequence[FourierPoint]]) -> Draw:
    def draw(palette: Palette) -> Drawing:
        figure = new_figure((4.0, 2.6))
        axes = new_axes(figure, right=0.8)
        last = len(series) - 1
        hits: list[Hit] = []
        for place, (name, points) in enumerate(series.items()):
            x, y = [point.depth for point in points], [point.delta for point in points]
            axes.plot(x, y, color=palette.depth(place / last), linewidth=1.8, marker="o", markersize=3.2)
            hits += _depth_hits(axes, name, points)
        axes.set_xlabel("depth (0: first block, 1: last)")
        axes.yaxis.set_major_locator(MaxNLocator(5))
        ends = np.array([points[-1].delta for points in series.values()])
        height = 2.6 * 72 * axes.get_position().height
        colors = [palette.depth(place / last) for place in range(len(series))]
        label_ends(axes, ends, list(series), height, colors, palette)
        return Drawing(figure, hits)

    return draw
