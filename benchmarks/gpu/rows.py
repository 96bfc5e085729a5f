"""A CSV that grows by one unit of work at a time: a call that is stopped loses one unit, the next goes on behind it."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

HEADER = ("unit", "arm", "quantity", "value", "limit", "state", "note")
"""unit: what was measured together, as WHAT/CASE/…; limit: the largest value that passes, empty for a mere measure."""
UNFINISHED = 75
"""Exit status of a part whose time ran out before its units did."""

Row = dict[str, Any]
Unit = tuple[str, Callable[[], Sequence[Row]]]


def row(arm: str, quantity: str, value: float | str, limit: float | None = None, note: str = "") -> Row:
    """A measure; with a limit it passes or fails (NaN fails)."""
    state = "passed" if limit is None or (not isinstance(value, str) and value <= limit) else "failed"
    text = value if isinstance(value, str) else f"{value:.4g}"
    limits = "" if limit is None else f"{limit:g}"
    return dict(zip(HEADER[1:], (arm, quantity, text, limits, state, note), strict=True))


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a file, none where it is missing; one that was cut short is left out. ValueError: not such a file."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != HEADER:
            raise ValueError(f"{path.name} has other columns than {','.join(HEADER)}: give another --out")
        return [found for found in reader if found["note"] is not None]


def carry_out(path: Path, units: Iterable[Unit], seconds: float, recover: Callable[[], None]) -> int:
    """Measure what has not passed yet, until `seconds` from now; returns the exit status of the part.

    A unit that raises is a row that failed. `recover` is called then, and raises where nothing more can be measured.
    """
    until = time.monotonic() + seconds
    rows = read(path)
    again = {found["unit"] for found in rows if found["state"] == "failed"}
    kept = [found for found in rows if found["unit"] not in again]
    done, status = {found["unit"] for found in kept}, 0
    temporary = path.with_suffix(".part")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, HEADER, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)
        file.flush()
        temporary.replace(path)
        for name, measure in units:
            if name in done:
                continue
            if time.monotonic() > until:
                return status or UNFINISHED
            try:
                found, broke = list(measure()), False
            except Exception as error:
                text = " ".join(f"{type(error).__name__}: {error}".split())
                found, broke = [{**row("", "error", "", note=text[:300]), "state": "failed"}], True
            writer.writerows({"unit": name, **each} for each in found)
            file.flush()
            wrong = [each for each in found if each["state"] == "failed"]
            print(f"{name}: {len(found)} rows", *(f"  FAILED {[*each.values()]}" for each in wrong), sep="\n")
            status = status or int(bool(wrong))
            if broke:
                recover()
    return status
