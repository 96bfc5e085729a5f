"""Write a self-contained HTML report from run folders."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from recast.errors import RecastError
from recast.files import check_place, write_text
from recast.lab.folder.files import check_ours
from recast.lab.folder.run import RunFolder
from recast.lab.plugins import optional_package

if TYPE_CHECKING:
    from recast.lab.report.load import Run

__all__ = ["write_report"]


def write_report(runs: Sequence[Path | str], out: Path | str | None = None) -> Path:
    """Write the report of one or several run folders and return its path.

    Args:
        runs: run folders, see `recast.lab.report.load`; several must share their data set.
        out: the HTML file; default RUN/report.html for one run.

    Raises:
        RecastError: no run, a missing or truncated file in a run, an invalid `out`, or a missing package.
    """
    folders = [Path(run) for run in runs]
    target = _target(folders, out)
    optional_package("matplotlib", "matplotlib", "a report needs matplotlib")
    from recast.lab.report.page import joint_part, render_page, run_part

    loaded = _load(folders)
    parts = [run_part(run, f"run{number}", len(loaded)) for number, run in enumerate(loaded, start=1)]
    joint = joint_part(loaded) if len(loaded) > 1 else None
    try:
        write_text(target, render_page(parts, joint))
    except OSError as error:
        raise RecastError(f"cannot write the report {target}: {error.strerror}") from error
    return target


def _target(folders: Sequence[Path], out: Path | str | None) -> Path:
    """Return the file of the report; RecastError if there is none, or if it cannot be written."""
    if not folders:
        raise RecastError("a report needs at least one run folder, got none")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise RecastError("a report takes every run once, got one twice")
    default = RunFolder(folders[0]).report
    if out is not None:
        target = Path(out)
        check_place(target, "the report", default.name)
    elif len(folders) == 1:
        target = default
    else:
        raise RecastError(f"a report of {len(folders)} runs has no default file: add --out report.html")
    check_ours(target)
    return target


def _load(folders: Sequence[Path]) -> list[Run]:
    """Read the runs, which must share their data set, and give them different names."""
    from recast.lab.report.load import read_run

    runs = [read_run(folder) for folder in folders]
    if len({(run.recipe.data.title, run.classes) for run in runs}) > 1:
        names = ", ".join(dict.fromkeys(run.recipe.data.title for run in runs))
        raise RecastError(f"the runs use different data ({names}): write one report for each")
    if len({run.name for run in runs}) < len(runs):
        common = os.path.commonpath([folder.resolve().parent for folder in folders])
        runs = [replace(run, name=os.path.relpath(run.path.resolve(), common)) for run in runs]
    return runs
