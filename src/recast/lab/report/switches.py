"""The section "When layers became attention": its sentences and pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recast.files import number
from recast.lab.records import GateProbe, Switching
from recast.lab.report import formats
from recast.lab.report.charts import Chart, Hit, Palette
from recast.lab.report.curves import training_series
from recast.lab.report.draw import Point, Series, draw_series, in_words, shortened
from recast.lab.report.formats import NBSP
from recast.lab.report.labels import arm_keys
from recast.lab.report.load import Run
from recast.lab.report.tables import switch_table
from recast.lab.suites import METRICS

RULES = {
    "at_once": "All layers at one date (at once).",
    "progressive": "One layer after the other, at equal distances (progressive).",
    "progressive, learned": "One layer after the other, at equal distances (progressive); at each date the one whose "
    "gates promise the largest fall of the training loss per added multiply-add.",
    "listed": "On dates that the recipe lists (listed).",
    "learned": "When a layer’s gates promise a larger fall of the training loss than the last epoch delivered; of "
    "several such layers the one that promises most per added multiply-add (learned).",
}
WIDTH, TOP, PANEL, GAP, AXIS = 4.0, 0.2, 1.05, 0.3, 0.42
"""Inches: the width; from the top down the room for a title, the height of a panel, the gap, the room for an axis."""
ROW, CLOSE_ROW, MANY_ROWS = 0.2, 0.15, 16
"""Inches a layer; closer together where there are many."""
MOST_ROWS = 40
"""With more layers than this, neighbours of the same date share a bar."""
LONGEST = 22
"""Letters of a layer's name that are shown."""
FAR = 15
"""Where the largest delivered is this many times the largest promised, a linear scale would show the promises as 0."""
MOST_READ = 8
"""Promises that are told."""
DateBar = tuple[str, int | None]
"""A layer, or neighbours of the same date, and the first epoch as attention; None: never, or not decided."""


def switch_part(run: Run) -> dict[str, Any]:
    """What the page says of a run's schedule; empty without schedule.json."""
    switching = run.switching
    if switching is None:
        return {}
    schedule, probes = switching.schedule, switching.probes
    rule = f"{schedule.name}, learned" if probes and schedule.name != "learned" else schedule.name
    unfinished = f"The run has got to epoch {run.epochs} of {switching.epochs}: what is to come is pale."
    return {
        "rule": RULES.get(rule, f"Schedule: {schedule.name}."),
        "unfinished": unfinished if run.epochs < switching.epochs else "",
        "chart": _timeline(run, switching) if schedule.layers else None,
        "table": switch_table(run),
        "largest": _largest(switching),
        "probes": _probe_chart(switching) if sum(probe.delivered is not None for probe in probes) > 1 else None,
        "reading": _reading(switching),
    }


def arm_curves(run: Run, quantity: str) -> list[Series]:
    """The arms by epoch; the recast one holds what was measured right after a switch too, at the same x."""
    found = []
    for one in training_series(run, quantity):
        points = list(one.points)
        if one.role == "recast" and run.switching is not None:
            points += [Point(s.epoch - 1, number(getattr(s.after, quantity, None))) for s in run.switching.switches]
        known = sorted((point for point in points if math.isfinite(point.y)), key=lambda point: point.x)
        if len(known) > 1:
            found.append(replace(one, points=known))
    return found


def bars(switching: Switching) -> list[DateBar]:
    """The layers in the network's order."""
    single: list[DateBar] = [(layer, switching.schedule.dates.get(layer)) for layer in switching.schedule.layers]
    if len(single) <= MOST_ROWS:
        return single
    groups = [([name for name, _ in group], date) for date, group in groupby(single, key=lambda bar: bar[1])]
    return [(names[-1] + (f" +{len(names) - 1}" if len(names) > 1 else ""), date) for names, date in groups]


def _timeline(run: Run, switching: Switching) -> Chart:
    """Curves, below them a bar per layer: thin while it is a convolution, thick as attention.

    The epochs to come are drawn pale. An epoch is the stretch that ends at its number, as its row in metrics.jsonl is
    measured there; a layer of date d is attention from d − 1 on.
    """
    metric = run.task.validation[0]
    quantities = {"Validation loss": "val_loss", f"{METRICS[metric].label}, %": metric}
    curves = {title: found for title, quantity in quantities.items() if (found := arm_curves(run, quantity))}
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
    undated = "undecided" if switching.schedule.name == "learned" and run.epochs < switching.epochs else "never"

    def layout(palette: Palette) -> Figure:
        figure = Figure((WIDTH, height))
        grid = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        apart = GAP * len(heights) / sum(heights)
        figure.subplots_adjust(left, AXIS / height, 0.84, 1 - TOP / height, hspace=apart)
        for axes, (title, series) in zip(grid, [*curves.items(), ("Layers, input at the top", [])], strict=True):
            draw_series(axes, palette, series, **settings)
            axes.patch.set_visible(False)
            indent = 0 if series else 0.01 - left / (0.84 - left)
            axes.set_title(title, loc="left", fontsize=8.5, color=palette["ink"], x=indent)
            axes.tick_params(labelbottom=not series)
        draw_bars(grid[-1], rows, switching.epochs, run.epochs, undated, palette)
        grid[-1].set_yticks(range(len(rows)), labels, fontsize=7.4)
        grid[-1].set_xlabel("epoch")
        return figure

    dates = "; ".join(f"{name} {'without a date' if date is None else f'from epoch {date}'}" for name, date in rows)
    ends = " ".join(in_words(title, series) for title, series in curves.items())
    story = f"Time line of {switching.epochs} epochs. Layers as attention: {dates}. {ends}"
    cells = [(title, one.role, p.x, p.y) for title, series in curves.items() for one in series for p in one.points]
    keys = arm_keys(run, [one.role for series in list(curves.values())[:1] for one in series])
    columns = ("quantity", "arm", "epoch", "value")
    return Chart("switches", "Layers, loss and accuracy by epoch", story, columns, cells, keys=keys, layout=layout)


def draw_bars(axes: Axes, rows: Sequence[DateBar], epochs: int, trained: int, undated: str, palette: Palette) -> None:
    """A bar per row over `epochs`, of which `trained` have been."""
    for place, (_, date) in enumerate(rows):
        switch = epochs if date is None else min(date - 1, epochs)
        as_attention = (switch, epochs, palette.color("recast"), 0.64)
        for start, end, color, thick in ((0, switch, palette["muted"], 0.16), as_attention):
            for low, high, alpha in ((start, min(end, trained), 1.0), (max(start, trained), end, 0.35)):
                if high > low:
                    axes.barh(place, high - low, thick, low, color=color, alpha=alpha, linewidth=0)
        text = undated if date is None else f"epoch {date}"
        ink = palette["ink"] if date is not None and date <= trained else palette["muted"]
        beside = axes.get_yaxis_transform()
        axes.text(1.02, place, text, transform=beside, va="center_baseline", fontsize=7.6, color=ink)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(visible=False)


def _probe_chart(switching: Switching) -> Chart:
    """What each epoch delivered (dark) against what the gates of every convolution promised, the largest thick.

    A ring marks a promise that was taken: that layer is attention from the next epoch on.
    """
    probes = switching.probes
    layers = dict.fromkeys(layer for probe in probes for layer in probe.promised)

    def promise(probe: GateProbe, layer: str) -> Point:
        return Point(probe.epoch, probe.promised.get(layer, math.nan))

    largest = [promise(probe, _largest_promise(probe)) for probe in probes]
    delivered = [Point(probe.epoch, probe.delivered) for probe in probes if probe.delivered is not None]
    taken = [promise(probe, layer) for probe in probes for layer in probe.chosen]
    series = [
        *(Series("", [promise(probe, layer) for probe in probes], look="thin") for layer in layers),
        Series("", largest, look="thick"),
        Series("Delivered", delivered, "ink"),
        Series("", taken, "ink", "rings"),
    ]
    hopes, gains = [point.y for point in largest if point.y > 0], [abs(point.y) for point in delivered]

    def draw(axes: Axes, palette: Palette) -> list[Hit]:
        hits = draw_series(axes, palette, series, xlabel="epoch", whole_x=True, level=(0.0, "muted"))
        if hopes and max(gains) > FAR * max(hopes):  # a loss that rose is below the zero line either way
            axes.set_yscale("symlog", linthresh=10 ** math.floor(math.log10(min(hopes))))
            axes.yaxis.set_major_formatter(lambda value, _: formats.significant(value))
            axes.minorticks_off()
            axes.set_title("logarithmic scale", loc="left", fontsize=7.6, color=palette["muted"])
        return hits

    rows = [(probe.epoch, layer, value, probe.delivered) for probe in probes for layer, value in probe.promised.items()]
    title = "Fall of the training loss in an epoch"
    story = in_words(title, series, note=_reading(switching))
    return Chart("promises", title, story, ("epoch", "layer", "promised", "delivered"), rows, draw, (WIDTH, 2.7))


def _largest_promise(probe: GateProbe) -> str:
    """The layer whose gates promise the most; "" where no convolution is left."""
    known = {layer: value for layer, value in probe.promised.items() if math.isfinite(value)}
    return max(known, key=known.__getitem__, default="")


def _largest(switching: Switching) -> str:
    """The switch that changed the loss most."""
    changes = [
        (switch.after.val_loss - switch.before.val_loss, switch.after.val_top1 - switch.before.val_top1, switch.epoch)
        for switch in switching.switches
        if switch.after is not None and math.isfinite(switch.after.val_loss - switch.before.val_loss)
    ]
    loss, top1, epoch = max(changes, key=lambda change: abs(change[0]), default=(0.0, 0.0, 0))
    if abs(loss) < 0.0005:
        return ""
    moved = f"validation loss {formats.signed(loss, 3)}, top-1 {formats.signed(top1, 2)} points"
    return f"Of all switches that of epoch{NBSP}{epoch} changed the loss most: {moved}."


def _reading(switching: Switching) -> str:
    """Every promise that was taken; where none was, the latest."""
    if not switching.probes:
        return ""

    def both(probe: GateProbe, layer: str) -> str:
        values = (probe.promised.get(layer, math.nan), number(probe.delivered))
        return "promised {}, delivered {}".format(*map(formats.significant, values))

    probes = switching.probes
    taken = [f"after epoch {one.epoch} {layer} ({both(one, layer)})" for one in probes for layer in one.chosen]
    if taken:
        more = f"; and {len(taken) - MOST_READ} more" if len(taken) > MOST_READ else ""
        return f"Taken: {'; '.join(taken[:MOST_READ])}{more}."
    latest = probes[-1]
    layer = _largest_promise(latest)
    after = f"; after epoch {latest.epoch} the largest is that of {layer} ({both(latest, layer)})" if layer else ""
    return f"No promise was taken{after}."
