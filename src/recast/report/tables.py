"""The tables of the page as cells of text, ready to print."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from recast.report import formats
from recast.report.read import ARMS, Row, Run
from recast.report.verdict import accuracy, is_exact, seeds_apart

SUITES = {
    "clean": "Clean images",
    "fgsm": "FGSM, one gradient step",
    "pgd": "PGD, iterated in an L∞ ball",
    "basic": "Corruptions (basic)",
    "cost": "Cost",
}
METRICS = {
    "top1": f"Top-1,{formats.NBSP}%",
    "top5": f"Top-5,{formats.NBSP}%",
    "loss": "Loss",
    "parameters": "Parameters",
    "macs": "MACs per image",
    "images_per_second": "Images per second",
}
LOWER_IS_BETTER = {"loss", "parameters", "macs"}
PER_CORRUPTION = re.compile(r"^top1/(?P<kind>.+)/(?P<severity>\d+)$")


@dataclass(frozen=True)
class Difference:
    text: str
    better: str = ""
    """The arm that does better, empty for a tie or an unknown."""


@dataclass(frozen=True)
class Line:
    label: str
    values: dict[str, str]
    exact: dict[str, str]
    """The full number, shown on hover."""
    to_parent: Difference
    to_finetuned: Difference
    n: str
    bar: Bar | None = None


@dataclass(frozen=True)
class Bar:
    """A difference of accuracies, in percent of a track whose middle is 0."""

    against: str
    better: str
    left: float
    width: float
    error: float
    """Half the width of ± one standard error."""


@dataclass(frozen=True)
class Group:
    title: str
    lines: list[Line]


@dataclass(frozen=True)
class Cell:
    value: str
    difference: str
    better: str
    strength: int
    """0..100: how strongly the cell is coloured."""


@dataclass(frozen=True)
class HeatTable:
    suite: str
    against: str
    severities: list[int]
    lines: dict[str, list[Cell]] = field(default_factory=dict)


def three_arms(run: Run) -> list[Group]:
    """Every measured number of every suite, corruption by corruption left to `heat_tables`."""
    datasets = {row.dataset for row in run.rows}
    groups: list[Group] = []
    measured: list[list[list[Row]]] = []
    kept = [row for row in run.rows if not PER_CORRUPTION.match(row.metric)]
    keys = list(dict.fromkeys((row.suite, row.dataset) for row in kept))
    order = list(SUITES)
    keys.sort(key=lambda key: order.index(key[0]) if key[0] in order else len(order) - 1.5)
    for suite, dataset in keys:
        rows = [row for row in kept if (row.suite, row.dataset) == (suite, dataset)]
        metrics = sorted(dict.fromkeys(row.metric for row in rows), key=_metric_order)
        title = SUITES.get(suite, suite) + (f" · {dataset}" if len(datasets) > 1 else "")
        bases = {metric.partition("@")[0].partition("/")[0] for metric in metrics if metric not in METRICS}
        shared = bases.pop() if len(bases) == 1 and not set(metrics) & set(METRICS) else ""
        if shared:
            title = f"{title}: {METRICS.get(shared, shared).lower()}"
        measured.append([[row for row in rows if row.metric == metric] for metric in metrics])
        groups.append(Group(title, [_line(line, shared) for line in measured[-1]]))
    bars = _bars(measured)
    return [
        Group(group.title, [replace(line, bar=bar) for line, bar in zip(group.lines, track, strict=True)])
        for group, track in zip(groups, bars, strict=True)
    ]


def _bars(measured: Sequence[Sequence[Sequence[Row]]]) -> list[list[Bar | None]]:
    """Recast − control arm (− parent without one) of every accuracy, all on one scale."""
    rows = [row for lines in measured for line in lines for row in line]
    against = "finetuned" if any(row.model == "finetuned" for row in rows) else "parent"

    def gap(line: Sequence[Row]) -> tuple[float, float]:
        """(difference, its standard error as if the arms saw different images), in points."""
        by_arm = {row.model: row for row in line}
        if not {"recast", against} <= set(by_arm) or not _is_percent(line[0].metric):
            return math.nan, math.nan
        recast, other = by_arm["recast"], by_arm[against]
        variance = sum(row.value * (100 - row.value) / row.n if row.n else math.nan for row in (recast, other))
        return recast.value - other.value, math.sqrt(variance) if variance >= 0 else math.nan

    gaps = [[gap(line) for line in lines] for lines in measured]
    sizes = [abs(size) for lines in gaps for pair in lines for size in pair if math.isfinite(size)]
    scale = 50 / max(sizes) if sizes and max(sizes) > 0 else 0.0

    def bar(difference: float, error: float) -> Bar | None:
        if not math.isfinite(difference):
            return None
        width = abs(difference) * scale
        return Bar(
            against,
            "recast" if difference > 0 else against,
            round(50 - (width if difference < 0 else 0), 2),
            round(width, 2),
            round(error * scale, 2) if math.isfinite(error) else 0.0,
        )

    return [[bar(*pair) for pair in lines] for lines in gaps]


def _is_percent(metric: str) -> bool:
    return metric.partition("@")[0].partition("/")[0] in {"top1", "top5"}


def _metric_order(metric: str) -> tuple[int, float]:
    known = list(METRICS)
    name, _, epsilon = metric.partition("@")
    try:
        return (known.index(name) if name in known else len(known), float(epsilon or 0))
    except ValueError:
        return (len(known), 0.0)


def _line(rows: Sequence[Row], shared: str) -> Line:
    metric = rows[0].metric
    by_arm = {row.model: row for row in rows}
    values = {arm: by_arm[arm].value if arm in by_arm else math.nan for arm in ARMS}
    name = metric.partition("@")[0].partition("/")[0]
    counted = name in {"parameters", "macs"}
    digits = 4 if name == "loss" else 2 if max((row.n for row in rows), default=0) >= 2000 else 1

    def write(value: float) -> str:
        if name == "images_per_second":
            return formats.decimal(value, 0 if value >= 100 else 1)
        return formats.compact(value) if counted else formats.decimal(value, digits)

    def difference(other: str) -> Difference:
        gain = values["recast"] - values[other]
        if not math.isfinite(gain):
            return Difference(formats.MISSING)
        if counted or name == "images_per_second":
            share = 100 * gain / values[other] if values[other] else math.nan
            text = f"{formats.signed(share, 1)}{formats.NBSP}%" if math.isfinite(share) else formats.signed(gain, 0)
        else:
            text = formats.signed(gain, max(digits, 2) if 0 < abs(gain) < 0.05 else digits)
        better = "" if gain == 0 else "recast" if (gain > 0) != (name in LOWER_IS_BETTER) else other
        return Difference(text, better)

    images = sorted({row.n for row in rows if row.n})
    return Line(
        label=_label(metric.removeprefix(shared)),
        values={arm: write(values[arm]) for arm in ARMS},
        exact={arm: f"{values[arm]:,.10g}" if math.isfinite(values[arm]) else "not measured" for arm in ARMS},
        to_parent=difference("parent"),
        to_finetuned=difference("finetuned"),
        n="" if name in {"parameters", "macs"} else formats.MISSING if not images else f"{images[-1]:,}",
    )


def _label(metric: str) -> str:
    name, _, epsilon = metric.partition("@")
    base, _, detail = name.partition("/")
    parts = [METRICS.get(base, base), "mean of all" if detail == "mean" else detail]
    if epsilon:
        parts.append(f"ε{formats.NBSP}={formats.NBSP}{epsilon}/255")
    return ", ".join(part for part in parts if part)


def heat_tables(run: Run) -> list[HeatTable]:
    """Kinds × severities of each corruption suite: top-1 of the recast model and the difference to the control arm."""
    tables = []
    found = [(row, match) for row in run.rows if (match := PER_CORRUPTION.match(row.metric))]
    for suite in dict.fromkeys(row.suite for row, _ in found):
        values = {
            (row.model, match["kind"], int(match["severity"])): row.value for row, match in found if row.suite == suite
        }
        against = "finetuned" if any(arm == "finetuned" for arm, _, _ in values) else "parent"
        severities = sorted({severity for _, _, severity in values})
        differences = {
            (kind, severity): value - values.get((against, kind, severity), math.nan)
            for (arm, kind, severity), value in values.items()
            if arm == "recast"
        }
        largest = max((abs(value) for value in differences.values() if math.isfinite(value)), default=0.0) or 1.0
        table = HeatTable(suite, against, severities)
        for kind in dict.fromkeys(kind for _, kind, _ in values):
            cells = []
            for severity in severities:
                difference = differences.get((kind, severity), math.nan)
                known = math.isfinite(difference) and difference != 0
                cells.append(
                    Cell(
                        value=formats.decimal(values.get(("recast", kind, severity), math.nan)),
                        difference=formats.signed(difference),
                        better=("recast" if difference > 0 else against) if known else "",
                        strength=round(55 * abs(difference) / largest) if known else 0,
                    )
                )
            table.lines[kind] = cells
        tables.append(table)
    return tables


def summary(runs: Sequence[Run]) -> tuple[list[dict[str, str]], dict[str, str] | None]:
    """A line per run, and mean ± standard deviation where the runs differ in nothing but the seed."""
    lines = []
    for run in runs:
        values = {arm: accuracy(run, arm) for arm in ARMS}
        seed = run.recipe.get("seed", formats.MISSING)
        start = "unmeasured" if run.verify is None else "exact" if is_exact(run) else "inexact"
        lines.append(
            {
                "name": run.name,
                "what": f"{run.model} on {run.dataset}, {run.layer_kind}",
                "how": f"{start} {'recast' if run.is_scheduled else 'start'}, {run.epochs} epochs, seed {seed}",
                "schedule": run.schedule_name.replace("_", " "),
                "switches": _switched(run),
                **{arm: formats.decimal(values[arm]) for arm in ARMS},
                "to_parent": formats.signed(values["recast"] - values["parent"], 1),
                "to_finetuned": formats.signed(values["recast"] - values["finetuned"], 1),
            }
        )
    if not seeds_apart(runs):
        return lines, None
    mean: dict[str, str] = {}
    for key in (*ARMS, "to_parent", "to_finetuned"):
        arm = key.removeprefix("to_")
        values_of = [accuracy(run, arm if key in ARMS else "recast") for run in runs]
        if key not in ARMS:
            values_of = [value - accuracy(run, arm) for value, run in zip(values_of, runs, strict=True)]
        known = all(math.isfinite(value) for value in values_of)
        write = formats.decimal if key in ARMS else formats.signed
        mean[key] = (
            f"{write(statistics.mean(values_of))} ± {formats.decimal(statistics.stdev(values_of))}"
            if known
            else formats.MISSING
        )
    return lines, mean


def _switched(run: Run) -> str:
    """In which epochs layers became attention, empty where none has."""
    epochs = [switch.epoch for switch in run.schedule.switches] if run.schedule else []
    if not epochs:
        return ""
    return f"epoch{formats.NBSP}{epochs[0]}" + (f" to {epochs[-1]}" if epochs[-1] != epochs[0] else "")
