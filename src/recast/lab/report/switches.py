"""The section "When layers became attention": its text and charts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recast.lab.files import number
from recast.lab.records import Switching
from recast.lab.report import formats
from recast.lab.report.charts import Chart, Palette
from recast.lab.report.curves import training_series
from recast.lab.report.draw import Point, Series, draw_series, shortened
from recast.lab.report.formats import NBSP
from recast.lab.report.labels import arm_keys
from recast.lab.report.load import Run
from recast.lab.report.tables import switch_table
from recast.lab.suites import METRICS

RULES = {
    "at_once": "All layers at the same epoch (at_once).",
    "progressive": "One layer after the other, at equal intervals (progressive).",
    "listed": "At the epochs listed in the recipe (listed).",
}
WIDTH, TOP, PANEL, GAP, AXIS = 4.0, 0.2, 1.05, 0.3, 0.42  # inches: width, then heights of title, panel, gap and axis
ROW, CLOSE_ROW, MANY_ROWS = 0.2, 0.15, 16  # inches per layer, and if there are more than MANY_ROWS
MOST_ROWS = 40  # of more layers, neighbors with the same date share a bar
LONGEST = 22  # letters shown of the name of a layer
DateBar = tuple[str, int | None]
"""A layer, or neighbors with the same date, and its first epoch as attention; None: never."""


def switch_part(run: Run) -> dict[str, Any]:
    """Return the content of the section; empty without schedule.json."""
    switching = run.switching
    if switching is None:
        return {}
    schedule = switching.schedule
    unfinished = f"The run has reached epoch {run.epochs} of {switching.epochs}; later epochs are pale."
    return {
        "rule": RULES.get(schedule.name, f"Schedule: {schedule.name}."),
        "unfinished": unfinished if run.epochs < switching.epochs else "",
        "chart": _timeline(run, switching) if schedule.layers else None,
        "table": switch_table(run),
        "largest": _largest(switching),
    }


def arm_curves(run: Run, quantity: str) -> list[Series]:
    """Return the arms by epoch; the recast arm includes the measurement right after each switch, at the same x."""
    curves = []
    for line in training_series(run, quantity):
        points = list(line.points)
        if line.role == "recast" and run.switching is not None:
            points += [Point(s.epoch - 1, number(getattr(s.after, quantity, None))) for s in run.switching.switches]
        finite = sorted((point for point in points if math.isfinite(point.y)), key=lambda point: point.x)
        if len(finite) > 1:
            curves.append(replace(line, points=finite))
    return curves


def bars(switching: Switching) -> list[DateBar]:
    """Return the bars in the order of the network."""
    single: list[DateBar] = [(layer, switching.schedule.dates.get(layer)) for layer in switching.schedule.layers]
    if len(single) <= MOST_ROWS:
        return single
    groups = [([name for name, _ in group], date) for date, group in groupby(single, key=lambda bar: bar[1])]
    return [(names[-1] + (f" +{len(names) - 1}" if len(names) > 1 else ""), date) for names, date in groups]


def _timeline(run: Run, switching: Switching) -> Chart:
    """Draw curves and, below them, a bar per layer: thin as a convolution, thick as attention; future epochs are pale.

    Epoch e spans e − 1 to e, because its row in metrics.jsonl is measured at its end: a layer with date d is attention
    from d − 1 on.
    """
    metric = run.task.validation[0]
    quantities = {"Validation loss": "val_loss", f"{METRICS[metric].label}, %": metric}
    curves = {title: lines for title, quantity in quantities.items() if (lines := arm_curves(run, quantity))}
    rows = bars(switching)
    heights = [*(PANEL for _ in curves), (ROW if len(rows) <= MANY_ROWS else CLOSE_ROW) * len(rows)]
    height = sum(heights) + GAP * len(curves) + TOP + AXIS
    span = max(switching.epochs, 1)
    settings: dict[str, Any] = {
        "xlim": (-0.015 * span, 1.015 * span), "whole_x": True, "yticks": 4,
        "switches": sorted({switch.epoch - 1 for switch in switching.switches}),
    }  # fmt: skip
    labels = [shortened(name, LONGEST) for name, _ in rows]
    left = max(min(max(map(len, labels)) * 4.1 + 8, 100) / (72 * WIDTH), 0.12)

    def layout(palette: Palette) -> Figure:
        figure = Figure((WIDTH, height))
        grid = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        space = GAP * len(heights) / sum(heights)
        figure.subplots_adjust(left, AXIS / height, 0.84, 1 - TOP / height, hspace=space)
        for axes, (title, series) in zip(grid, [*curves.items(), ("Layers, input at the top", [])], strict=True):
            draw_series(axes, palette, series, **settings)
            axes.patch.set_visible(False)
            indent = 0 if series else 0.01 - left / (0.84 - left)
            axes.set_title(title, loc="left", fontsize=8.5, color=palette["ink"], x=indent)
            axes.tick_params(labelbottom=not series)
        draw_bars(grid[-1], rows, switching.epochs, run.epochs, palette)
        grid[-1].set_yticks(range(len(rows)), labels, fontsize=7.4)
        grid[-1].set_xlabel("epoch")
        return figure

    cells = [(title, line.role, p.x, p.y) for title, series in curves.items() for line in series for p in line.points]
    keys = arm_keys(run, [line.role for series in list(curves.values())[:1] for line in series])
    columns = ("quantity", "arm", "epoch", "value")
    return Chart("switches", "Layers, loss and accuracy by epoch", columns, cells, keys=keys, layout=layout)


def draw_bars(axes: Axes, rows: Sequence[DateBar], epochs: int, trained: int, palette: Palette) -> None:
    """Draw a bar per row over `epochs`, of which `trained` are done."""
    for place, (_, date) in enumerate(rows):
        switch = epochs if date is None else min(date - 1, epochs)
        as_attention = (switch, epochs, palette.color("recast"), 0.64)
        for start, end, color, thick in ((0, switch, palette["muted"], 0.16), as_attention):
            for low, high, alpha in ((start, min(end, trained), 1.0), (max(start, trained), end, 0.35)):
                if high > low:
                    axes.barh(place, high - low, thick, low, color=color, alpha=alpha, linewidth=0)
        text = "never" if date is None else f"epoch {date}"
        ink = palette["ink"] if date is not None and date <= trained else palette["muted"]
        beside = axes.get_yaxis_transform()
        axes.text(1.02, place, text, transform=beside, va="center_baseline", fontsize=7.6, color=ink)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(visible=False)


def _largest(switching: Switching) -> str:
    """Return a sentence on the switch that changed the loss most."""
    changes = [
        (switch.after.val_loss - switch.before.val_loss, switch.after.val_top1 - switch.before.val_top1, switch.epoch)
        for switch in switching.switches
        if switch.after is not None and math.isfinite(switch.after.val_loss - switch.before.val_loss)
    ]
    loss, top1, epoch = max(changes, key=lambda change: abs(change[0]), default=(0.0, 0.0, 0))
    if abs(loss) < 0.0005:
        return ""
    changes_text = f"validation loss {formats.signed(loss, 3)}, top-1 {formats.signed(top1, 2)} points"
    return f"The switch at epoch{NBSP}{epoch} changed the loss most: {changes_text}."
