"""Archives of a study's runs beside the tables, from which a study continues on another machine.

A zip holds every run's record and which images were right: the tables with their intervals over images follow from it.
It holds weights only of runs that are another study's parents.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from studies import Job

from recast.files import replaced

FOLDER = "evidence_runs"
ARCHIVED = ("result.json", "right.npz", "folded.npz")


def unpack(results: Path, study: str, out: Path) -> None:
    """Extract the files that `out` lacks, if the study has a zip."""
    path = results / FOLDER / f"{study}.zip"
    if path.is_file():
        with zipfile.ZipFile(path) as packed:
            packed.extractall(out, [name for name in packed.namelist() if not (out / name).exists()])


def pack(results: Path, study: str, out: Path) -> None:
    """Write the study's zip, if it has runs."""
    files = [file for file in sorted((out / study).rglob("*")) if file.name in ARCHIVED]
    files += sorted(out.glob(f"{study}/*/weights.safetensors")) if study.endswith("-parents") else []
    if files:
        path = results / FOLDER / f"{study}.zip"
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as packed:
            for file in files:  # without dates: the same runs make the same bytes
                packed.writestr(zipfile.ZipInfo(str(file.relative_to(out))), file.read_bytes(), zipfile.ZIP_DEFLATED)


def is_finished(out: Path, job: Job) -> bool:
    """Return True if `out` has the result of this job; a job of the same name with other rates does not count."""
    path = out / job.folder / "result.json"
    return path.is_file() and Job(**json.loads(path.read_text(encoding="utf-8"))["job"]) == job
