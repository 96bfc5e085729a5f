"""CSV files whose rows are dictionaries with the same keys."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recast.lab.folder.tables import write_rows

RESULTS = Path(__file__).parents[2] / "results"


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, [] if it is missing."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the file and print its path."""
    write_rows(path, list(rows[0]), [[*row.values()] for row in rows])
    print(path)


def has_row(path: Path, **labels: Any) -> bool:
    """Return True if the table has a row with these labels."""
    return any(all(row[name] == str(value) for name, value in labels.items()) for row in read(path))


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a row, with the column names before the first one, and print it."""
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        writer.writerow(row)
    print(row, flush=True)
