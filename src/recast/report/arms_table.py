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
    grouped = _grouped(rows)
    gaps = [_gap(run, line, against) for _, lines in grouped for line in lines]
    ends = [abs(end) for gap in gaps if gap for end in (gap[0], *(gap[1:3] if gap[3] else ()))]
    scale = 50 / max(ends) if ends and max(ends) > 0 else 0.0
    groups = []
    for title, lines in grouped:
        metrics = [line[0].metric for line in lines]
        bases = {base(metric) for metric in metrics}
        shared = bases.pop() if len(bases) == 1 and not set(metrics) & set(METRICS) else ""
        if shared in METRICS:
            title = f"{title}: {metric_label(shared).lower()}"
        groups.append(Group(title, [_cells(run, line, shared, against, scale) for line in lines]))
    return Table(label, [Cell("Measured"), *arm_heads(run), Cell("Images")], groups)


def _grouped(rows: Sequence[Row]) -> list[tuple[str, list[Line]]]:
    """(title, lines): a group for every suite (and data set, where a suite saw several), the other test sets in one."""
    masked = any(row.metric == "no_gradient" and row.value > 0 for row in rows)  # worth a line only then
    kept = [row for row in rows if not PER_CORRUPTION.match(row.metric) and (masked or row.metric != "no_gradient")]
    own = {row.dataset for row in kept if row.suite in SUITES and SUITES[row.suite].uses_own_images}
    lines: dict[tuple[str, str, str, str], Line] = {}
    for row in kept:
        together = "sets" if row.suite in TEST_SETS else row.suite
        data = row.dataset if row.dataset in own and len(own) > 1 else ""
        lines.setdefault((together, data, row.suite, row.metric), []).append(row)
    groups: dict[str, list[Line]] = {}
    for together, data, suite, metric in sorted(lines, key=lambda key: (_suite_order(key[0]), *_order(key[2], key[3]))):
        title = f"Other test sets: top-1,{NBSP}%" if together == "sets" else suite_title(together)
        groups.setdefault(title + (f" · {data}" if data else ""), []).append(lines[together, data, suite, metric])
    return list(groups.items())


def _suite_order(suite: str) -> float:
    """Those that are not known come before the costs."""
    name = TEST_SETS[0] if suite == "sets" else suite
    return ORDER.index(name) if name in ORDER else ORDER.index("cost") - 0.5


def _order(suite: str, metric: str) -> tuple[int, int, float]:
    known = list(METRICS)
    name, _, setting = metric.partition("@")
    try:
        strength = float(setting.partition("x")[0] or 0)
    except ValueError:
        strength = math.inf
    place = known.index(name) if name in known else len(known)
    return (ORDER.index(suite) if suite in ORDER else 0, place, strength)


def _gap(run: Run, line: Line, against: str) -> tuple[float, float, float, bool] | None:
    """(difference, from, to, paired?) of accuracies in points: the interval, or ± one standard error around 0."""
    by_arm = {row.model: row for row in line}
    if not {"recast", against} <= set(by_arm) or not is_accuracy(line[0].metric):
        return None
    recast, other = by_arm["recast"], by_arm[against]
    difference = recast.value - other.value
    if not math.isfinite(difference):
        return None
    if paired := run.difference(against, recast.suite, recast.metric):
        return difference, paired.low, paired.high, True
    # As if the arms had seen different images: nothing paired is known.
    variance = sum(row.value * (100 - row.value) / row.n if row.n else 0 for row in (recast, other))
    error = math.sqrt(max(variance, 0))
    return difference, -error, error, False


def _bar(gap: tuple[float, float, float, bool], scale: float, against: str) -> Bar:
    difference, low, high, paired = gap
    width, start, end = abs(difference) * scale, 50 + low * scale, 50 + high * scale
    left = 50 - (width if difference < 0 else 0)
    better = "recast" if difference > 0 else against
    return Bar(better, round(left, 2), round(width, 2), round(start, 2), round(end - start, 2), paired)


def _cells(run: Run, line: Line, shared: str, against: str, scale: float) -> list[Cell]:
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
        gap = _gap(run, line, against) if other == against else None
        bar = _bar(gap, scale, against) if gap else None
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
        values = {(row.model, match[1], match[2]): row.value for row, match in found if row.suite == suite}
        against = "finetuned" if any(arm == "finetuned" for arm, _, _ in values) else "parent"
        severities = sorted({severity for _, _, severity in values}, key=int)
        differences = {
            (kind, severity): value - values.get((against, kind, severity), math.nan)
            for (arm, kind, severity), value in values.items()
            if arm == "recast"
        }
        largest = max((abs(value) for value in differences.values() if math.isfinite(value)), default=0.0) or 1.0
        rows = []
        for kind in dict.fromkeys(kind for _, kind, _ in values):
            rows.append([Cell(kind.replace("_", " "))])
            for severity in severities:
                difference = differences.get((kind, severity), math.nan)
                paired = run.difference(against, suite, f"top1/{kind}/{severity}")
                known = math.isfinite(difference) and difference != 0
                known = known and (paired is None or leaves_out_zero(paired.low, paired.high, 1))
                better = ("recast" if difference > 0 else against) if known else ""
                rows[-1].append(
                    Cell(
                        formats.decimal(values.get(("recast", kind, severity), math.nan)),
                        (formats.signed(difference),),
                        title=f"95 % interval: {formats.interval(paired.low, paired.high)}" if paired else "",
                        kind=f"b-{better}",
                        strength=round(55 * abs(difference) / largest) if known else 0,
                    )
                )
        name = suite_title(suite, short=True)
        label, heads = f"Corruption by corruption, {name}", [Cell("Severity"), *map(Cell, severities)]
        tables.append((name, against, Table(label, heads, [Group("", rows)], kind="heat")))
    return tables
