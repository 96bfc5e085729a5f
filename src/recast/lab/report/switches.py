"""The section "When layers became attention": its text and chart."""

from __future__ import annotations

from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from recast.lab.pages.charts import Chart, color, shortened
from recast.lab.report.load import Run

RULES = {
    "at_once": "All layers at the same epoch (at_once).",
    "progressive": "One layer after the other, at equal intervals (progressive).",
    "listed": "At the epochs listed in the recipe (listed).",
}
WIDTH, ROW, CLOSE_ROW, AXIS = 4.0, 0.2, 0.15, 0.62  # inches: chart, row, row of more than MANY_ROWS, axis and margin
MANY_ROWS = 16
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
