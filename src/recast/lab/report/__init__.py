"""Run folders in, one self-contained HTML page and a folder of figures out.

Reads files only: torch is never imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from recast.errors import RecastError
from recast.files import check_ours, check_place, write_text

__all__ = ["results_of", "write_report"]


def check_packages() -> None:
    """Raise RecastError unless the packages that draw a page are there."""
    for name in ("matplotlib", "jinja2"):
        try:
            import_module(name)
        except ModuleNotFoundError:
            raise RecastError(f"a report needs {name}: pip install {name}") from None


def write_report(runs: Sequence[Path | str], out: Path | str | None = None, figures: Path | str | None = None) -> Path:
    """Write the report of one or several run folders and return where it lies.

    Args:
        runs: run folders, see `recast.lab.report.load`.
        out: the HTML file; for one run the default is RUN/report.html.
        figures: a folder for every figure as SVG and PNG, the numbers behind it as CSV, and tables to cite; see
            `recast.lab.report.export`. It must be new, empty, or hold the figures of an earlier report.

    Page and folder are written under temporary names and renamed: a failure leaves older ones alone.

    Raises:
        RecastError: no run, a missing or truncated file in a run, nowhere to write, a folder of figures that holds
            anything else, or no matplotlib or jinja2.
    """
    folders = [Path(run) for run in runs]
    if not folders:
        raise RecastError("a report needs at least one run folder, got none")
    if out is None and len(folders) > 1:
        raise RecastError(f"a report of {len(folders)} runs belongs to none of them: say where (--out FILE.html)")
    target = Path(out) if out is not None else folders[0] / "report.html"
    if out is not None:
        check_place(target, "the report", "report.html")
    check_ours(target)
    check_packages()
    from recast.lab.report.export import check_folder, write_figures
    from recast.lab.report.load import read_run
    from recast.lab.report.page import group_parts, render_page, run_part

    if figures is not None:
        check_folder(Path(figures))
    read, different = [read_run(folder) for folder in folders], len({folder.resolve() for folder in folders})
    while len({run.name for run in read}) < different:
        read = [replace(run, named_by=run.named_by + 1) for run in read]
    parts = [run_part(run, f"run{place}", len(read)) for place, run in enumerate(read, start=1)]
    groups = group_parts(read)
    html = render_page(parts, groups)
    try:
        write_text(target, html)
    except OSError as error:
        raise RecastError(f"cannot write the report {target}: {error.strerror}") from error
    if figures is not None:
        write_figures(Path(figures), parts, groups)
    return target


def results_of(run: Path | str) -> str:
    """Return the arms of an evaluated run side by side, as Markdown; empty where nothing was measured."""
    from recast.lab.report.arms_table import arms_table
    from recast.lab.report.load import read_run
    from recast.lab.report.table import NOTE, markdown

    read = read_run(Path(run))
    if not read.rows:
        return ""
    return "\n".join([f"## Measured on {read.recipe.data.name}\n", markdown([arms_table(read)]), "", NOTE, ""])
