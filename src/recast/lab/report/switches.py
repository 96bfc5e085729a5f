"""The section "When layers became attention": its text, chart and table."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from recast.lab.files import number
from recast.lab.records import Switch
from recast.lab.report import formats
from recast.lab.report.charts import Chart, color
from recast.lab.report.draw import shortened
from recast.lab.report.load import Run
from recast.lab.report.table import Cell, PageTable
from recast.lab.suites import METRICS

RULES = {
    "at_once": "All layers at the same epoch (at_once).",
    "progressive": "One layer after the other, at equal intervals (progressive).",
    "listed": "At the epochs listed in the recipe (listed).",
}
WIDTH, ROW, CLOSE_ROW, AXIS = 4.0, 0.2, 0.15, 0.62  # inches: chart, row, row of more than MANY_ROWS, axis and margin
MANY_ROWS = 16
NAMED = 3  # layers of a switch that are named in the table; of more, their number
LONGEST = 22  # letters shown of the name of a layer


def switch_part(run: Run) -> dict[str, Any]:
    """Return the content of the section; empty without schedule.json."""
    switching = run.switching
    if switching is None:
        return {}
    schedule = switching.schedule
    rows = [(layer, schedule.dates.get(layer)) for layer in schedule.layers]
    size = (WIDTH, AXIS + len(rows) * (ROW if len(rows) <= MANY_ROWS else CLOSE_ROW))
    panel = partial(_draw_bars, rows=rows, epochs=switching.epochs, trained=run.epochs)
    unfinished = f"The run has reached epoch {run.epochs} of {switching.epochs}; later epochs are pale."
    return {
        "rule": RULES.get(schedule.name, f"Schedule: {schedule.name}."),
        "unfinished": unfinished if run.epochs < switching.epochs else "",
        "chart": Chart("switches", "Layers by epoch, input at the top", panel, size),
        "table": _switch_table(run, switching.switches),
    }


def _draw_bars(axes: Axes, rows: list[tuple[str, int | None]], epochs: int, trained: int) -> None:
    """Draw a bar per row over `epochs`: thin as a convolution, thick as attention, pale after the `trained` epochs.

    A row is a layer and its first epoch as attention, None for never.

    Epoch e spans e − 1 to e: a layer with date d is attention from d − 1 on.
    """
    for place, (_, date) in enumerate(rows):
        switch = epochs if date is None else min(date - 1, epochs)
        as_attention = (switch, epochs, color("recast"), 0.64)
        for start, end, shade, thick in ((0, switch, color("muted"), 0.16), as_attention):
            for low, high, alpha in ((start, min(end, trained), 1.0), (max(start, trained), end, 0.35)):
                if high > low:
                    axes.barh(place, high - low, thick, low, color=shade, alpha=alpha, linewidth=0)
        text = "never" if date is None else f"epoch {date}"
        ink = color("ink") if date is not None and date <= trained else color("muted")
        beside = axes.get_yaxis_transform()
        axes.text(1.02, place, text, transform=beside, va="center_baseline", fontsize=7.6, color=ink)
    labels = [shortened(name, LONGEST) for name, _ in rows]
    left = max(min(max(map(len, labels), default=0) * 4.1 + 8, 100) / (72 * WIDTH), 0.12)
    box = axes.get_position()
    axes.set_position((left, box.y0, 0.84 - left, box.height))
    axes.set_yticks(range(len(rows)), labels, fontsize=7.4)
    axes.set(xlabel="epoch", xlim=(0, max(epochs, 1)), ylim=(len(rows) - 0.5, -0.5))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=False)


def _switch_table(run: Run, switches: Sequence[Switch]) -> PageTable | None:
    """Return loss and accuracy right before and after every switch, and at the end of its epoch."""
    rows = []
    for switch in switches:
        end = next((row.measured for row in run.metrics if row.epoch == switch.epoch), None)
        names = ", ".join(switch.layers)
        short = names if len(switch.layers) <= NAMED else f"{len(switch.layers)} layers"
        row = [Cell(f"epoch {switch.epoch}", (short,), names)]
        for key, digits in (("val_loss", 3), ("val_top1", 2)):
            values = [number(getattr(moment, key, None)) for moment in (switch.before, switch.after, end)]
            at_switch, in_epoch = (formats.signed(new - old, digits) for old, new in pairwise(values))
            text = " → ".join(formats.decimal(value, digits) for value in values)
            row.append(Cell(text, (f"{at_switch}, then {in_epoch}",)))
        rows.append(row)
    steps = ("before → after → end",)
    heads = [Cell("Switch"), Cell("Validation loss", steps), Cell(f"{METRICS[run.task.validation[0]].label}, %", steps)]
    return PageTable("Every switch", heads, {"": rows}, kind="stack switches") if rows else None
