"""`recast report RUN…`: one HTML page, and a folder of figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from recast.cli.help import Command
from recast.cli.options import OutputOptions, Words, parse, print_json

EXAMPLES = """  recast report runs/mine
  recast report runs/seed0 runs/seed1 --out report.html
  recast report runs/mine --figures paper/figures
"""


ABOUT = """One self-contained HTML page: verdict, three-arm tables with intervals, robustness against cost, curves,
gates, attention maps, frequencies, and how each number was made; --figures writes them for a paper too.
Reads the files of run folders only; evaluate them first."""


@dataclass
class ReportOptions(OutputOptions):
    """What `recast report` is asked for."""

    WORDS: ClassVar[Words] = {"runs": "+"}
    runs: list[str] = field(default_factory=list)
    """run folders of recast train"""
    out: str | None = None
    """the HTML file; of one run: RUN/report.html"""
    figures: str | None = None
    """a folder for every figure as SVG, PNG and CSV, and tables"""


def run(argv: Sequence[str]) -> int:
    """Write the report and say where it is."""
    options = parse(Command("report", "RUN… [options]", ABOUT, EXAMPLES), ReportOptions(), argv)

    from recast.report import write_report

    path = write_report(options.runs, options.out, options.figures)
    if options.json:
        print_json({"report": str(path)} | ({"figures": options.figures} if options.figures else {}))
    else:
        print(f"report: {path}")
        if options.figures:
            print(f"figures: {options.figures}")
    return 0
