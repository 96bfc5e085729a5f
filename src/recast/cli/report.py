"""`recast report RUN…`: one HTML page."""

from __future__ import annotations

from collections.abc import Sequence

from recast.cli.options import new_parser, parse, print_json

EXAMPLES = """  recast report runs/mine
  recast report runs/seed0 runs/seed1 --out report.html
"""


def run(argv: Sequence[str]) -> int:
    """Write the report and say where it is."""
    parser = new_parser(
        "report",
        "RUN… [options]",
        "One self-contained HTML page: verdict, three-arm tables, curves, gates, attention maps, cost.\n"
        "Reads the files of run folders only; evaluate them first.",
        EXAMPLES,
    )
    parser.add_argument("runs", type=str, nargs="+", help="run folders of recast train")
    parser.add_argument("--out", type=str | None, default=None, help="the HTML file; of one run: RUN/report.html")
    parser.add_argument("--json", type=bool, default=False, help="machine-readable output")
    options = parse(parser, argv)

    from recast.report import write_report

    path = write_report(options.runs, options.out)
    if options.json:
        print_json({"report": str(path)})
    else:
        print(f"report: {path}")
    return 0
