"""`recast report RUN…`: one HTML page, and a folder of figures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from recast.errors import RecastError
from recast.fields import Pixels
from recast.lab.cli.help import Command
from recast.lab.cli.options import OutputOptions, TrustOption, Words, parse, print_json
from recast.lab.config import DataConfig

EXAMPLES = """  recast report runs/mine
  recast report runs/seed0 runs/seed1 --out report.html
  recast report runs/mine --figures paper/figures
  recast report --compare finetuned.safetensors child.safetensors --data-dir photos    (of a training loop of one's own)
"""


ABOUT = """One self-contained HTML page: verdict, three-arm tables with intervals, robustness against cost, curves,
gates, attention maps, frequencies, and how each number was made; --figures writes them for a paper too.
Reads the files of run folders only; evaluate them first."""


@dataclass
class ReportOptions(TrustOption, OutputOptions):
    """What `recast report` is asked for."""

    WORDS: ClassVar[Words] = {"runs": "+"}
    runs: list[str] = field(default_factory=list)
    """run folders of recast train, or with --compare saved networks"""
    out: str | None = None
    """the HTML file; of one run: RUN/report.html"""
    figures: str | None = None
    """a folder for every figure as SVG, PNG and CSV, and tables"""
    compare: bool = False
    """the words are two or three files of recast.save, the one to judge last; writes --out, default compare.html"""
    data: str = "folder"
    """of --compare: the data set whose validation images are measured"""
    data_dir: str | None = None
    """of --compare: where they lie"""
    img_size: Pixels | None = None
    """of --compare: side in pixels; default the networks' own"""


def run(argv: Sequence[str]) -> int:
    """Write the report and say where it is."""
    options = parse(Command("report", "RUN… [options]", ABOUT, EXAMPLES), ReportOptions(), argv)
    if options.compare:
        return _compare(options)
    for name in ("data_dir", "img_size"):
        if getattr(options, name) is not None:
            raise RecastError(f"--{name.replace('_', '-')} requires --compare")
    from recast.lab.report import write_report

    path = write_report(options.runs, options.out, options.figures)
    if options.json:
        print_json({"report": str(path)} | ({"figures": options.figures} if options.figures else {}))
    else:
        print(f"report: {path}")
        if options.figures:
            print(f"figures: {options.figures}")
    return 0


def _compare(options: ReportOptions) -> int:
    if options.figures:
        raise RecastError("--compare draws no figures: drop --figures")
    from pathlib import Path

    from recast.lab.evaluation.compare import compare

    out = Path(options.out or "compare.html")
    config = DataConfig(options.data, options.data_dir, img_size=options.img_size)
    say = lambda text: print(f"note: {text}", file=sys.stderr)  # noqa: E731
    sentence = compare(options.runs, config, out, options.trust, say=say)
    if options.json:
        print_json({"report": str(out), "verdict": sentence})
    else:
        print(f"{sentence}\nreport: {out}")
    return 0
