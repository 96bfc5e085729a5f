"""Tables of the analyses: RUN/analysis/NAME.csv. Imports no torch."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from recast.errors import RecastError
from recast.run.files import replaced

Cell = str | int | float | bool | None


@dataclass(frozen=True)
class Table:
    """Named columns and their rows; None is an empty cell."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @property
    def images(self) -> int:
        """How many images are behind it: the largest `n`, or a row each."""
        return max((int(str(n)) for n in self.column("n")), default=0) if "n" in self.columns else len(self.rows)

    def column(self, name: str) -> list[Cell]:
        """The cells of one column."""
        return [row[self.columns.index(name)] for row in self.rows]


def write_table(folder: str | Path, table: Table) -> Path:
    """Write FOLDER/NAME.csv whole or not at all: floats with 6 digits, "true" and "false"; returns its path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{table.name}.csv"
    with replaced(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(table.columns)
        writer.writerows([_text(cell) for cell in row] for row in table.rows)
    return path


def read_table(path: str | Path) -> Table:
    """The table of a CSV file, its cells as text. Raises `RecastError` if it is missing or its rows are not even."""
    path = Path(path)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = [tuple(cells) for cells in csv.reader(file) if cells]
    except FileNotFoundError:
        raise RecastError(f"no such table: {path}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RecastError(f"cannot read {path}: {error}") from None
    if not lines or any(len(line) != len(lines[0]) for line in lines):
        raise RecastError(f"{path} is no table: expected a line of columns, then rows with as many cells")
    return Table(path.stem, lines[0], tuple(lines[1:]))


def _text(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "true" if cell else "false"
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)
