"""`recast evaluate RUN`: the arms of a run, side by side."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from jsonargparse import Namespace

from recast.cli.arms import arms_table
from recast.cli.options import new_parser, parse, print_json
from recast.run.recipe import load_recipe
from recast.run.records import Row
from recast.run.suites import DEFAULTS, SUITES

EXAMPLES = """  recast evaluate runs/mine
  recast evaluate runs/mine --suite clean,pgd --eps 0.5,1,2 --steps 20 --restarts 3 --num-samples 1000
  recast evaluate runs/mine --suite imagenet-c,imagenet-a,imagenet-r --sets /data/robustness
  recast evaluate runs/mine --suite resolution --sizes 160 224 192x256
"""
LEGEND = "\n± half the 95 % interval of the paired difference over the images; × the ratio"


def run(argv: Sequence[str]) -> int:
    """Measure runs, write their rows.csv, print the three-arm tables."""
    parser = new_parser(
        "evaluate",
        "RUN… [options]",
        "Measure parent, fine-tuned parent and recast model of each run on the same images, with 95 % intervals.\n"
        "What was measured is kept in RUN/scores by weights, images and options: the same command goes on where it\n"
        "stopped. Suites:\n\n" + "\n".join(f"  {name:16} {suite.help}" for name, suite in SUITES.items()),
        EXAMPLES,
    )
    parser.add_argument("runs", type=str, nargs="+", help="run folders of recast train")
    parser.add_argument(
        "--suite", type=list[str], default=[], help="which suites, with commas; None: " + ",".join(DEFAULTS)
    )
    parser.add_argument("--num_samples", type=int | None, default=None, help="use this many images, class-balanced")
    parser.add_argument("--eps", type=list[float], default=[1.0, 4.0], help="budgets of the attacks in 1/255")
    parser.add_argument("--steps", type=int, default=5, help="steps of PGD")
    parser.add_argument("--step_size", type=float | None, default=None, help="of PGD in 1/255; None: 2.5·ε/steps")
    parser.add_argument("--restarts", type=int, default=1, help="starts of PGD, from the second on random ones")
    parser.add_argument("--random_start", type=bool, default=False, help="start PGD at a random point of the ball")
    parser.add_argument("--sizes", type=list[str], default=[], help="test sizes: 160 or 128x192 (height x width)")
    parser.add_argument("--neighbours", type=list[int], default=[1, 5, 10, 20], help="k of the knn suite")
    parser.add_argument(
        "--sets",
        type=str | None,
        default=None,
        help="folder of imagenet-c/, imagenet-a/ ...; None: the one that RECAST_DATA names",
    )
    parser.add_argument("--seed", type=int, default=0, help="of corruptions, random starts and intervals")
    parser.add_argument("--batch_size", type=int, default=256, help="images at a time")
    parser.add_argument("--workers", type=int, default=0, help="processes that load images")
    parser.add_argument("--device", type=str, default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--again", type=bool, default=False, help="measure anew what is in RUN/scores")
    parser.add_argument("--json", type=bool, default=False, help="machine-readable output")
    options = parse(parser, argv)
    try:
        return _evaluate(options, shlex.join(["recast", "evaluate", *argv]))
    except KeyboardInterrupt:
        kept = "what was scored is kept, and the same command goes on from there"
        raise KeyboardInterrupt(f"interrupted: {kept}") from None


def _evaluate(options: Namespace, command: str) -> int:
    from recast.evaluation.bench import NotMeasured, Options
    from recast.evaluation.run_folder import check_run, evaluate_run

    for folder in options.runs:  # all of them before the first is measured
        check_run(folder)
    told = Options(
        eps=tuple(options.eps),
        steps=options.steps,
        step_size=options.step_size,
        restarts=options.restarts,
        random_start=options.random_start,
        sizes=tuple(options.sizes),
        neighbours=tuple(options.neighbours),
        sets=Path(options.sets).expanduser() if options.sets else None,
        num_samples=options.num_samples,
        seed=options.seed,
    )
    rows: list[Row] = []
    missing: dict[str, NotMeasured] = {}
    for folder in options.runs:
        found = evaluate_run(
            folder,
            _suites(options.suite, Path(folder)),
            batch_size=options.batch_size,
            device=options.device,
            options=told,
            workers=options.workers,
            again=options.again,
            command=command,
            progress=sys.stderr.isatty(),
        )
        rows += found.rows
        missing |= {str(error): error for error in found.not_measured}
        if not options.json:
            print(f"{folder}\n{arms_table(found.rows, found.differences)}{LEGEND}" if found.rows else str(folder))
            for table in found.tables.values():
                print(f"  {Path(folder) / 'analysis' / table.name}.csv: {len(table.rows)} rows")
        if {row.model for row in found.rows} == {"parent", "recast"}:
            print(f"note: {_why_two_arms(Path(folder))}", file=sys.stderr)
    if options.json:
        print_json([asdict(row) for row in rows])
    for error in missing.values():
        print(f"recast evaluate: error: {error}", file=sys.stderr)
    if rows and not options.json:
        print(f"next: recast report {shlex.join(options.runs)}" + (" --out FILE.html" if options.runs[1:] else ""))
    return 2 if missing else 0


def _suites(asked: list[str], folder: Path) -> list[str]:
    """What is asked for, or the defaults that make sense for the run."""
    if asked:
        return asked
    recipe = load_recipe(folder / "recipe.yaml")
    has_arms, has_heads = not recipe.is_plain, recipe.has_layers
    return [name for name in DEFAULTS if {"agreement": has_arms, "heads": has_heads}.get(name, True)]


def _why_two_arms(folder: Path) -> str:
    why = "the parent fine-tuned the same way is missing, and without it a gain proves nothing"
    if (folder / "finetuned").is_dir():
        return f"{why}: finish it with recast train --resume {shlex.quote(str(folder))}"
    return f"{why}: this run was trained without its control arm"
