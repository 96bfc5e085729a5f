"""The three arms side by side: every measured number, what the recast network has more, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence

from recast.report import formats
from recast.report.formats import NBSP
from recast.report.labels import is_accuracy, metric_label, suite_title, words
from recast.report.load import ARMS, Run
from recast.report.table import Bar, Cell, Group, Table, head
from recast.run.records import Row
from recast.run.suites import METRICS, PER_CORRUPTION, SUITES, base, of_kind

TEST_SETS, SWEPT = of_kind("test set"), of_kind("sweep")
ORDER = list(SUITES)
Line = list[Row]
"""The arms' rows of one suite and metric."""


def arm_heads(run: Run, *runs: Run) -> list[Cell]:
    """The heads of the columns of the arms and, where there is something to compare, of the differences."""
    names = words(run, *runs).arms
    heads = [head(name, arm) for arm, name in names.items()]
    others = [names[arm].rpartition(", ")[2].lower() for arm in ("parent", "finetuned") if "recast" in names]
    return heads + [head(f"Recast − {name}", "gap") for name in others]


def arms_table(run: Run) -> Table:
    """Every suite but the swept ones, corruption by corruption left to `heat_tables`."""
    return _table(run, "Three arms, every measurement", [row for row in run.rows if row.suite not in SWEPT])


def swept_table(run: Run) -> Table:
    """The suites that vary one thing at test time, whose charts say most."""
    return _table(run, "What is varied at test time", [row for row in run.rows if row.suite in SWEPT])


def _table(run: Run, label: str, rows: Sequence[Row]) -> Table:
    against = "finetuned" if any(row.model == "finetuned" for row in rows) else "parent"
    groups, bars = [], list[Bar]()
    for title, lines in _grouped(rows).items():
        metrics = [line[0].metric for line in lines]
        bases = {base(metric) for metric in metrics}
        shared = bases.pop() if len(bases) == 1 and not set(metrics) & set(METRICS) else ""
        if shared in METRICS:
            title = f"{title}: {metric_label(shared).lower()}"
        groups.append(Group(title, [_cells(run, line, shared, against) for line in lines]))
        bars += [cell.bar for row in groups[-1].rows for cell in row if cell.bar]
    ends = [abs(end) for bar in bars for end in (bar.value, *((bar.low, bar.high) if bar.paired else ()))]
    scale = 50 / max(ends) if ends and max(ends) > 0 else 0.0
    return Table(label, [Cell("Measured"), *arm_heads(run), Cell("Images")], groups, scale=scale)


def _grouped(rows: Sequence[Row]) -> dict[str, list[Line]]:
    """Title → lines: a group for every suite, the other test sets in one.

    Suites that are not known come before the costs; metrics stand as they were measured.
    """
    masked = any(row.metric == "no_gradient" and row.value > 0 for row in rows)  # worth a line only then
    kept = [row for row in rows if not PER_CORRUPTION.match(row.metric) and (masked or row.metric != "no_gradient")]
    kept.sort(key=lambda row: ORDER.index(row.suite) if row.suite in ORDER else ORDER.index("cost") - 0.5)
    groups: dict[str, dict[tuple[str, str], Line]] = {}
    for row in kept:
        title = f"Other test sets: top-1,{NBSP}%" if row.suite in TEST_SETS else suite_title(row.suite)
        groups.setdefault(title, {}).setdefault((row.suite, row.metric), []).append(row)
    return {title: list(lines.values()) for title, lines in groups.items()}


def _bar(run: Run, line: Line, against: str) -> Bar | None:
    """The difference of accuracies in points, with its interval or ± one standard error around 0."""
    by_arm = {row.model: row for row in line}
    if not {"recast", against} <= set(by_arm) or not is_accuracy(line[0].metric):
        return None
    recast, other = by_arm["recast"], by_arm[against]
    difference = recast.value - other.value
    if not math.isfinite(difference):
        return None
    better = "recast" if difference > 0 else against
    if paired := run.difference(against, recast.suite, recast.metric):
        return Bar(better, difference, paired.low, paired.high, True)
    # As if the arms had seen different images: nothing paired is known.
    variance = sum(row.value * (100 - row.value) / row.n if row.n else 0 for row in (recast, other))
    error = math.sqrt(max(variance, 0))
    return Bar(better, difference, -error, error, False)


def _cells(run: Run, line: Line, shared: str, against: str) -> list[Cell]:
    suite, metric = line[0].suite, line[0].metric
    name, by_arm = base(metric), {row.model: row for row in line}
    values = {arm: by_arm[arm].value if arm in by_arm else math.nan for arm in ARMS}
    digits = 4 if name == "loss" else 2 if max(row.n for row in line) >= 2000 else 1
    cells = [Cell(_label(metric.removeprefix(shared), suite))]
    arms = words(run).arms
    for arm in arms:
        exact = f"{values[arm]:,.10g}" if math.isfinite(values[arm]) else "not measured"
        small = _interval(by_arm.get(arm), name, digits)
        cells.append(Cell(write(name, values[arm], digits), small, exact, arm))
    for other in ("parent", "finetuned") if "recast" in arms else ():
        bar = _bar(run, line, against) if other == against else None
        cells.append(_difference(run, suite, metric, values["recast"], values[other], other, digits, bar))
    images = max(row.n for row in line)
    return [*cells, Cell("" if name in {"parameters", "macs"} else f"{images:,}" if images else formats.MISSING)]


def write(name: str, value: float, digits: int) -> str:
    """A value of the metric `name`."""
    if name == "images_per_second":
        return formats.decimal(value, 0 if value >= 100 else 1)
    if name == "peak_memory":
        return formats.memory(value)
    return formats.compact(value) if name in {"parameters", "macs"} else formats.decimal(value, digits)


def _difference(
    run: Run, suite: str, metric: str, recast: float, value: float, other: str, digits: int, bar: Bar | None
) -> Cell:
    """Coloured by the arm that does better; by none for a tie, and where the interval holds 0."""
    gain, known = recast - value, METRICS.get(base(metric))
    if not math.isfinite(gain):
        return Cell(formats.MISSING, bar=bar)
    if known and known.is_cost:
        text = formats.share(recast, value, 1) or formats.signed(gain, 0)
    else:
        text = formats.signed(gain, max(digits, 2) if 0 < abs(gain) < 0.05 else digits)
    lower = known is not None and known.lower_is_better
    better = "" if gain == 0 else "recast" if (gain > 0) != lower else other
    small: tuple[str, ...] = ()
    if paired := run.difference(other, suite, metric):
        digits = min(digits, 3)
        better = better if leaves_out_zero(paired.low, paired.high, digits) else ""
        small = (formats.interval(paired.low, paired.high, digits),)
    return Cell(text, small, kind=f"by-{better}", bar=bar)


def leaves_out_zero(low: float, high: float, digits: int) -> bool:
    """The interval as it is written: one that ends at `0.0` does not leave out 0."""
    return round(low, digits) > 0 or round(high, digits) < 0


def _interval(row: Row | None, name: str, digits: int) -> tuple[str, ...]:
    if row is None or row.low is None or row.high is None or not (math.isfinite(row.low) and math.isfinite(row.high)):
        return ()
    digits = min(digits, 3)  # of a loss, for room
    return (f"{write(name, row.low, digits)} to {write(name, row.high, digits)}",)


def _label(metric: str, suite: str) -> str:
    name, _, setting = metric.partition("@")
    first, _, detail = name.partition("/")
    if suite in TEST_SETS:
        return suite_title(suite) if metric == "top1" else f"{suite_title(suite)}, {metric_label(first)}"
    if suite == "resolution" and setting:
        height, _, width = setting.partition("x")
        setting = f"{height} × {width or height}"
    elif setting and suite in SUITES:
        setting = SUITES[suite].setting.format(setting)
    if suite == "frequency":
        return f"{'below' if first == 'low' else 'above'} {setting}"
    parts = [metric_label(first), "mean of all" if detail == "mean" else detail, setting.replace(" ", NBSP)]
    return ", ".join(part for part in parts if part)


def heat_tables(run: Run) -> list[tuple[str, str, Table]]:
    """(suite, arm compared with, top-1 of the recast model and the difference by kind and severity of corruption)."""
    tables = []
    found = [(row, match) for row in run.rows if (match := PER_CORRUPTION.match(row.metric))]
    for suite in dict.fromkeys(row.suite for row, _ in found):
        metrics = {(match["kind"], match["severity"]): row.metric for row, match in found if row.suite == suite}
        severities = sorted({severity for _, severity in metrics}, key=int)
        against = "finetuned" if any((row.suite, row.model) == (suite, "finetuned") for row, _ in found) else "parent"
        gaps = {one: run.value("recast", suite, one) - run.value(against, suite, one) for one in metrics.values()}
        largest = max((abs(gap) for gap in gaps.values() if math.isfinite(gap)), default=0.0) or 1.0
        rows = []
        for kind in dict.fromkeys(kind for kind, _ in metrics):
            rows.append([Cell(kind.replace("_", " "))])
            for severity in severities:
                metric = metrics.get((kind, severity), "")
                gap, paired = gaps.get(metric, math.nan), run.difference(against, suite, metric)
                known = math.isfinite(gap) and gap != 0
                known = known and (paired is None or leaves_out_zero(paired.low, paired.high, 1))
                title = f"95 % interval: {formats.interval(paired.low, paired.high)}" if paired else ""
                kind_of = f"b-{('recast' if gap > 0 else against) if known else ''}"
                strength = round(55 * abs(gap) / largest) if known else 0
                value = formats.decimal(run.value("recast", suite, metric))
                rows[-1].append(Cell(value, (formats.signed(gap),), title, kind_of, strength=strength))
        name = suite_title(suite, short=True)
        label, heads = f"Corruption by corruption, {name}", [Cell("Severity"), *map(Cell, severities)]
        tables.append((name, against, Table(label, heads, [Group("", rows)], kind="heat")))
    return tables
