"""The three arms side by side: every measured number, what the recast network has more, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from recast.report.read.run import ARMS, Run
from recast.report.tables.names import LOWER_IS_BETTER, METRICS, PER_CORRUPTION, SUITES, SWEPT, base, is_accuracy
from recast.report.text import formats
from recast.run.records import Difference, Row

TEST_SETS = {"imagenet-a", "imagenet-r", "imagenet-v2", "imagenet-sketch", "imagenet-real"}
OWN_DATA = {"clean", "fgsm", "pgd", "autoattack", "basic", "corruptions", "cost", "resolution", "knn", "frequency"}
"""Suites that go over the run's own images: a second data set among them is named."""
SHARES = {"parameters", "macs", "images_per_second", "peak_memory"}
"""Their differences are written in percent."""


@dataclass(frozen=True)
class Gap:
    """What the recast network has more than another arm."""

    text: str
    better: str = ""
    """The arm that does better; empty for a tie, an unknown, or where the interval holds 0."""
    interval: str = ""
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class Line:
    label: str
    values: dict[str, str]
    intervals: dict[str, str]
    """`93.1 to 97.4`, "" where there is none."""
    exact: dict[str, str]
    """The full number, shown on hover."""
    to_parent: Gap
    to_finetuned: Gap
    n: str
    bar: Bar | None = None


@dataclass(frozen=True)
class Bar:
    """A difference of accuracies, in percent of a track whose middle is 0."""

    against: str
    better: str
    left: float
    width: float
    span_left: float
    span_width: float
    """The 95 % interval of the paired difference where there is one, otherwise ± one standard error around 0."""
    paired: bool


@dataclass(frozen=True)
class Group:
    title: str
    lines: list[Line]


def three_arms(run: Run) -> list[Group]:
    """Every suite but the swept ones, corruption by corruption left to `heat_tables`."""
    return _groups(run, [row for row in run.rows if row.suite not in SWEPT])


def swept(run: Run) -> list[Group]:
    """The suites that vary one thing at test time, whose charts say most."""
    return _groups(run, [row for row in run.rows if row.suite in SWEPT])


def _groups(run: Run, rows: Sequence[Row]) -> list[Group]:
    masked = any(row.metric == "no_gradient" and row.value > 0 for row in rows)  # worth a line only then
    kept = [row for row in rows if not PER_CORRUPTION.match(row.metric) and (masked or row.metric != "no_gradient")]
    own = {row.dataset for row in kept if row.suite in OWN_DATA}
    by_group: dict[tuple[str, str], list[Row]] = {}
    for row in kept:
        together = "sets" if row.suite in TEST_SETS else row.suite
        dataset = row.dataset if row.suite in OWN_DATA and len(own) > 1 else ""
        by_group.setdefault((together, dataset), []).append(row)
    order = list(SUITES)
    keys = sorted(by_group, key=lambda key: order.index(key[0]) if key[0] in order else len(order) - 1.5)
    groups: list[Group] = []
    measured: list[list[list[Row]]] = []
    for suite, dataset in keys:
        rows = by_group[suite, dataset]
        lines = list(dict.fromkeys((row.suite, row.metric) for row in rows))
        lines.sort(key=lambda line: (order.index(line[0]) if line[0] in order else 0, *_metric_order(line[1])))
        metrics = [metric for _, metric in lines]
        title = SUITES.get(suite, suite) + (f" · {dataset}" if dataset else "")
        bases = {base(metric) for metric in metrics if metric not in METRICS}
        shared = bases.pop() if len(bases) == 1 and not set(metrics) & set(METRICS) else ""
        if shared and shared in METRICS:
            title = f"{title}: {METRICS[shared].lower()}"
        measured.append([[row for row in rows if (row.suite, row.metric) == line] for line in lines])
        groups.append(Group(title, [_line(run, line, shared) for line in measured[-1]]))
    bars = _bars(run, measured)
    return [
        Group(group.title, [replace(line, bar=bar) for line, bar in zip(group.lines, track, strict=True)])
        for group, track in zip(groups, bars, strict=True)
    ]


def _bars(run: Run, measured: Sequence[Sequence[Sequence[Row]]]) -> list[list[Bar | None]]:
    """Recast − control arm (− parent without one) of every accuracy, all on one scale."""
    rows = [row for lines in measured for line in lines for row in line]
    against = "finetuned" if any(row.model == "finetuned" for row in rows) else "parent"

    def gap(line: Sequence[Row]) -> tuple[float, float, float, bool]:
        """(difference, from, to, paired?) in points: the interval, or ± one standard error around 0."""
        by_arm = {row.model: row for row in line}
        if not {"recast", against} <= set(by_arm) or not is_accuracy(line[0].metric):
            return math.nan, math.nan, math.nan, False
        recast, other = by_arm["recast"], by_arm[against]
        paired = run.difference("recast", against, recast.suite, recast.metric)
        if paired is not None and math.isfinite(paired.low) and math.isfinite(paired.high):
            return recast.value - other.value, paired.low, paired.high, True
        # As if the arms had seen different images: nothing paired is known.
        variance = sum(row.value * (100 - row.value) / row.n if row.n else math.nan for row in (recast, other))
        error = math.sqrt(variance) if variance >= 0 else math.nan
        return recast.value - other.value, -error, error, False

    gaps = [[gap(line) for line in lines] for lines in measured]
    paired = [abs(end) for lines in gaps for _, low, high, sure in lines if sure for end in (low, high)]
    sizes = [abs(line[0]) for lines in gaps for line in lines if math.isfinite(line[0])] + paired
    scale = 50 / max(sizes) if sizes and max(sizes) > 0 else 0.0

    def bar(difference: float, low: float, high: float, sure: bool) -> Bar | None:
        if not math.isfinite(difference):
            return None
        width = abs(difference) * scale
        start, end = ((50 + value * scale if math.isfinite(value) else 50.0) for value in (low, high))
        return Bar(
            against,
            "recast" if difference > 0 else against,
            round(50 - (width if difference < 0 else 0), 2),
            round(width, 2),
            round(start, 2),
            round(end - start, 2),
            sure,
        )

    return [[bar(*line) for line in lines] for lines in gaps]


def _metric_order(metric: str) -> tuple[int, float]:
    known = [*METRICS, "low", "high"]
    name, _, strength = metric.partition("@")
    try:
        return (known.index(name) if name in known else len(known), float(strength.partition("x")[0] or 0))
    except ValueError:
        return (len(known), 0.0)


def _line(run: Run, rows: Sequence[Row], shared: str) -> Line:
    metric, suite = rows[0].metric, rows[0].suite
    by_arm = {row.model: row for row in rows}
    values = {arm: by_arm[arm].value if arm in by_arm else math.nan for arm in ARMS}
    name = base(metric)
    digits = 4 if name == "loss" else 2 if max((row.n for row in rows), default=0) >= 2000 else 1

    def gap(other: str) -> Gap:
        found = _gap(name, values["recast"] - values[other], values[other], other, digits)
        paired = run.difference("recast", other, suite, metric)
        return _with_interval(found, paired, digits) if paired is not None and found.text != formats.MISSING else found

    images = sorted({row.n for row in rows if row.n})
    return Line(
        label=_label(metric.removeprefix(shared), suite),
        values={arm: write(name, values[arm], digits) for arm in ARMS},
        intervals={arm: _interval(by_arm.get(arm), name, digits) for arm in ARMS},
        exact={arm: f"{values[arm]:,.10g}" if math.isfinite(values[arm]) else "not measured" for arm in ARMS},
        to_parent=gap("parent"),
        to_finetuned=gap("finetuned"),
        n="" if name in {"parameters", "macs"} else formats.MISSING if not images else f"{images[-1]:,}",
    )


def write(name: str, value: float, digits: int) -> str:
    """A value of the metric `name`."""
    if name == "images_per_second":
        return formats.decimal(value, 0 if value >= 100 else 1)
    if name == "peak_memory":
        return formats.memory(value)
    return formats.compact(value) if name in {"parameters", "macs"} else formats.decimal(value, digits)


def _gap(name: str, gain: float, other: float, arm: str, digits: int) -> Gap:
    if not math.isfinite(gain):
        return Gap(formats.MISSING)
    if name in SHARES:
        share = 100 * gain / other if other else math.nan
        text = f"{formats.signed(share, 1)}{formats.NBSP}%" if math.isfinite(share) else formats.signed(gain, 0)
    else:
        text = formats.signed(gain, max(digits, 2) if 0 < abs(gain) < 0.05 else digits)
    better = "" if gain == 0 else "recast" if (gain > 0) != (name in LOWER_IS_BETTER) else arm
    return Gap(text, better)


def _with_interval(gap: Gap, paired: Difference, digits: int) -> Gap:
    if not (math.isfinite(paired.low) and math.isfinite(paired.high)):
        return gap
    digits = min(digits, 3)
    sure = leaves_out_zero(paired.low, paired.high, digits)
    interval = formats.interval(paired.low, paired.high, digits)
    return replace(gap, better=gap.better if sure else "", interval=interval, low=paired.low, high=paired.high)


def leaves_out_zero(low: float, high: float, digits: int) -> bool:
    """The interval as it is written: one that ends at `0.0` does not leave out 0."""
    return round(low, digits) > 0 or round(high, digits) < 0


def _interval(row: Row | None, name: str, digits: int) -> str:
    if row is None or row.low is None or row.high is None or not (math.isfinite(row.low) and math.isfinite(row.high)):
        return ""
    digits = min(digits, 3)  # of a loss, for room
    return f"{write(name, row.low, digits)} to {write(name, row.high, digits)}"


def _label(metric: str, suite: str) -> str:
    name, _, setting = metric.partition("@")
    first, _, detail = name.partition("/")
    if suite in TEST_SETS:
        return SUITES[suite] if metric == "top1" else f"{SUITES[suite]}, {METRICS.get(first, first)}"
    parts = [METRICS.get(first, first), "mean of all" if detail == "mean" else detail]
    if setting:
        space = formats.NBSP
        if suite == "resolution":
            height, _, width = setting.partition("x")
            parts.append(f"{height} × {width or height}".replace(" ", space))
        elif suite == "knn":
            parts.append(f"k{space}={space}{setting}")
        elif suite == "frequency":
            parts = [f"{'below' if first == 'low' else 'above'} {setting}π kept"]
        else:
            parts.append(f"ε{space}={space}{setting}/255")
    return ", ".join(part for part in parts if part)
