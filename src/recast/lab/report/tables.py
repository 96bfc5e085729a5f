"""The other tables: what was recast, what its heads do, what every switch did, and several runs side by side."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from recast.analysis.records import HeadLine
from recast.files import number
from recast.lab.records import ARMS
from recast.lab.report import formats
from recast.lab.report.arms_table import arm_heads, write
from recast.lab.report.formats import NBSP
from recast.lab.report.labels import CORRUPTIONS, in_suite, is_accuracy, words
from recast.lab.report.load import Run
from recast.lab.report.maps import head_labels
from recast.lab.report.table import Cell, Group, PageTable
from recast.lab.report.verdict import accuracy, is_exact, why_no_mean
from recast.lab.statistics import mean_interval
from recast.lab.suites import METRICS, PER_CORRUPTION, base

COSTS = {"parameters": formats.compact, "macs": formats.compact, "activation_bytes": formats.memory}
NAMED = 3
"""Of a switch of more layers than this the first and the last are named; the time line shows them all."""


def steps_table(run: Run) -> PageTable | None:
    """A row per recast convolution; None where there is none."""
    if not run.plan["steps"]:
        return None
    rows = []
    for step in run.plan["steps"]:
        sizes = " → ".join(map(_times, (step["input"], step["output"])))
        name = Cell(str(step["name"]), (_kernel(step), sizes), code=True)
        counts = Cell(str(step["heads"])), Cell(f"{step['queries']:,} × {step['keys']:,}")
        start = Cell("exact" if step["exact"] else "not exact", kind="text")
        rows.append([name, *counts, *_costs(step["before"], step["after"]), start])
    heads = ["Layer", "Heads", "Tokens,\nquery × key", "Parameters", "MACs", "Activation memory"]
    totals = run.plan["totals"]
    foot = [Cell("Whole model"), Cell("", span=2), *_costs(totals["before"], totals["after"]), Cell("")]
    return PageTable("The plan", [*map(Cell, heads), Cell("Start", kind="text")], [Group("", rows)], foot, "stack")


def _times(sizes: Sequence[int]) -> str:
    return "×".join(map(str, sizes))


def _kernel(step: Mapping[str, Any]) -> str:
    parts = [_times(step["kernel"])]
    for key in ("stride", "dilation"):
        sizes = set(step[key])
        if sizes != {1}:
            parts.append(f"{key} {_times(step[key] if len(sizes) > 1 else step[key][:1])}")
    return ", ".join([*parts, f"{step['groups']} groups"] if step["groups"] != 1 else parts)


def _costs(before: Mapping[str, int], after: Mapping[str, int]) -> list[Cell]:
    """Every cost before → after, and by how much of it that is more."""
    cells = []
    for key, as_text in COSTS.items():
        old, new = before[key], after[key]
        cells.append(Cell(f"{as_text(old)} → {as_text(new)}", (formats.share(new, old),), f"{old:,} → {new:,}"))
    return cells


def left_by_reason(run: Run) -> list[tuple[str, int, str]]:
    """(reason, how many layers, which) of what was left, the most frequent first.

    Reasons that differ in their numbers only are one: its words stand above, the numbers beside the layers.
    """

    def pattern(left: dict[str, Any]) -> str:
        return re.sub(r"\d+(?:[.,]\d+)*", "…", str(left["reason"]))

    groups = []
    for common, members in groupby(sorted(run.plan["left"], key=pattern), pattern):
        layers: dict[str, list[str]] = {}
        for left in members:
            layers.setdefault(str(left["reason"]), []).append(str(left["name"]))
        heading, which = next(iter(layers)), ", ".join(next(iter(layers.values())))
        if len(layers) > 1:
            heading = common.partition("…")[0].rstrip(" (:,") or common
            rest = {reason.removeprefix(heading).lstrip(" :,"): names for reason, names in layers.items()}
            which = "\n".join(f"{', '.join(names)}: {reason}" for reason, names in rest.items())
        groups.append((heading, sum(map(len, layers.values())), which))
    return sorted(groups, key=lambda group: -group[1])


def last_heads(run: Run) -> dict[str, list[HeadLine]]:
    """Layer → its heads as they are at the end, in the network's order."""

    layers: dict[str, list[HeadLine]] = {}
    for line in run.heads:
        if line.model == "recast":
            layers.setdefault(line.layer, []).append(line)
    for name, lines in layers.items():
        epochs = [math.inf if line.epoch is None else line.epoch for line in lines]
        layers[name] = [line for line, epoch in zip(lines, epochs, strict=True) if epoch == max(epochs)]
    return layers


def head_table(run: Run) -> PageTable | None:
    """Mean and range over the heads of each layer, as they are at the end; None where nothing was measured."""
    kernels = {step["name"]: step["kernel"] for step in run.plan["steps"]}
    rows = []
    for layer, heads in last_heads(run).items():
        stayed = [one for one in heads if one.is_convolution]
        labels = dict(enumerate(head_labels(len(heads), kernels.get(layer, ()))))
        names = ", ".join(labels.get(one.head, str(one.head)) for one in stayed)  # a row may be missing
        which = f" ({names})" if 0 < len(stayed) < len(heads) and len(stayed) <= 9 else ""
        measured = ("distance", "nonlocality", "entropy", "span")
        ranges = [formats.mean_range([number(getattr(one, name)) for one in heads]) for name in measured]
        counts = f"{len(stayed)} of {len(heads)}{which}", *ranges, f"{max(one.n for one in heads):,}"
        rows.append([Cell(layer, code=True), *map(Cell, counts)])
    heads_of = ("Layer", "Stayed\nconvolutional", "Attention distance", "Non-locality", "Entropy", "Span 1/α", "Images")
    return PageTable("Heads by layer", list(map(Cell, heads_of)), [Group("", rows)], kind="stack") if rows else None


def switch_table(run: Run) -> PageTable | None:
    """Loss and accuracy before every switch, right after it, and at the end of the epoch that follows."""
    rows = []
    for switch in run.switching.switches if run.switching else ():
        end = next((row.measured for row in run.metrics if row.epoch == switch.epoch), None)
        names = ", ".join(switch.layers)
        some = f"{len(switch.layers)} layers: {switch.layers[0]} … {switch.layers[-1]}"
        row = [Cell(f"epoch {switch.epoch}", (names if len(switch.layers) <= NAMED else some,), names)]
        for key, digits in (("val_loss", 3), ("val_top1", 2)):
            values = [number(getattr(moment, key, None)) for moment in (switch.before, switch.after, end)]
            at_switch, in_epoch = (formats.signed(new - old, digits) for old, new in pairwise(values))
            text = " → ".join(formats.decimal(value, digits) for value in values)
            row.append(Cell(text, (f"{at_switch}, then {in_epoch}",)))
        rows.append(row)
    steps = ("before → after → end",)
    heads = [Cell("Switch"), Cell("Validation loss", steps), Cell(f"{METRICS[run.task.validation[0]].label}, %", steps)]
    return PageTable("Every switch", heads, [Group("", rows)], kind="stack switches") if rows else None


def runs_table(runs: Sequence[Run], anchors: Sequence[str], data: str, scheduled: bool) -> PageTable:
    """A row per run, and at its foot mean and 95 % interval where the runs differ in nothing but the seed.

    `scheduled`: with a column for the schedules.
    """
    names = words(*runs)
    rows = []
    for run, anchor in zip(runs, anchors, strict=True):
        start = "unmeasured" if run.verify is None else "exact" if is_exact(run) else "inexact"
        how = "" if run.is_plain else f"{start} {'recast' if run.is_scheduled else 'start'}, "
        how += f"{run.epochs} epochs, seed {run.recipe.seed}"
        row = [Cell(run.name, (run.title, how), link=f"#{anchor}")]
        if scheduled:
            schedule = run.switching.schedule if run.switching else run.recipe.schedule
            epochs = [switch.epoch for switch in run.switching.switches] if run.switching else []
            last = f" to {epochs[-1]}" if epochs and epochs[-1] != epochs[0] else ""
            switched = (f"epoch{NBSP}{epochs[0]}{last}",) if epochs else ()
            row.append(Cell(schedule.name.replace("_", " "), switched, kind="text"))
        row += [Cell(formats.decimal(accuracy(run, arm)), kind=arm) for arm in names.arms]
        for arm in names.others:
            paired = run.difference(arm, *run.main)
            small = (formats.interval(paired.low, paired.high),) if paired else ()
            row.append(Cell(formats.signed(accuracy(run, "recast") - accuracy(run, arm)), small))
        rows.append(row)
    foot: list[Cell] = []
    if not why_no_mean(runs):
        foot = [Cell("Mean of the seeds", ("and its 95 % interval",)), *([Cell("")] if scheduled else [])]
        foot += [_mean([accuracy(run, arm) for run in runs], formats.decimal) for arm in names.arms]
        foot += [_mean([accuracy(run, "recast") - accuracy(run, arm) for run in runs]) for arm in names.others]
    heads = [Cell("Run"), *([Cell("Schedule", kind="text")] if scheduled else []), *arm_heads(*runs)]
    return PageTable(f"Runs on {data}", heads, [Group("", rows)], foot, "stack")


def _mean(
    values: Sequence[float], as_text: Any = formats.signed, digits: int = 1, better: tuple[str, str] = ("", "")
) -> Cell:
    """Mean and interval; coloured by the better of (above 0, below 0) where the interval leaves out 0."""
    if not all(map(math.isfinite, values)):
        return Cell(formats.MISSING)
    mean, low, high = mean_interval(values)
    arm = better[mean < 0] if formats.leaves_out_zero(low, high, digits) else ""
    return Cell(as_text(mean, digits), (formats.interval(low, high, digits),), kind=f"by-{arm}" if arm else "")


def seeds_table(runs: Sequence[Run]) -> PageTable | None:
    """Every measure that all runs have, paired over the seeds; None where the runs differ in more than that."""
    if why_no_mean(runs):
        return None
    rows = []
    names = words(*runs)
    for suite, metric in dict.fromkeys((row.suite, row.metric) for row in runs[0].rows):
        arms = {arm: [run.value(arm, suite, metric) for run in runs] for arm in ARMS}
        images = {row.n for run in runs if (row := run.row("recast", suite, metric))}
        name, of_one = base(metric), suite in CORRUPTIONS and not metric.endswith(("mean", "mce"))
        if of_one or PER_CORRUPTION.match(metric) or name in {"parameters", "macs"}:
            continue
        if len(images) > 1 or not all(map(math.isfinite, arms["recast"])):
            continue
        digits = 3 if name == "loss" else 1
        cells = [Cell(in_suite(suite, metric))]
        cells += [Cell(write(name, sum(arms[arm]) / len(runs), digits), kind=arm) for arm in names.arms]
        for arm in names.others:
            gaps = [recast - other for recast, other in zip(arms["recast"], arms[arm], strict=True)]
            cells.append(_mean(gaps, digits=digits, better=("recast", arm) if is_accuracy(metric) else ("", "")))
        rows.append(cells)
    heads = [Cell("Measured"), *arm_heads(*runs)]
    return PageTable("Every measure over the seeds", heads, [Group("", rows)], kind="stack") if rows else None
