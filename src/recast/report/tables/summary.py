"""Several runs of one data set: a line each, and their mean where they differ in the seed alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from recast.report.read.run import ARMS, Run
from recast.report.tables.arms import write
from recast.report.tables.names import CORRUPTIONS, PER_CORRUPTION, SUITES, base, is_accuracy
from recast.report.tables.seeds import mean_interval, seeds_apart
from recast.report.text import formats
from recast.report.text.verdict import accuracy, is_exact


@dataclass(frozen=True)
class SeedLine:
    """One measure over the seeds."""

    label: str
    values: dict[str, str]
    differences: dict[str, tuple[str, str, str]]
    """Arm compared with → mean, its interval, the arm that does better where 0 is outside."""


def summary(runs: Sequence[Run]) -> tuple[list[dict[str, str]], dict[str, str] | None]:
    """A line per run, and mean with 95 % interval where the runs differ in nothing but the seed."""
    lines = []
    for run in runs:
        values = {arm: accuracy(run, arm) for arm in ARMS}
        seed = run.recipe.get("seed", formats.MISSING)
        start = "unmeasured" if run.verify is None else "exact" if is_exact(run) else "inexact"
        how = f"{start} {'recast' if run.is_scheduled else 'start'}, {run.epochs} epochs, seed {seed}"
        line = {
            "name": run.name,
            "what": f"{run.model} on {run.dataset}, {run.layer_kind}",
            "how": how if not run.is_plain else f"{run.epochs} epochs, seed {seed}",
            "schedule": run.schedule_name.replace("_", " "),
            "switches": _switched(run),
            **{arm: formats.decimal(values[arm]) for arm in ARMS},
        }
        for arm in ("parent", "finetuned"):
            paired = run.difference("recast", arm, "clean", "top1")
            known = paired is not None and math.isfinite(paired.low) and math.isfinite(paired.high)
            line[f"to_{arm}"] = formats.signed(values["recast"] - values[arm], 1)
            line[f"to_{arm}_interval"] = formats.interval(paired.low, paired.high) if known and paired else ""
        lines.append(line)
    if not seeds_apart(runs):
        return lines, None
    mean: dict[str, str] = {}
    for key in (*ARMS, "to_parent", "to_finetuned"):
        arm = key.removeprefix("to_")
        values_of = [accuracy(run, arm if key in ARMS else "recast") for run in runs]
        if key not in ARMS:
            values_of = [value - accuracy(run, arm) for value, run in zip(values_of, runs, strict=True)]
        mean[key], mean[f"{key}_interval"] = _mean(values_of, signed=key not in ARMS)
    return lines, mean


def _mean(values: Sequence[float], signed: bool = False, digits: int = 1) -> tuple[str, str]:
    if not all(math.isfinite(value) for value in values):
        return formats.MISSING, ""
    mean, low, high = mean_interval(values)
    return (formats.signed if signed else formats.decimal)(mean, digits), formats.interval(low, high, digits)


def over_seeds(runs: Sequence[Run]) -> list[SeedLine]:
    """Every measure that all runs have, paired over the seeds; empty where the runs differ in more than that."""
    if not seeds_apart(runs):
        return []
    lines = []
    keys = dict.fromkeys((row.suite, row.metric) for row in runs[0].rows)
    for suite, metric in keys:
        if PER_CORRUPTION.match(metric) or (suite in CORRUPTIONS and not metric.endswith(("mean", "mce"))):
            continue
        if len({row.n for run in runs if (row := run.row("recast", suite, metric))}) > 1:
            continue  # measured on different images
        name = base(metric)
        digits = 3 if name == "loss" else 1
        arms = {arm: [run.value(arm, suite, metric) for run in runs] for arm in ARMS}
        if name in {"parameters", "macs"} or not all(map(math.isfinite, arms["recast"])):
            continue
        values = {arm: _seed_value(name, found, digits) for arm, found in arms.items()}
        differences = {}
        for arm in ("parent", "finetuned"):
            gaps = [recast - other for recast, other in zip(arms["recast"], arms[arm], strict=True)]
            text, interval = _mean(gaps, signed=True, digits=digits)
            better = ""
            if interval:
                mean, low, high = mean_interval(gaps)
                sure = (low > 0 or high < 0) and is_accuracy(metric)
                better = ("recast" if mean > 0 else arm) if sure else ""
            differences[arm] = (text, interval, better)
        lines.append(SeedLine(f"{SUITES.get(suite, suite)}, {metric}", values, differences))
    return lines


def _seed_value(name: str, values: Sequence[float], digits: int) -> str:
    known = all(math.isfinite(value) for value in values)
    return write(name, sum(values) / len(values), digits) if known else formats.MISSING


def _switched(run: Run) -> str:
    """In which epochs layers became attention, empty where none has."""
    epochs = [switch.epoch for switch in run.schedule.switches] if run.schedule else []
    if not epochs:
        return ""
    return f"epoch{formats.NBSP}{epochs[0]}" + (f" to {epochs[-1]}" if epochs[-1] != epochs[0] else "")
