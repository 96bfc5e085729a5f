"""Results as data, kept in CSV files: a row per measured number, a row per difference. Imports no torch."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

from recast.errors import RecastError
from recast.run.files import replaced


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
    low: float | None = None
    """The 95 % interval of the value over images, from `low` to `high`. None: there is none."""
    high: float | None = None


@dataclass(frozen=True)
class Difference:
    """value = what `model` has more than `against`, measured on the same images, with its paired 95 % interval."""

    run: str
    model: str
    against: str
    suite: str
    dataset: str
    metric: str
    value: float
    low: float
    high: float
    n: int


Line = TypeVar("Line", Row, Difference)


def write_rows(path: str | Path, rows: Iterable[Row]) -> None:
    """Put rows into the CSV file of a run at `path`: those of a suite replace all older ones of that suite.

    So what stands there of a suite was measured together, on the same images, with the same options. The rows that stay
    get the run's name as the new ones have it: the folder may have been renamed. The file is written to a temporary
    name and renamed, so a reader sees the old rows or all the new ones. An existing file that is not a table of rows is
    left alone: RecastError (see `read_rows`).
    """
    _merge(Path(path), Row, list(rows))


def write_differences(path: str | Path, differences: Iterable[Difference]) -> None:
    """The same for differences."""
    _merge(Path(path), Difference, list(differences))


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a CSV file. Raises RecastError with file and line when it is missing or not a table of rows."""
    return _read(Path(path), Row)


def read_differences(path: str | Path) -> list[Difference]:
    """The differences of a CSV file. Raises as `read_rows` does."""
    return _read(Path(path), Difference)


def _merge(path: Path, kind: type[Line], lines: list[Line]) -> None:
    measured = {line.suite for line in lines}
    kept: list[Line] = []
    for line in _read(path, kind) if path.exists() else []:
        if line.suite not in measured:
            kept.append(replace(line, run=lines[0].run) if lines else line)
    with replaced(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_columns(kind))
        writer.writerows(astuple(line) for line in (*kept, *lines))


def _columns(kind: type[Row] | type[Difference]) -> list[str]:
    return [column.name for column in fields(kind)]


def _read(path: Path, kind: type[Line]) -> list[Line]:
    columns = _columns(kind)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.reader(file)
            header = next(reader, None)
            if header != columns:
                found = ",".join(header or [])
                raise RecastError(
                    f"{path} must start with the columns {','.join(columns)}, got {found!r}: move it away, and "
                    "recast evaluate writes a new one"
                )
            return [_parse(kind, columns, cells, f"{path} line {reader.line_num}") for cells in reader if cells]
    except FileNotFoundError:
        raise RecastError(f"no such file of results: {path}. Write one with `recast evaluate`") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RecastError(f"cannot read {path}: {error}") from None


def _parse(kind: type[Line], columns: list[str], cells: list[str], where: str) -> Line:
    if len(cells) != len(columns):
        raise RecastError(f"{where}: expected {len(columns)} cells ({','.join(columns)}), got {len(cells)}")
    texts = dict(zip(columns, cells, strict=True))
    values: dict[str, object] = dict(texts)
    try:
        for name in ("value", "low", "high"):
            values[name] = float(texts[name]) if texts[name] or name == "value" or kind is Difference else None
        values["n"] = int(texts["n"])
    except ValueError:
        raise RecastError(
            f"{where}: value, low and high must be numbers and n an integer, "
            f"got value={texts['value']!r} low={texts['low']!r} high={texts['high']!r} n={texts['n']!r}"
        ) from None
    return kind(**values)  # type: ignore[arg-type]
