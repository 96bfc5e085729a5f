"""Tables of the plan, the heads, the switches to attention, and of several runs side by side."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

from recast.analysis.records import HeadLine
from recast.files import number
from recast.lab.records import ARMS
from recast.lab.report import formats
from recast.lab.report.arms_table import arm_heads, write
from recast.lab.report.formats import NBSP
from recast.lab.report.labels import CORRUPTIONS, in_suite, is_accuracy, words
from recast.lab.report.load import PlanRow, Run, StepCosts, UnchangedLayer
from recast.lab.report.maps import head_labels
from recast.lab.report.table import Cell, Group, PageTable
from recast.lab.report.verdict import accuracy, is_exact, why_no_mean
from recast.lab.statistics import mean_interval
from recast.lab.suites import METRICS, PER_CORRUPTION, base

PLAN_COSTS = {"parameters": formats.compact, "macs": formats.compact, "activation_bytes": formats.memory}
NAMED = 3  # layers of a switch that are all named; of more, the first and the last


def steps_table(run: Run) -> PageTable | None:
    """Return a row per recast convolution; None if there is none."""
    if not run.plan.steps or run.plan.totals is None:
        return None
    rows = []
    for step in run.plan.steps:
        name = Cell(step.name, (_kernel(step), f"{_times(step.input)} → {_times(step.output)}"), code=True)
        counts = Cell(str(step.heads)), Cell(f"{step.queries:,} × {step.keys:,}")
        start = Cell("exact" if step.exact else "not exact", kind="text")
        rows.append([name, *counts, *_costs(step.before, step.after), start])
    heads = ["Layer", "Heads", "Tokens,\nquery × key", "Parameters", "MACs", "Activation memory"]
    foot = [Cell("Whole model"), Cell("", span=2), *_costs(run.plan.totals.before, run.plan.totals.after), Cell("")]
    return PageTable("The plan", [*map(Cell, heads), Cell("Start", kind="text")], [Group("", rows)], foot, "stack")


def _times(sizes: Sequence[int]) -> str:
    return "×".join(map(str, sizes))


def _kernel(step: PlanRow) -> str:
    parts = [_times(step.kernel)]
    for name, sizes in (("stride", step.stride), ("dilation", step.dilation)):
        if set(sizes) != {1}:
            parts.append(f"{name} {_times(sizes if len(set(sizes)) > 1 else sizes[:1])}")
    return ", ".join([*parts, f"{step.groups} groups"] if step.groups != 1 else parts)


def _costs(before: StepCosts, after: StepCosts) -> list[Cell]:
    """Return every cost before → after with its relative change."""
    cells = []
    for key, as_text in PLAN_COSTS.items():
        old, new = getattr(before, key), getattr(after, key)
        cells.append(Cell(f"{as_text(old)} → {as_text(new)}", (formats.share(new, old),), f"{old:,} → {new:,}"))
    return cells


def left_by_reason(run: Run) -> list[tuple[str, int, str]]:
    """Return (reason, number of layers, their names) of unchanged layers, the most frequent first.

    Reasons that only differ in numbers are merged: the common words become the reason, the rest follows the names.
    """

    def pattern(layer: UnchangedLayer) -> str:
        return re.sub(r"\d+(?:[.,]\d+)*", "…", layer.reason)

    groups = []
    for common, members in groupby(sorted(run.plan.left, key=pattern), pattern):
        layers: dict[str, list[str]] = {}
        for layer in members:
            layers.setdefault(layer.reason, []).append(layer.name)
        heading, text = next(iter(layers)), ", ".join(next(iter(layers.values())))
        if len(layers) > 1:
            heading = common.partition("…")[0].rstrip(" (:,") or common
            details = {reason.removeprefix(heading).lstrip(" :,"): names for reason, names in layers.items()}
            text = "\n".join(f"{', '.join(names)}: {reason}" for reason, names in details.items())
        groups.append((heading, sum(map(len, layers.values())), text))
    return sorted(groups, key=lambda group: -group[1])


def last_heads(run: Run) -> dict[str, list[HeadLine]]:
    """Return the heads of every layer at the end, in the order of the network."""
    layers: dict[str, list[HeadLine]] = {}
    for line in run.heads:
        if line.model == "recast":
            layers.setdefault(line.layer, []).append(line)
    for name, lines in layers.items():
        epochs = [math.inf if line.epoch is None else line.epoch for line in lines]
        layers[name] = [line for line, epoch in zip(lines, epochs, strict=True) if epoch == max(epochs)]
    return layers


def head_table(run: Run) -> PageTable | None:
    """Return mean and range over the heads of each layer at the end; None if nothing was measured."""
    kernels = {step.name: step.kernel for step in run.plan.steps}
    rows = []
    for layer, heads in last_heads(run).items():
        convolutional = [head for head in heads if head.is_convolution]
        labels = dict(enumerate(head_labels(len(heads), kernels.get(layer, ()))))
        names = ", ".join(labels.get(head.head, str(head.head)) for head in convolutional)  # a row may be missing
        suffix = f" ({names})" if 0 < len(convolutional) < len(heads) and len(convolutional) <= 9 else ""
        metrics = ("distance", "nonlocality", "entropy", "span")
        ranges = [formats.mean_range([number(getattr(head, metric)) for head in heads]) for metric in metrics]
        texts = f"{len(convolutional)} of {len(heads)}{suffix}", *ranges, f"{max(head.n for head in heads):,}"
        rows.append([Cell(layer, code=True), *map(Cell, texts)])
    columns = ("Layer", "Still\nconvolutional", "Attention distance", "Non-locality", "Entropy", "Span 1/α", "Images")
    return PageTable("Heads by layer", list(map(Cell, columns)), [Group("", rows)], kind="stack") if rows else None


def switch_table(run: Run) -> PageTable | None:
    """Return loss and accuracy right before and after every switch, and at the end of its epoch."""
    rows = []
    for switch in run.switching.switches if run.switching else ():
        end = next((row.measured for row in run.metrics if row.epoch == switch.epoch), None)
        names = ", ".join(switch.layers)
        short = f"{len(switch.layers)} layers: {switch.layers[0]} … {switch.layers[-1]}"
        row = [Cell(f"epoch {switch.epoch}", (names if len(switch.layers) <= NAMED else short,), names)]
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
    """Return a row per run; at its foot, mean and 95 % interval if the runs differ in the seed only.

    `scheduled` adds a column for the schedules.
    """
    names = words(*runs)
    rows = []
    for run, anchor in zip(runs, anchors, strict=True):
        start = "unmeasured" if run.verify is None else "exact" if is_exact(run) else "inexact"
        detail = "" if run.is_plain else f"{start} {'recast' if run.is_scheduled else 'start'}, "
        detail += f"{run.epochs} epochs, seed {run.recipe.seed}"
        row = [Cell(run.name, (run.title, detail), link=f"#{anchor}")]
        if scheduled:
            schedule = run.switching.schedule.name if run.switching else run.recipe.schedule.kind
            epochs = [switch.epoch for switch in run.switching.switches] if run.switching else []
            last = f" to {epochs[-1]}" if epochs and epochs[-1] != epochs[0] else ""
            switched = (f"epoch{NBSP}{epochs[0]}{last}",) if epochs else ()
            row.append(Cell(schedule.replace("_", " "), switched, kind="text"))
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
    """Return mean and interval, colored by the better arm of (above 0, below 0) if the interval excludes 0."""
    if not all(map(math.isfinite, values)):
        return Cell(formats.MISSING)
    mean, low, high = mean_interval(values)
    arm = better[mean < 0] if formats.leaves_out_zero(low, high, digits) else ""
    return Cell(as_text(mean, digits), (formats.interval(low, high, digits),), kind=f"by-{arm}" if arm else "")


def seeds_table(runs: Sequence[Run]) -> PageTable | None:
    """Return every metric that all runs have, paired over the seeds; None if the runs cannot be averaged."""
    if why_no_mean(runs):
        return None
    rows = []
    names = words(*runs)
    for suite, metric in dict.fromkeys((row.suite, row.metric) for row in runs[0].rows):
        arms = {arm: [run.value(arm, suite, metric) for run in runs] for arm in ARMS}
        images = {row.n for run in runs if (row := run.row("recast", suite, metric))}
        name, single = base(metric), suite in CORRUPTIONS and not metric.endswith(("mean", "mce"))
        if single or PER_CORRUPTION.match(metric) or name in {"parameters", "macs"}:
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
    return PageTable("All metrics over the seeds", heads, [Group("", rows)], kind="stack") if rows else None
