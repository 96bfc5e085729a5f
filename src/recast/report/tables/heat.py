"""Corruption by corruption: kinds × severities."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from recast.report.read.run import Run
from recast.report.tables.arms import leaves_out_zero
from recast.report.tables.names import PER_CORRUPTION, SHORT
from recast.report.text import formats


@dataclass(frozen=True)
class Cell:
    value: str
    difference: str
    better: str
    strength: int
    """0..100: how strongly the cell is coloured."""
    title: str = ""
    """The interval of the difference, shown on hover."""


@dataclass(frozen=True)
class HeatTable:
    suite: str
    name: str
    against: str
    severities: list[int]
    lines: dict[str, list[Cell]] = field(default_factory=dict)


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
        table = HeatTable(suite, SHORT.get(suite, suite), against, severities)
        for kind in dict.fromkeys(kind for _, kind, _ in values):
            cells = []
            for severity in severities:
                difference = differences.get((kind, severity), math.nan)
                paired = run.difference("recast", against, suite, f"top1/{kind}/{severity}")
                open_ended = paired is not None and not leaves_out_zero(paired.low, paired.high, 1)
                known = math.isfinite(difference) and difference != 0 and not open_ended
                cells.append(
                    Cell(
                        value=formats.decimal(values.get(("recast", kind, severity), math.nan)),
                        difference=formats.signed(difference),
                        better=("recast" if difference > 0 else against) if known else "",
                        strength=round(55 * abs(difference) / largest) if known else 0,
                        title=f"95 % interval: {formats.interval(paired.low, paired.high)}" if paired else "",
                    )
                )
            table.lines[kind] = cells
        tables.append(table)
    return tables
