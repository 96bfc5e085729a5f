"""`recast report RUN…`: one HTML page, and a folder of figures."""

from __future__ import annotations

from collections.abc import Sequence

from recast.cli.options import new_parser, parse, print_json

EXAMPLES = """  recast report runs/mine
  recast report runs/seed0 runs/seed1 --out report.html
  recast report runs/mine --figures paper/figures
"""


def run(argv: Sequence[str]) -> int:
    """Write the report and say where it is."""
    parser = new_parser(
        "report",
        "RUN… [options]",
        "One self-contained HTML page: verdict, three-arm tables with intervals, robustness against cost, curves,\n"
        "gates, attention maps, frequencies, and how each number was made; --figures writes them for a paper too.\n"
        "Reads the files of run folders only; evaluate them first.",
        EXAMPLES,
    )
    parser.add_argument("runs", type=str, nargs="+", help="run folders of recast train")
    parser.add_argument("--out", type=str | None, default=None, help="the HTML file; of one run: RUN/report.html")
    parser.add_argument(
        "--figures", type=str | None, default=None, help="a folder for every figure as SVG, PNG and CSV, and tables"
    )
    parser.add_argument("--json", type=bool, default=False, help="machine-readable output")
    options = parse(parser, argv)

    from recast.report import write_report

    path = write_report(options.runs, options.out, options.figures)
    if options.json:
        print_json({"report": str(path)} | ({"figures": options.figures} if options.figures else {}))
    else:
        print(f"report: {path}")
        if options.figures:
            print(f"figures: {options.figures}")
    return 0
