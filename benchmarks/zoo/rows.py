"""What is found about architectures: a row each, in a CSV file, and the whole in a few lines."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from recast.errors import RecastError
from recast.files import replaced
from recast.lab.tables import read_records

EXACT = ("exact", "exact_fp64")
NOTHING = ("no spatial convolution", "no two-dimensional convolution")


@dataclass
class ZooRow:
    """What was found about one architecture. Errors are relative, max|a − b| / max|b|; None: not run."""

    model: str
    status: str
    """exact, exact_fp64, vacuous, inexact, failed, or why there is nothing to recast."""
    cause: str = ""
    size: str = ""
    parameters: int = 0
    spatial_convolutions: int = 0
    last_recast: int = 0
    """Layers of the last stage that became GPSA."""
    last_left: str = ""
    """Convolutions larger than 1×1 that it left, by reason."""
    last_split_bitwise: bool | None = None
    last_split_error: float | None = None
    last_dense_error: float | None = None
    last_dense_layer_error: float | None = None
    control: float | None = None
    """How far two swapped heads of the first recast layer move the outputs."""
    open_layers: int = 0
    open_error: float | None = None
    """Largest error of split against reference over layers with random open heads."""
    all_recast: int = 0
    all_left: str = ""
    all_split_bitwise: bool | None = None
    all_split_error: float | None = None
    all_dense_error: float | None = None
    all_dense_layer_error: float | None = None
    error_fp64: float | None = None
    """Largest output error of both steps in double precision, where fp32 exceeded the tolerance."""
    seconds: float = 0.0
    peak_gib: float = 0.0
    """Largest resident memory above that of the imports."""

    def output_errors(self) -> list[float]:
        """The errors at the output that were measured."""
        found = (self.last_split_error, self.last_dense_error, self.all_split_error, self.all_dense_error)
        return [error for error in found if error is not None]


def read_zoo(path: str | Path) -> list[ZooRow]:
    """The rows of a walk. Raises `RecastError` for another kind of file."""
    try:
        return read_records(path, ZooRow)
    except RecastError:
        raise RecastError(f"{path} is no table of a walk of this version: choose another file with --out") from None


def write_zoo(path: str | Path, rows: Iterable[ZooRow]) -> None:
    """Replace the table by these rows, sorted by name."""
    with replaced(path) as temporary:
        for row in sorted(rows, key=lambda row: row.model):
            append_row(temporary, row)


def append_row(path: Path, row: ZooRow) -> None:
    """Add a row to the table, and the names of the columns before the first."""
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not file.tell():
            writer.writerow(vars(row))
        writer.writerow(f"{v:.3g}" if isinstance(v, float) and abs(v) < 1 else v for v in vars(row).values())


def summary(rows: Iterable[ZooRow]) -> str:
    """One block per library: how many of how many architectures are recast exactly, and what falls short."""
    by_source: dict[str, list[ZooRow]] = {}
    for row in rows:
        by_source.setdefault(row.model.partition(":")[0], []).append(row)
    return "\n".join(line for source, found in by_source.items() for line in _lines(source, found))


def _lines(source: str, rows: list[ZooRow]) -> list[str]:
    counts = Counter(row.status for row in rows)
    held = [row for row in rows if row.status not in NOTHING]
    exact = [row for row in held if row.status in EXACT]

    def value(of: Callable[[list[float]], float], column: str) -> float:
        return of([v for row in exact if (v := getattr(row, column)) is not None] or [0.0])

    lines = [
        f"{source}: {len(exact)} of {len(held)} architectures with a spatial convolution recast exactly "
        f"({counts['exact_fp64']} of them exceed 1e-4 in fp32 and keep to 1e-9 in fp64); "
        f"{len(rows) - len(held)} of {len(rows)} have none"
    ]
    if exact:
        bitwise = sum(row.last_split_bitwise is True and row.all_split_bitwise is not False for row in exact)
        lines += [
            f"  bitwise equal in split: {bitwise} of {len(exact)}",
            f"  dense in fp32, median: {value(median, 'last_dense_error'):.1e} for the last stage, "
            f"{value(median, 'all_dense_error'):.1e} for everything up to 600 tokens; in fp64 where it exceeds 1e-4: "
            f"at most {value(max, 'error_fp64'):.1e}",
            f"  split against reference with random open heads: at most {value(max, 'open_error'):.1e} "
            f"over {sum(row.open_layers for row in exact)} layers",
            f"  layers recast: {sum(row.all_recast for row in exact)}; smallest control {value(min, 'control'):.1e}",
        ]
    seconds, peak = sum(row.seconds for row in rows), max((row.peak_gib for row in rows), default=0.0)
    lines.append(f"  {seconds / 60:.0f} minutes of one process each, at most {peak:.1f} GiB")
    return lines + [f"  {row.model}: {row.status}, {row.cause}" for row in held if row.status not in EXACT]
