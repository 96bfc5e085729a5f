"""The three arms side by side: every measured number, what the recast network has more, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence

from recast.lab.records import ARMS, Row
from recast.lab.report import formats
from recast.lab.report.formats import NBSP
from recast.lab.report.labels import TEST_SETS, is_accuracy, measured, metric_label, suite_title, words, worth_a_line
from recast.lab.report.load import Run
from recast.lab.report.table import Bar, Cell, Group, PageTable
from recast.lab.suites import METRICS, PER_CLASS, PER_CORRUPTION, SUITES, base, of_kind

SWEPT = of_kind("sweep")
LABELS = {
    "arms": "The networks compared, every measurement", "swept": "What is varied at test time",
    "classes": "Class by class",
}  # fmt: skip
"""The tables of a run: suites that vary one thing at test time, whose charts say most, have one of their own, and so
have classes, of which there may be many."""


def arm_heads(*runs: Run) -> list[Cell]:
    """The heads of the columns of the arms and, where there is something to compare, of the differences."""
    names = words(*runs)
    gaps = [f"Recast − {names.arms[arm].rpartition(', ')[2].lower()}" for arm in names.others]
    heads = [*names.arms.items(), *(("", gap) for gap in gaps)]
    return [Cell(name.replace(" ", "\n"), kind=arm) for arm, name in heads]  # a word to a line


def arms_table(run: Run, which: str = "arms") -> PageTable:
    """One of `LABELS`; corruption by corruption is left to `heat_tables`."""
    rows = [row for row in run.rows if _table_of(row) == which]
    against = _against(run, any(row.model == "finetuned" for row in rows))
    groups, bars = [], list[Bar]()
    for (title, _), found in _grouped(rows).items():
        metrics = [metric for _, metric in found]
        bases = {base(metric) for metric in metrics}
        shared = bases.pop() if len(bases) == 1 and not set(metrics) & set(METRICS) else ""
        if shared in METRICS:
            word, space, rest = metric_label(shared).partition(" ")
            title = f"{title}: {word.lower() if word == word.capitalize() else word}{space}{rest}"  # IoU stays IoU
        groups.append(Group(title, [_cells(run, suite, metric, shared, against) for suite, metric in found]))
        bars += [cell.bar for row in groups[-1].rows for cell in row if cell.bar]
    ends = [abs(end) for bar in bars for end in (bar.value, *((bar.low, bar.high) if bar.paired else ()))]
    scale = 50 / max(ends) if ends and max(ends) > 0 else 0.0
    kind = "arms both" if len(words(run).others) > 1 else "arms"
    return PageTable(LABELS[which], [Cell("Measured"), *arm_heads(run), Cell("Images")], groups, kind=kind, scale=scale)


def _table_of(row: Row) -> str:
    return "swept" if row.suite in SWEPT else "classes" if PER_CLASS.match(row.metric) else "arms"


def _against(run: Run, has_control: bool) -> str:
    """The arm that colours and bars compare with."""
    return "finetuned" if has_control or "parent" not in words(run).others else "parent"


def _grouped(rows: Sequence[Row]) -> dict[tuple[str, str], dict[tuple[str, str], None]]:
    """(title, metric of classes) → (suite, metric) of its lines: a group for every suite and of classes for every
    metric, the other test sets in one.

    Suites that are not known come before the costs; metrics stand as they were measured.
    """
    groups: dict[tuple[str, str], dict[tuple[str, str], None]] = {}
    place = {suite: place for place, suite in enumerate(SUITES)}
    for row in sorted(worth_a_line(rows), key=lambda row: place.get(row.suite, place["cost"] - 0.5)):
        if not PER_CORRUPTION.match(row.metric):
            title = f"Other test sets: top-1,{NBSP}%" if row.suite in TEST_SETS else suite_title(row.suite)
            of_classes = base(row.metric) if PER_CLASS.match(row.metric) else ""
            groups.setdefault((title, of_classes), {})[row.suite, row.metric] = None
    return groups


def _cells(run: Run, suite: str, metric: str, shared: str, against: str) -> list[Cell]:
    rows = {arm: row for arm in ARMS if (row := run.row(arm, suite, metric))}
    name, images, names = base(metric), max((row.n for row in rows.values()), default=0), words(run)
    digits = 4 if name == "loss" else 2 if images >= 2000 else 1
    meaning = METRICS[name].meaning if name in METRICS else ""
    cells = [Cell(measured(suite, metric, shared), title=meaning)]
    for arm in names.arms:
        row, value = rows.get(arm), run.value(arm, suite, metric)
        small: tuple[str, ...] = ()
        if row and row.low is not None and row.high is not None and math.isfinite(row.low + row.high):
            small = (" to ".join(write(name, end, min(digits, 3)) for end in (row.low, row.high)),)  # 3: of a loss
        exact = f"{value:,.10g}" if math.isfinite(value) else "not measured"
        cells.append(Cell(write(name, value, digits), small, exact, arm))
    cells += [_difference(run, suite, metric, other, digits, other == against) for other in names.others]
    return [*cells, Cell("" if name in {"parameters", "macs"} else f"{images:,}" if images else formats.MISSING)]


def write(name: str, value: float, digits: int) -> str:
    """A value of the metric `name`."""
    if name == "images_per_second":
        return formats.decimal(value, 0 if value >= 100 else 1)
    if name == "peak_memory":
        return formats.memory(value)
    return formats.compact(value) if name in {"parameters", "macs"} else formats.decimal(value, digits)


def _difference(run: Run, suite: str, metric: str, other: str, digits: int, with_bar: bool) -> Cell:
    """Coloured by the arm that does better; by none for a tie, and where the interval holds 0."""
    recast, value = (run.value(arm, suite, metric) for arm in ("recast", other))
    gain, known, paired = recast - value, METRICS.get(base(metric)), run.difference(other, suite, metric)
    if not math.isfinite(gain):
        return Cell(formats.MISSING)
    if known and known.is_cost:
        text = formats.share(recast, value, 1) or formats.signed(gain, 0)
    else:
        text = formats.signed(gain, max(digits, 2) if 0 < abs(gain) < 0.05 else digits)
    lower = known is not None and known.lower_is_better
    better = "" if gain == 0 else "recast" if (gain > 0) != lower else other
    bar: Bar | None = None
    small: tuple[str, ...] = ()
    if with_bar and is_accuracy(metric):
        # Unpaired: one standard error, as if the arms had seen different images.
        rows = [row for arm in ("recast", other) if (row := run.row(arm, suite, metric))]
        variance = sum(row.value * (100 - row.value) / row.n if row.n else 0 for row in rows)
        error = math.sqrt(max(variance, 0))
        ends = (paired.low, paired.high) if paired else (-error, error)
        bar = Bar("recast" if gain > 0 else other, gain, *ends, paired is not None)
    if paired:
        digits = min(digits, 3)
        better = better if formats.leaves_out_zero(paired.low, paired.high, digits) else ""
        small = (formats.interval(paired.low, paired.high, digits) if paired.low < paired.high else "none changed",)
    return Cell(text, small, kind=f"by-{better}", bar=bar)


def heat_tables(run: Run) -> list[tuple[str, str, PageTable]]:
    """(suite, arm compared with, top-1 of the recast model and the difference by kind and severity of corruption)."""
    tables = []
    for suite, kinds in run.corruptions.items():
        metrics = [metric for one in kinds.values() for metric in one.values()]
        severities = sorted({severity for one in kinds.values() for severity in one}, key=int)
        against = _against(run, any(run.row("finetuned", suite, metric) for metric in metrics))
        gaps = {metric: run.value("recast", suite, metric) - run.value(against, suite, metric) for metric in metrics}
        largest = max((abs(gap) for gap in gaps.values() if math.isfinite(gap)), default=0.0) or 1.0
        rows = []
        for kind in kinds:
            rows.append([Cell(kind.replace("_", " "))])
            for severity in severities:
                metric = kinds[kind].get(severity, "")
                gap, paired = gaps.get(metric, math.nan), run.difference(against, suite, metric)
                known = math.isfinite(gap) and gap != 0
                known = known and (paired is None or formats.leaves_out_zero(paired.low, paired.high))
                title = f"95 % interval: {formats.interval(paired.low, paired.high)}" if paired else ""
                by = f"b-{('recast' if gap > 0 else against) if known else ''}"
                strength = round(55 * abs(gap) / largest) if known else 0
                value = formats.decimal(run.value("recast", suite, metric))
                rows[-1].append(Cell(value, (formats.signed(gap),), title, by, strength=strength))
        name = suite_title(suite, short=True)
        label, heads = f"Corruption by corruption, {name}", [Cell("Severity"), *map(Cell, severities)]
        tables.append((name, against, PageTable(label, heads, [Group("", rows)], kind="heat")))
    return tables
