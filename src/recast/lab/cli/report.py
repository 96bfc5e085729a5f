"""`recast report RUN…`: one HTML page."""

from __future__ import annotations

from recast.config import FilePath
from recast.lab.cli.command import Command, Output, print_json
from recast.lab.folder.run import RunFolder

EXAMPLES = """  recast report runs/mine
  recast report runs/seed0 runs/seed1 --out report.html
"""


def report(*runs: str, out: FilePath | None = None, output: Output) -> int:
    """Write one self-contained HTML page: verdict, three-arm tables with intervals, robustness against cost, curves,
    gates and spectra. Only files in the run folders are read: evaluate the runs first.

    Args:
        runs: Run folders of recast train.
        out: The HTML file. None: RUN/report.html, for a single run.
    """
    for run in runs:
        RunFolder(run).check()
    from recast.lab.report import write_report

    path = write_report(list(runs), out)
    if output.as_json:
        print_json({"report": str(path)})
    else:
        print(f"report: {path}")
    return 0


COMMAND = Command(report, "RUN… [options]", EXAMPLES)
