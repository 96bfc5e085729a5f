"""`recast evaluate RUN`: the arms of a run, side by side."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from recast.cli.arms import arms_table
from recast.cli.options import new_parser, parse, print_json

EXAMPLES = """  recast evaluate runs/mine
  recast evaluate runs/mine --suite clean,pgd --eps 0.5,1,2 --num-val 1000
"""
DEFAULT_SUITES = ["clean", "fgsm", "pgd", "basic", "cost"]


def run(argv: Sequence[str]) -> int:
    """Measure runs, write their rows.csv, print the three-arm tables."""
    parser = new_parser(
        "evaluate",
        "RUN… [options]",
        "Measure parent, fine-tuned parent and recast model of each run on the same validation images.\n"
        "Suites: clean, fgsm, pgd (ε in 1/255 of a [0, 1] pixel), basic (five corruptions × 5 severities), cost.",
        EXAMPLES,
    )
    parser.add_argument("runs", type=str, nargs="+", help="run folders of recast train")
    parser.add_argument("--suite", type=list[str], default=DEFAULT_SUITES, help="which suites, with commas")
    parser.add_argument("--eps", type=list[float], default=[1.0, 4.0], help="budgets of the attacks in 1/255")
    parser.add_argument("--num_val", type=int | None, default=None, help="use this many validation images")
    parser.add_argument("--batch_size", type=int, default=256, help="images at a time")
    parser.add_argument("--device", type=str, default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--json", type=bool, default=False, help="machine-readable output")
    options = parse(parser, argv)

    from recast.evaluation.run_folder import check_run, evaluate_run

    for folder in options.runs:  # all of them before the first is measured
        check_run(folder)
    found = []
    for folder in options.runs:
        try:
            rows = evaluate_run(
                folder,
                options.suite,
                num_val=options.num_val,
                batch_size=options.batch_size,
                device=options.device,
                eps=options.eps,
                progress=sys.stderr.isatty(),
            )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"interrupted: nothing of {folder} was written; run the command again") from None
        found += rows
        if not options.json:
            print(f"{folder}\n{arms_table(rows)}")
        if {row.model for row in rows} == {"parent", "recast"}:
            print(f"note: {_why_two_arms(Path(folder))}", file=sys.stderr)
    if options.json:
        print_json([asdict(row) for row in found])
    else:
        planned = [folder for folder in options.runs if (Path(folder) / "plan.json").is_file()]
        if not planned:
            return 0  # nothing was recast: there is nothing more to report
        print(f"next: recast report {shlex.join(planned)}" + (" --out FILE.html" if options.runs[1:] else ""))
    return 0


def _why_two_arms(folder: Path) -> str:
    why = "the parent fine-tuned the same way is missing, and without it a gain proves nothing"
    if (folder / "finetuned").is_dir():
        return f"{why}: finish it with recast train --resume {shlex.quote(str(folder))}"
    return f"{why}: this run was trained without its control arm"
