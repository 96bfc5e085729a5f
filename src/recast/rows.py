"""Results as data: one row per (run, model, suite, dataset, metric), kept in a CSV file. Imports no torch."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from recast.errors import RecastError
from recast.files import replaced


@dataclass(frozen=True)
class Row:
    """One measured number."""

    run: str
    model: str
    """parent, finetuned or recast."""
    suite: str
    """clean, fgsm, pgd, basic, cost, ..."""
    dataset: str
    metric: str
    """top1 and the like are in percent; `top1@E` is under an attack with ε = E/255."""
    value: float
    n: int
    """Images behind the number."""

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """What the number is of: a second row with the same key replaces the first."""
        return self.run, self.model, self.suite, self.dataset, self.metric


COLUMNS = tuple(field.name for field in fields(Row))


def write_rows(path: str | Path, rows: Iterable[Row]) -> None:
    """Merge rows into the CSV file at `path`: a row with the key of an existing one replaces it where it stands.

    The file is written to a temporary name and renamed, so a reader sees the old rows or all the new ones. An existing
    file that is not a table of rows is left alone: RecastError (see `read_rows`).
    """
    path = Path(path)
    merged = {row.key: row for row in read_rows(path)} if path.exists() else {}
    merged.update((row.key, row) for row in rows)
    with replaced(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(astuple(row) for row in merged.values())


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a CSV file. Raises RecastError with file and line when it is missing or not a table of rows."""
    path = Path(path)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.reader(file)
            header = next(reader, None)
            if header != list(COLUMNS):
                found = ",".join(header or [])
                raise RecastError(f"{path} must start with the columns {','.join(COLUMNS)}, got {found!r}")
            return [_parse(cells, f"{path} line {reader.line_num}") for cells in reader if cells]
    except FileNotFoundError:
        raise RecastError(f"no such file of results: {path}. Write one with `recast evaluate`") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RecastError(f"cannot read {path}: {error}") from None


def _parse(cells: list[str], where: str) -> Row:
    if len(cells) != len(COLUMNS):
        raise RecastError(f"{where}: expected {len(COLUMNS)} cells ({','.join(COLUMNS)}), got {len(cells)}")
    run, model, suite, dataset, metric, value, n = cells
    try:
        return Row(run, model, suite, dataset, metric, float(value), int(n))
    except ValueError:
        raise RecastError(f"{where}: value must be a number and n an integer, got {value=} {n=}") from None
