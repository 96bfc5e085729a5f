"""Rows of the three arms as a table on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from recast.run.records import Difference, Row
from recast.run.suites import METRICS, base

ARMS = ("parent", "finetuned", "recast")
UNITS = {"peak_memory": ", bytes", "macs": " per image"}


def arms_table(rows: Sequence[Row], differences: Sequence[Difference] = ()) -> str:
    """One line per metric: the arms, and what recast is above parent and above the parent fine-tuned the same way.

    Behind a difference stands half the width of its 95 % interval. Of a corruption suite only means over the kinds are
    shown; the rest is in rows.csv.
    """
    from recast.surgery.table import render  # needs torch, which the help does without

    margins = {(d.suite, d.metric, d.against): (d.high - d.low) / 2 for d in differences if d.model == "recast"}
    values: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row.metric.count("/") < 2:
            values.setdefault((row.suite, row.metric), {})[row.model] = row.value
    table = Table()
    table.add_column("measure", no_wrap=True)
    for title in ("parent", "fine-tuned", "recast", "recast\n− parent", "recast\n− fine-tuned"):
        table.add_column(title, justify="right", no_wrap=True)
    for (suite, metric), of in values.items():
        percent = base(metric) in METRICS and METRICS[base(metric)].unit == "%"
        cells = [_number(of.get(arm), percent) for arm in ARMS]
        for other in ("parent", "finetuned"):
            both = "recast" in of and other in of
            difference = _difference(of["recast"], of[other], percent) if both else ""
            margin = margins.get((suite, metric, other))
            cells.append(
                f"{difference} ± {margin:.2f}" if difference and percent and margin is not None else difference
            )
        table.add_row(f"{suite} {metric}{UNITS.get(metric, '')}", *cells)
    return render(table)


def _number(value: float | None, percent: bool) -> str:
    if value is None:
        return "–"
    if percent:
        return f"{value:.2f} %"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _difference(value: float, other: float, percent: bool) -> str:
    if percent:
        return f"{value - other:+.2f}"
    return f"× {value / other:.3g}" if other else ""
