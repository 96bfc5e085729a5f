"""Rows of the zoo: their CSV file and a summary."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from recast.errors import RecastError
from recast.files import replaced
from recast.lab.folder.tables import read_records

EXACT = ("exact", "exact_fp64")
NOTHING = ("no spatial convolution", "no two-dimensional convolution")


@dataclass
class ZooRow:
    """Result of one architecture. Errors are relative, max|a − b| / max|b|; None: not run."""

    model: str
    status: str
    """exact, exact_fp64, vacuous, inexact, failed, or one of NOTHING."""
    cause: str = ""
    size: str = ""
    parameters: int = 0
    spatial_convolutions: int = 0
    last_recast: int = 0
    """Layers of the last stage that became GPSA."""
    last_left: str = ""
    """Reasons why convolutions larger than 1×1 were not recast."""
    last_split_bitwise: bool | None = None
    last_split_error: float | None = None
    last_dense_error: float | None = None
    last_dense_layer_error: float | None = None
    control: float | None = None
    """Change of the outputs after swapping two heads of the first recast layer."""
    open_layers: int = 0
    open_error: float | None = None
    """Largest error of split against reference in layers with random open heads."""
    all_recast: int = 0
    all_left: str = ""
    all_split_bitwise: bool | None = None
    all_split_error: float | None = None
    all_dense_error: float | None = None
    all_dense_layer_error: float | None = None
    error_fp64: float | None = None
    """Largest output error of both steps in double precision, if fp32 exceeded the tolerance."""
    seconds: float = 0.0
    peak_gib: float = 0.0
    """Largest resident memory above that of the imports."""

    def output_errors(self) -> list[float]:
        """Return the measured errors at the output."""
        errors = (self.last_split_error, self.last_dense_error, self.all_split_error, self.all_dense_error)
        return [error for error in errors if error is not None]


def read_zoo(path: str | Path) -> list[ZooRow]:
    """Return the rows of a walk. Raises RecastError for another kind of file."""
    try:
        return read_records(path, ZooRow)
    except RecastError:
        raise RecastError(f"{path} is no table of a walk of this version: give another --out") from None


def write_zoo(path: str | Path, rows: Iterable[ZooRow]) -> None:
    """Write the table, sorted by name."""
    with replaced(path) as temporary:
        for row in sorted(rows, key=lambda row: row.model):
            append_row(temporary, row)


def append_row(path: Path, row: object) -> None:
    """Add a row, a dataclass, to the table, with the column names before the first one."""
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not file.tell():
            writer.writerow(vars(row))
        writer.writerow(f"{v:.3g}" if isinstance(v, float) and abs(v) < 1 else v for v in vars(row).values())


def summary(rows: Iterable[ZooRow]) -> str:
    """Return a block per library: how many architectures are recast exactly, and the others."""
    lines = []
    by_source: dict[str, list[ZooRow]] = {}
    for row in rows:
        by_source.setdefault(row.model.partition(":")[0], []).append(row)
    for source, members in by_source.items():
        spatial = [row for row in members if row.status not in NOTHING]
        misses = [row for row in spatial if row.status not in EXACT]
        lines.append(
            f"{source}: {len(spatial) - len(misses)} of {len(spatial)} architectures with a spatial convolution are "
            f"exact, {len(members) - len(spatial)} of {len(members)} have none"
        )
        lines += [f"  {row.model}: {row.status}, {row.cause}" for row in misses]
    return "\n".join(lines)
