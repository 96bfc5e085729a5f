"""What is left of a study's runs when their machine is gone: a zip a study beside the tables, from which it goes on.

It holds every run's record and which images were right, so that the tables with their intervals over images can be made
again from it; weights only of runs that are another study's parents.
"""

from __future__ import annotations

import csv
import json
import zipfile
from pathlib import Path
from typing import Any

from job import Job

KEPT = ("result.json", "right.npz", "folded.npz")


def archive(results: Path, study: str) -> Path:
    """The zip of a study."""
    return results / "evidence_runs" / f"{study}.zip"


def unpack(results: Path, study: str, out: Path) -> None:
    """Runs that `out` lacks, from the study's zip if there is one."""
    path = archive(results, study)
    if path.is_file():
        with zipfile.ZipFile(path) as packed:
            packed.extractall(out, [name for name in packed.namelist() if not (out / name).exists()])


def pack(results: Path, study: str, out: Path) -> None:
    """The zip of a study, if it has runs."""
    files = [file for file in sorted((out / study).rglob("*")) if file.name in KEPT]
    files += sorted(out.glob(f"{study}/*/weights.safetensors")) if study.endswith("-parents") else []
    if files:
        path = archive(results, study)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".part")
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as packed:
            for file in files:  # without dates: the same runs make the same bytes
                packed.writestr(zipfile.ZipInfo(str(file.relative_to(out))), file.read_bytes(), zipfile.ZIP_DEFLATED)
        temporary.replace(path)


def is_finished(out: Path, job: Job) -> bool:
    """Whether a job's result lies there; that of another job of the same name (other rates, other updates) does not
    count."""
    path = out / job.folder / "result.json"
    return path.is_file() and Job(**json.loads(path.read_text(encoding="utf-8"))["job"]) == job


LABELS = ("study", "arm", "seed", "against", "metric")
"""What a row is about; its other columns are what was found."""


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a tidy CSV; [] where there is none."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A tidy CSV of the rows."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def update(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A tidy CSV in which rows take the place of those about the same, and the rest stays, ordered by study."""

    def about(row: dict[str, Any]) -> tuple[str, ...]:
        return tuple(str(row.get(label, "")) for label in LABELS)

    new = {about(row) for row in rows}
    rows = [row for row in read(path) if about(row) not in new] + rows
    return write(path, sorted(rows, key=lambda row: str(row["study"])))
