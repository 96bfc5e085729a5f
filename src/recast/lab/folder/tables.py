"""Tables as CSV files: records of one kind a line, or columns of one's own. Written whole or not at all."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from recast.config import read
from recast.errors import RecastError
from recast.files import replaced
from recast.reading import decode, read_bytes

T = TypeVar("T")
Scalar = str | int | float | bool | None
_SEPARATOR = re.compile(r'"?sep=([^\w\s"]|\t)"?\n', re.IGNORECASE)


@dataclass(frozen=True)
class Table:
    """Named columns and their rows; None is an empty cell."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Scalar, ...], ...]

    @classmethod
    def of(cls, name: str, kind: type[Any], lines: Iterable[Any]) -> Table:
        """Make a table of records of one kind: their fields are its columns."""
        return cls(name, columns_of(kind), tuple(astuple(line) for line in lines))

    @property
    def images(self) -> int:
        """Number of images behind it: the largest `n`, or one per row."""
        if "n" not in self.columns:
            return len(self.rows)
        place = self.columns.index("n")
        return max((int(str(row[place])) for row in self.rows), default=0)


def write_table(folder: str | Path, table: Table) -> Path:
    """Write FOLDER/NAME.csv whole or not at all: floats with 6 digits, "true" and "false"; returns its path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{table.name}.csv"
    write_rows(path, table.columns, ([_short(cell) for cell in row] for row in table.rows))
    return path


def read_table(path: str | Path, text: str | None = None) -> Table:
    """Read a CSV file, or its text, cells as text. Raises `RecastError` if it is missing or its rows are uneven."""
    path = Path(path)
    columns, lines = _cells(path, text)
    if not columns:
        raise RecastError(f"{path} is no table: expected a line of columns, then rows with as many cells")
    return Table(path.stem, tuple(columns), tuple(tuple(cells) for _, cells in lines))


def read_records(path: str | Path, kind: type[T]) -> list[T]:
    """The records of a CSV file. Raises RecastError with file and line when it is missing or not a table of these."""
    path, names, hints = Path(path), columns_of(kind), get_type_hints(kind)
    columns, lines = _cells(path)
    if tuple(columns) != names:
        raise RecastError(
            f"{path} must start with the columns {','.join(names)}, got {','.join(columns)!r}: move it away, and "
            "recast evaluate writes a new one"
        )
    optional = {name for name in names if get_args(hints[name])}  # an empty cell is None
    return [
        read(
            kind, {n: None if n in optional and not cell else cell for n, cell in zip(names, cells, strict=True)}, where
        )
        for where, cells in lines
    ]


def existing_records(path: Path, kind: type[T]) -> list[T]:
    """Return the result of `read_records`; nothing if the file is missing."""
    return read_records(path, kind) if path.is_file() else []


def columns_of(kind: type[Any]) -> tuple[str, ...]:
    return tuple(column.name for column in fields(kind))


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Scalar]]) -> None:
    """Write a line of columns, then the rows; names of files need not be text."""
    with (
        replaced(path) as temporary,
        temporary.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file,
    ):
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


def _cells(path: Path, text: str | None = None) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The columns of a CSV file, and (its place, its cells) of every other line that is not empty.

    Cells are separated by comma, semicolon or tab: the one that splits the first two lines alike, and most; or by the
    mark of a first line `sep=;`, which Excel reads.
    """
    lines, last = list[tuple[str, list[str]]](), 0
    try:
        text = decode(read_bytes(path), path) if text is None else text
        given = _SEPARATOR.match(text)
        text = text[given.end() :] if given else text

        def separated(mark: str) -> Iterator[list[str]]:
            return csv.reader(io.StringIO(text, newline=""), delimiter=mark)

        def fit(mark: str) -> tuple[bool, int]:
            counts = [len(cells) for cells in islice(filter(None, separated(mark)), 2)]
            most = max(counts, default=0)
            return most > 1 and len(set(counts)) == 1, most

        mark = given[1] if given else max(",;\t", key=fit)
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=mark, strict=True)
        for cells in reader:
            last = reader.line_num + bool(given)
            if cells:
                lines.append((f"{path} line {last}", cells))
    except FileNotFoundError:
        raise RecastError(f"no such file: {path}") from None
    except csv.Error as error:
        where = f"{path} line {last + 1}"
        raise RecastError(f"{where}: {error}; is there a quotation mark too many, or one that is not closed?") from None
    columns = lines[0][1] if lines else []
    for where, cells in lines:
        if len(cells) != len(columns):
            wrong = f"expected {len(columns)} cells ({','.join(columns)}), got {len(cells)}"
            raise RecastError(f"{where}: {wrong}; quote a cell with a separator in it")
    return columns, lines[1:]


def _short(cell: Scalar) -> str:
    if isinstance(cell, bool):
        return "true" if cell else "false"
    return "" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else str(cell)
