"""Write a self-contained HTML report and a folder of figures from run folders. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from recast.errors import RecastError
from recast.files import check_ours, check_place, write_text

__all__ = ["results_of", "write_report"]


def check_packages() -> None:
    """Raise RecastError unless matplotlib and jinja2 are installed."""
    for name in ("matplotlib", "jinja2"):
        try:
            import_module(name)
        except ModuleNotFoundError:
            raise RecastError(f"a report needs {name}: pip install {name}") from None


def write_report(runs: Sequence[Path | str], out: Path | str | None = None, figures: Path | str | None = None) -> Path:
    """Write the report of one or several run folders and return its path.

    Args:
        runs: run folders, see `recast.lab.report.load`.
        out: the HTML file; default RUN/report.html for one run.
        figures: a folder for every figure as SVG and PNG, its numbers as CSV, and tables; see
            `recast.lab.report.export`. It must be new, empty, or hold the figures of an earlier report.

    Page and folder are written under temporary names and renamed, so a failure keeps older ones.

    Raises:
        RecastError: no run, a missing or truncated file in a run, an invalid `out` or `figures`, or a missing package.
    """
    folders = [Path(run) for run in runs]
    if not folders:
        raise RecastError("a report needs at least one run folder, got none")
    if out is None and len(folders) > 1:
        raise RecastError(f"a report of {len(folders)} runs has no default file: add --out report.html")
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
    loaded, different = [read_run(folder) for folder in folders], len({folder.resolve() for folder in folders})
    while len({run.name for run in loaded}) < different:
        loaded = [replace(run, named_by=run.named_by + 1) for run in loaded]
    parts = [run_part(run, f"run{number}", len(loaded)) for number, run in enumerate(loaded, start=1)]
    groups = group_parts(loaded)
    html = render_page(parts, groups)
    try:
        write_text(target, html)
    except OSError as error:
        raise RecastError(f"cannot write the report {target}: {error.strerror}") from error
    if figures is not None:
        write_figures(Path(figures), parts, groups)
    return target


def results_of(run: Path | str) -> str:
    """Return the results of all arms of an evaluated run as Markdown; empty if nothing was measured."""
    from recast.lab.report.arms_table import arms_table
    from recast.lab.report.load import read_run
    from recast.lab.report.table import NOTE, markdown

    loaded = read_run(Path(run))
    if not loaded.rows:
        return ""
    return "\n".join([f"## Results on {loaded.recipe.data.name}\n", markdown([arms_table(loaded)]), "", NOTE, ""])
