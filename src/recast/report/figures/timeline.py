"""The pictures of a schedule: which layer was attention when, under loss and accuracy; what a learned one compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from recast.report.figures.chart import Draw, Drawing
from recast.report.figures.lines import ARM_MARKERS, Curve, mark_switches, thin
from recast.report.figures.style import Palette, new_figure
from recast.report.read.schedule import Probe, Schedule
from recast.report.text import formats

WIDTH, TOP, PANEL, GAP, AXIS = 4.0, 0.2, 1.05, 0.3, 0.42
"""Inches: the width; from the top down the room for a title, the height of a panel, the gap, the room for an axis."""
ROW, CLOSE_ROW, MANY_ROWS = 0.2, 0.15, 16
"""Inches a layer; closer together where there are many."""
MOST_ROWS = 40
"""With more layers than this, neighbours of the same date share a bar."""
LONGEST = 22
"""Letters of a layer's name that are shown: its end, which tells layers apart."""


FAR = 15
"""Where the largest delivered is this many times the largest promised, a linear scale would show the promises as 0."""


@dataclass(frozen=True)
class Bar:
    """A layer, or neighbours of the same date."""

    label: str
    date: int | None
    """First epoch as attention; None: never, or not decided."""


@dataclass(frozen=True)
class Panel:
    """Curves above the bars, on the same epochs."""

    title: str
    curves: Sequence[Curve]


def bars(schedule: Schedule) -> list[Bar]:
    """The layers in the network's order."""
    single = [Bar(layer, schedule.dates.get(layer)) for layer in schedule.layers]
    if len(single) <= MOST_ROWS:
        return single
    found = []
    for date, group in groupby(single, key=lambda bar: bar.date):
        names = [bar.label for bar in group]
        found.append(Bar(names[0] if len(names) == 1 else f"{names[-1]} +{len(names) - 1}", date))
    return found


def timeline(schedule: Schedule, panels: Sequence[Panel], trained: int) -> Draw:
    """Panels of curves, below them a bar per layer: thin while it is a convolution, thick as attention.

    The epochs after `trained` are drawn pale. An epoch is the stretch that ends at its number, as its row in
    metrics.jsonl is measured there; a layer of date d is attention from d − 1 on.
    """
    rows = bars(schedule)
    row = ROW if len(rows) <= MANY_ROWS else CLOSE_ROW
    height = TOP + len(panels) * (PANEL + GAP) + row * len(rows) + AXIS
    span = max(schedule.epochs, 1)
    labels = [bar.label if len(bar.label) <= LONGEST else f"…{bar.label[1 - LONGEST :]}" for bar in rows]
    left = min(max(len(label) for label in labels) * 4.1 + 8, 100) / (72 * WIDTH) if rows else 0.12
    left = max(left, 0.12)

    def draw(palette: Palette) -> Drawing:
        figure = new_figure((WIDTH, height))

        def axes_at(top: float, tall: float) -> Axes:
            axes = figure.add_axes((left, 1 - (top + tall) / height, 0.84 - left, tall / height))
            axes.patch.set_visible(False)
            axes.set_xlim(-0.015 * span, 1.015 * span)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            mark_switches(axes, sorted({switch.epoch - 1 for switch in schedule.switches}), palette)
            return axes

        for index, panel in enumerate(panels):
            axes = axes_at(TOP + index * (PANEL + GAP), PANEL)
            _draw_panel(axes, panel, palette)
        axes = axes_at(height - AXIS - row * len(rows), row * len(rows))
        axes.set_title(
            "Layers, input at the top", loc="left", fontsize=8.5, color=palette.ink, x=-left / (0.84 - left) + 0.01
        )
        undecided = "undecided" if schedule.name == "learned" and trained < schedule.epochs else "never"
        draw_bars(axes, rows, labels, schedule.epochs, trained, undecided, palette)
        axes.set_xlabel("epoch")
        return Drawing(figure)

    return draw


def _draw_panel(axes: Axes, panel: Panel, palette: Palette) -> None:
    for curve in panel.curves:
        x, y = thin(curve.x, curve.y)
        axes.plot(
            x,
            y,
            color=palette.arms[curve.arm],
            linewidth=1.7,
            marker=ARM_MARKERS[curve.arm] if len(x) <= 30 else None,
            markersize=3.4,
            zorder=3 if curve.arm == "recast" else 2.5,
        )
    axes.set_title(panel.title, loc="left", fontsize=8.5, color=palette.ink)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.tick_params(labelbottom=False)


def draw_bars(
    axes: Axes,
    rows: Sequence[Bar],
    labels: Sequence[str],
    epochs: int,
    trained: int,
    undated: str,
    palette: Palette,
) -> None:
    for place, bar in enumerate(rows):
        date = math.inf if bar.date is None else bar.date
        switch = min(date - 1, epochs)
        for start, end, color, thick in (
            (0, switch, palette.muted, 0.16),
            (switch, epochs, palette.arms["recast"], 0.64),
        ):
            for low, high, alpha in ((start, min(end, trained), 1.0), (max(start, trained), end, 0.35)):
                if high > low:
                    axes.barh(place, high - low, thick, low, color=color, alpha=alpha, linewidth=0)
        text = undated if bar.date is None else f"epoch {bar.date}"
        beside = axes.get_yaxis_transform()
        ink = palette.ink if date <= trained else palette.muted
        axes.text(1.02, place, text, transform=beside, va="center_baseline", fontsize=7.6, color=ink)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), labels, fontsize=7.4)
    axes.grid(visible=False)


def probe_chart(probes: Sequence[Probe]) -> Draw:
    """What each epoch delivered (dark) against what the gates of every convolution promised, the largest thick.

    A ring marks a promise that was taken: that layer is attention from the next epoch on.
    """
    epochs = [probe.epoch for probe in probes]
    layers = list(dict.fromkeys(layer for probe in probes for layer in probe.promised))
    largest = [largest_promise(probe) for probe in probes]

    def draw(palette: Palette) -> Drawing:
        figure = new_figure((WIDTH, 2.7))
        axes = figure.add_axes((0.14, 0.175, 0.83, 0.745))
        axes.patch.set_visible(False)
        axes.axhline(0, color=palette.muted, linewidth=0.9, dashes=(2, 2))
        for layer in layers:
            x, y = thin(epochs, [probe.promised.get(layer, math.nan) for probe in probes])
            axes.plot(x, y, color=palette.arms["recast"], linewidth=0.8, alpha=0.6)
        x, y = thin(epochs, [value for _, value in largest])
        axes.plot(x, y, color=palette.arms["recast"], linewidth=2.2)
        x, y = thin(epochs, [probe.delivered for probe in probes])
        axes.plot(x, y, color=palette.ink, linewidth=2.2, marker="s" if len(x) <= 30 else None, markersize=3.6)
        for probe in probes:
            for layer in probe.chosen:
                ring = probe.promised.get(layer, math.nan)
                axes.plot(
                    [probe.epoch], [ring], "o", markersize=8, markerfacecolor="none",
                    markeredgecolor=palette.ink, markeredgewidth=1.4, zorder=4,
                )  # fmt: skip
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        _scale_probes(axes, palette, [probe.delivered for probe in probes], [value for _, value in largest])
        return Drawing(figure)

    return draw


def _scale_probes(axes: Axes, palette: Palette, delivered: Sequence[float], promised: Sequence[float]) -> None:
    """Linear, or logarithmic where promises would all lie on the zero line; a loss that rose is below it either way."""
    gains = [abs(value) for value in delivered if math.isfinite(value)]
    hopes = [value for value in promised if value > 0]
    if not gains or not hopes or max(gains) <= FAR * max(hopes):
        axes.yaxis.set_major_locator(MaxNLocator(5))
        return
    axes.set_yscale("symlog", linthresh=10 ** math.floor(math.log10(min(hopes))))
    axes.yaxis.set_major_formatter(lambda value, _: formats.significant(value))
    axes.minorticks_off()
    axes.set_title("logarithmic scale", loc="left", fontsize=7.6, color=palette.muted)


def largest_promise(probe: Probe) -> tuple[str, float]:
    """The layer whose gates promise the most, and how much; ("", NaN) where no convolution is left."""
    known = {layer: value for layer, value in probe.promised.items() if math.isfinite(value)}
    return max(known.items(), key=lambda item: item[1]) if known else ("", math.nan)
