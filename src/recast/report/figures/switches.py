"""The section "When layers became attention": its sentence, pictures and table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from recast.report.figures.arms import arm_keys
from recast.report.figures.chart import Chart, Data
from recast.report.figures.lines import Curve
from recast.report.figures.timeline import Panel, bars, largest_promise, probe_chart, timeline
from recast.report.read.run import Run
from recast.report.read.schedule import Measured, Probe, Schedule, Switch
from recast.report.text import formats
from recast.report.text.words import words
from recast.run.files import number

RULES = {
    "at_once": "All layers at one date (at once).",
    "progressive": "One layer after the other, at equal distances (progressive).",
    "progressive, learned": "One layer after the other, at equal distances (progressive); at each date the one whose "
    "gates promise the largest fall of the training loss per added multiply-add.",
    "listed": "On dates that the recipe lists (listed).",
    "learned": "When a layer’s gates promise a larger fall of the training loss than the last epoch delivered; of "
    "several such layers the one that promises most per added multiply-add (learned).",
}
QUANTITIES = {"loss": ("Validation loss", "val_loss", 3), "top1": ("Top-1, %", "val_top1", 2)}
"""Field of `Measured` → its name, its key in metrics.jsonl, digits."""
NAMED = 3
"""Of a switch of more layers than this the first and the last are named; the time line shows them all."""


@dataclass(frozen=True)
class Steps:
    """A quantity before a switch, right after it, and at the end of the epoch that follows."""

    values: str
    changes: str


@dataclass(frozen=True)
class Line:
    """One switch in the table."""

    epoch: int
    layers: str
    title: str
    """All layers."""
    loss: Steps
    top1: Steps


@dataclass(frozen=True)
class Section:
    rule: str
    unfinished: str
    chart: Chart | None
    """Layers, loss and accuracy by epoch."""
    lines: list[Line]
    largest: str
    probes: Chart | None
    reading: str


def switch_section(run: Run) -> Section | None:
    """What the page says of a run's schedule; None without schedule.json."""
    schedule = run.schedule
    if schedule is None:
        return None
    panels = [
        Panel(title, curves) for quantity, (title, _, _) in QUANTITIES.items() if (curves := arm_curves(run, quantity))
    ]
    unfinished = ""
    if run.epochs < schedule.epochs:
        unfinished = f"The run has got to epoch {run.epochs} of {schedule.epochs}: what is to come is pale."
    chart = None
    if schedule.layers:
        curves = [curve for panel in panels[:1] for curve in panel.curves]
        chart = Chart(
            "switches",
            "Layers, loss and accuracy by epoch",
            _story(run, schedule),
            timeline(schedule, panels, run.epochs),
            Data(("quantity", "arm", "epoch", "value"), _values(panels)),
            arm_keys(run, [curve.arm for curve in curves]),
        )
    compared = [probe for probe in schedule.probes if math.isfinite(probe.delivered)]
    return Section(
        rule=RULES.get(_kind(schedule), f"Schedule: {schedule.name}."),
        unfinished=unfinished,
        chart=chart,
        lines=[_line(run, switch) for switch in schedule.switches],
        largest=_largest(schedule),
        probes=_probes(schedule) if len(compared) > 1 else None,
        reading=_reading(schedule),
    )


def _values(panels: Sequence[Panel]) -> list[tuple[str | float | int | None, ...]]:
    return [
        (panel.title, curve.arm, x, y)
        for panel in panels
        for curve in panel.curves
        for x, y in zip(curve.x, curve.y, strict=True)
    ]


def _probes(schedule: Schedule) -> Chart:
    rows = [
        (probe.epoch, layer, value, probe.delivered)
        for probe in schedule.probes
        for layer, value in probe.promised.items()
    ]
    data = Data(("epoch", "layer", "promised", "delivered"), list(rows))
    title = "Fall of the training loss in an epoch"
    return Chart("promises", title, _probe_story(schedule), probe_chart(schedule.probes), data)


def arm_curves(run: Run, quantity: str) -> list[Curve]:
    """The arms by epoch; the recast one holds what was measured right after a switch too, at the same x."""
    key = QUANTITIES[quantity][1]
    found = []
    for arm, rows in (("finetuned", run.control), ("recast", run.metrics)):
        points = [(number(row["epoch"]), 0, number(row.get(key))) for row in rows]
        if arm == "recast" and run.schedule is not None:
            points += [(switch.epoch - 1.0, 1, getattr(switch.after, quantity)) for switch in run.schedule.switches]
        known = [(x, y) for x, _, y in sorted(points) if math.isfinite(y)]
        if len(known) > 1:
            found.append(Curve([x for x, _ in known], [y for _, y in known], arm))
    return found


def _line(run: Run, switch: Switch) -> Line:
    row = next((row for row in run.metrics if row["epoch"] == switch.epoch), {})
    count, names = len(switch.layers), ", ".join(switch.layers)
    short = names if count <= NAMED else f"{count} layers: {switch.layers[0]} … {switch.layers[-1]}"
    end = Measured.of(row)
    loss, top1 = (_steps(switch, end, quantity) for quantity in ("loss", "top1"))
    return Line(switch.epoch, short, names, loss, top1)


def _steps(switch: Switch, end: Measured, quantity: str) -> Steps:
    digits = QUANTITIES[quantity][2]
    values = [getattr(found, quantity) for found in (switch.before, switch.after, end)]
    at_switch, in_epoch = (formats.signed(values[i + 1] - values[i], digits) for i in (0, 1))
    return Steps(" → ".join(formats.decimal(value, digits) for value in values), f"{at_switch}, then {in_epoch}")


def _largest(schedule: Schedule) -> str:
    """What the switches did to the network, told by the one that did most."""
    changes = [(switch.after.loss - switch.before.loss, switch) for switch in schedule.switches]
    known = [(change, switch) for change, switch in changes if math.isfinite(change)]
    if not known:
        return ""
    change, switch = max(known, key=lambda pair: abs(pair[0]))
    if abs(change) < 0.001:
        return "No switch changed the validation loss by 0.001 or more." if len(known) > 1 else ""
    points = formats.signed(switch.after.top1 - switch.before.top1, 2)
    when = f"at the start of epoch{formats.NBSP}{switch.epoch}"
    which = f"The switch {when}" if len(known) == 1 else f"The switch that changed the loss most, {when},"
    return f"{which} moved the validation loss by {formats.signed(change, 3)} and top-1 by {points} points."


def _story(run: Run, schedule: Schedule) -> str:
    """The picture in words."""
    names = words(run).arms
    dates = "; ".join(
        f"{bar.label} from epoch {bar.date}" if bar.date is not None else f"{bar.label} without a date"
        for bar in bars(schedule)
    )
    ends = []
    for quantity, (title, _, digits) in QUANTITIES.items():
        curves = arm_curves(run, quantity)
        each = [
            f"{names[curve.arm]} {formats.decimal(curve.y[-1], digits)} at epoch {curve.x[-1]:g}" for curve in curves
        ]
        ends += [f" {title}: {', '.join(each)}."] if each else []
    return f"Time line of {schedule.epochs} epochs. Layers as attention: {dates}.{''.join(ends)}"


def _kind(schedule: Schedule) -> str:
    """The schedule's name; one that took its order from measurements is another kind."""
    return f"{schedule.name}, learned" if schedule.probes and schedule.name != "learned" else schedule.name


def _probe_story(schedule: Schedule) -> str:
    known = [probe for probe in schedule.probes if math.isfinite(probe.delivered)]
    first, last = (f"{formats.significant(known[at].delivered)} in epoch {known[at].epoch}" for at in (0, -1))
    return f"Fall of the training loss by epoch: delivered {first}, {last}. {_reading(schedule)}"


def _reading(schedule: Schedule) -> str:
    """Every promise that was taken; where none was, the latest."""
    if not schedule.probes:
        return ""
    taken = [
        f"after epoch {probe.epoch} {layer} ({_both(probe, layer)})"
        for probe in schedule.probes
        for layer in probe.chosen
    ]
    if taken:
        return f"Taken: {_listed(taken)}."
    latest = schedule.probes[-1]
    layer, _ = largest_promise(latest)
    after = f"; after epoch {latest.epoch} the largest is that of {layer} ({_both(latest, layer)})" if layer else ""
    return f"No promise was taken{after}."


def _both(probe: Probe, layer: str) -> str:
    promised = formats.significant(probe.promised.get(layer, math.nan))
    return f"promised {promised}, delivered {formats.significant(probe.delivered)}"


def _listed(items: Sequence[str], most: int = 8) -> str:
    more = f"; and {len(items) - most} more" if len(items) > most else ""
    return "; ".join(items[:most]) + more
