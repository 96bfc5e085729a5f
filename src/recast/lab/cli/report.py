"""`recast report RUN…`: one HTML page, and a folder of figures."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from recast.config import FilePath, Pixels
from recast.errors import RecastError
from recast.lab.cli.command import Command, Output, print_json
from recast.lab.config import DataConfig

EXAMPLES = """  recast report runs/mine
  recast report runs/seed0 runs/seed1 --out report.html
  recast report runs/mine --figures paper/figures
  recast report --compare finetuned.safetensors child.safetensors --data-dir photos    (of a training loop of one's own)
"""


def report(
    *runs: str,
    out: FilePath | None = None,
    figures: FilePath | None = None,
    compare: bool = False,
    data: str = "folder",
    data_dir: FilePath | None = None,
    img_size: Pixels | None = None,
    trust: bool = False,
    output: Annotated[Output, Parameter(name="*")],
) -> int:
    """One self-contained HTML page: verdict, three-arm tables with intervals, robustness against cost, curves,
    gates, attention maps, frequencies, and how each number was made; --figures writes them for a paper too.
    Reads the files of run folders only; evaluate them first.

    Args:
        runs: Run folders of recast train; with --compare saved networks.
        out: The HTML file. None: RUN/report.html of one run, compare.html.
        figures: A folder for every figure as SVG, PNG and CSV, and tables.
        compare: The words are two or three files of recast.save, the one to judge last.
        data: With --compare: data set whose validation images are measured.
        data_dir: With --compare: folder of the data set.
        img_size: With --compare: side in pixels. None: the networks' own.
        trust: Run the code (pkg.module:function) that the files name.
    """
    if compare:
        if figures:
            raise RecastError("--compare draws no figures: drop --figures")
        return _compare(list(runs), out or "compare.html", DataConfig(data, data_dir, img_size=img_size), trust, output)
    for name, value in (("data-dir", data_dir), ("img-size", img_size)):
        if value is not None:
            raise RecastError(f"--{name} requires --compare")
    from recast.lab.report import write_report

    path = write_report(list(runs), out, figures)
    if output.as_json:
        print_json({"report": str(path)} | ({"figures": figures} if figures else {}))
    else:
        print(f"report: {path}")
        if figures:
            print(f"figures: {figures}")
    return 0


COMMAND = Command(report, "RUN… [options]", EXAMPLES)


def _compare(runs: list[str], out: str, config: DataConfig, trust: bool, output: Output) -> int:
    from pathlib import Path

    from recast.lab.evaluation.compare import compare

    say = lambda text: print(f"note: {text}", file=sys.stderr)  # noqa: E731
    sentence = compare(runs, config, Path(out), trust, say=say)
    if output.as_json:
        print_json({"report": out, "verdict": sentence})
    else:
        print(f"{sentence}\nreport: {out}")
    return 0
