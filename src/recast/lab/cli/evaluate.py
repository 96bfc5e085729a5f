"""`recast evaluate RUN`: the arms of a run, side by side."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar

from recast.config import Count, Workers
from recast.errors import RecastError
from recast.files import read_names
from recast.lab.cli.guard import complain
from recast.lab.cli.help import Command
from recast.lab.cli.options import ComputeOptions, TrustOption, Words, parse, print_json
from recast.lab.config.evaluation import Options
from recast.lab.recipe import functions_of, load_recipe, why_untaught
from recast.lab.records import Difference, Row
from recast.lab.suites import METRICS, PER_CLASS, SUITES, base
from recast.lab.tasks import suites_of, task_of_data
from recast.models.trust import follow_up, trusting

EXAMPLES = """  recast evaluate runs/mine
  recast evaluate runs/mine --suite clean,pgd --eps 0.5,1,2 --steps 20 --restarts 3 --num-images 1000
  recast evaluate runs/mine --suite imagenet-c,imagenet-a,imagenet-r --sets /data/robustness
  recast evaluate runs/mine --suite resolution --sizes 160 224 192x256
"""
LEGEND = "\nin brackets the 95 % interval of the paired difference over the images, where any changed; × the ratio"
ABOUT = """Measure parent, fine-tuned parent and recast model of each run on the same images, with 95 % intervals.
What was measured is kept in RUN/scores by weights, images and options: the same command goes on where it
stopped. Suites:

"""
DEFAULTS = [name for name, suite in SUITES.items() if suite.default]
UNITS = {"peak_memory": ", bytes", "macs": " per image", "weight_decay": ", log₁₀", "no_gradient": ", of images"}


@dataclass
class EvaluateOptions(TrustOption, ComputeOptions):
    """What `recast evaluate` is asked for."""

    WORDS: ClassVar[Words] = {"runs": "+"}
    runs: list[str] = field(default_factory=list)
    """run folders of recast train"""
    suite: list[str] = field(default_factory=lambda: list(DEFAULTS))
    """which suites, with commas"""
    batch_size: Count = 256
    """images at a time"""
    workers: Workers = 0
    """processes that load images"""
    device: str = "auto"
    """auto, cpu, cuda or mps"""
    again: bool = False
    """measure anew what is in RUN/scores"""
    options: Options = field(default_factory=Options)


def run(argv: Sequence[str]) -> int:
    """Measure runs, write their rows.csv, print the three-arm tables."""
    about = ABOUT + "\n".join(f"  {name:16} {suite.help}" for name, suite in SUITES.items())
    options = parse(Command("evaluate", "RUN… [options]", about, EXAMPLES), EvaluateOptions(), argv)
    try:
        with trusting(trust=options.trust):
            return _evaluate(options, shlex.join(["recast", "evaluate", *argv]))
    except KeyboardInterrupt:
        kept = "what was scored is kept, and the same command goes on from there"
        raise KeyboardInterrupt(f"interrupted: {kept}") from None


def _evaluate(options: EvaluateOptions, command: str) -> int:
    from recast.lab.evaluation.context import NotMeasured
    from recast.lab.evaluation.run_folder import check_run, evaluate_run

    if options.options.sizes is not None and "resolution" not in options.suite:
        raise RecastError("--sizes are those of the suite resolution, which is not asked for: add --suite resolution")
    for folder in options.runs:  # all of them before the first is measured
        check_run(folder)
    rows: list[Row] = []
    missing: dict[str, NotMeasured] = {}
    for folder in options.runs:
        found = evaluate_run(
            folder,
            _suites(options.suite, Path(folder)),
            batch_size=options.batch_size,
            device=options.device,
            options=options.options,
            workers=options.workers,
            again=options.again,
            command=command,
            progress=sys.stderr.isatty(),
        )
        rows += found.rows
        missing |= {str(error): error for error in found.not_measured}
        if not options.json:
            table = arms_table(found.rows, found.differences, compared_with(Path(folder), found.rows))
            print(f"{folder}\n{table}{LEGEND}" if found.rows else str(folder))
            for kept in found.tables.values():
                print(f"  {Path(folder) / 'analysis' / kept.name}.csv: {len(kept.rows)} rows")
        if {row.model for row in found.rows} == {"parent", "recast"}:
            print(f"note: {_why_two_arms(Path(folder))}", file=sys.stderr)
    if options.json:
        print_json([asdict(row) for row in rows])
    for error in missing.values():
        complain("recast evaluate", f"error: {error}")
    if rows and not options.json:
        print(f"next: recast report {shlex.join(options.runs)}" + (" --out FILE.html" if options.runs[1:] else ""))
    return 2 if missing else 0


def _suites(asked: list[str], folder: Path) -> list[str]:
    """What is asked for, or the defaults that make sense for the run."""
    if asked != list(DEFAULTS):
        return asked
    recipe = load_recipe(folder / "recipe.yaml", complete=True)
    has_arms, has_heads = not recipe.is_plain, recipe.has_layers
    fits = suites_of(task_of_data(recipe.data), only_default=True)
    return [name for name in fits if {"agreement": has_arms, "heads": has_heads}.get(name, True)]


def compared_with(folder: Path, rows: Sequence[Row]) -> tuple[str, ...]:
    """The arms that the recast one is compared with: not a parent that never learnt these classes."""
    names = folder / "classes.json"
    classes = len(read_names(names)) if names.is_file() else 0
    untaught = why_untaught(load_recipe(folder / "recipe.yaml", complete=True), folder, classes, rows)
    return ("finetuned",) if untaught else ("parent", "finetuned")


def _why_two_arms(folder: Path) -> str:
    why = "the parent fine-tuned the same way is missing, and without it a gain proves nothing"
    if (folder / "finetuned").is_dir():
        functions = functions_of(load_recipe(folder / "recipe.yaml", complete=True))
        return f"{why}: finish it with {follow_up('train', '--resume', str(folder), functions=functions)}"
    return f"{why}: this run was trained without its control arm"


def arms_table(
    rows: Sequence[Row], differences: Sequence[Difference] = (), others: Sequence[str] = ("parent", "finetuned")
) -> str:
    """One line per metric: the arms, and what recast is above the others.

    Behind a difference stands its 95 % interval, if any image changed sides. Of a corruption suite only means over the
    kinds are shown, and no single class; the rest is in rows.csv.
    """
    from recast.surgery.table import render  # needs torch, which the help does without

    intervals = {(d.suite, d.metric, d.against): (d.low, d.high) for d in differences if d.model == "recast"}
    values: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row.metric.count("/") < 2 and not PER_CLASS.match(row.metric):
            values.setdefault((row.suite, row.metric), {})[row.model] = row.value
    from rich.table import Table

    table = Table()
    table.add_column("measure", no_wrap=True)
    names = {"parent": "parent", "finetuned": "fine-tuned", "recast": "recast"}
    for title in (*names.values(), *(f"recast\n− {names[other]}" for other in others)):
        table.add_column(title, justify="right", no_wrap=True)
    for (suite, metric), of in values.items():
        percent = base(metric) in METRICS and METRICS[base(metric)].unit == "%"
        cells = [_number(of.get(arm), percent) for arm in names]
        for other in others:
            interval = intervals.get((suite, metric, other))
            cells.append(_difference(of.get("recast"), of.get(other), percent, interval))
        table.add_row(f"{suite} {metric}{UNITS.get(metric, '')}", *cells)
    return render(table)


def _number(value: float | None, percent: bool) -> str:
    if value is None:
        return "–"
    if percent:
        return f"{value:.2f} %"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _difference(value: float | None, other: float | None, percent: bool, interval: tuple[float, float] | None) -> str:
    if value is None or other is None:
        return ""
    if percent:
        low, high = interval or (0.0, 0.0)
        return f"{value - other:+.2f}" + (f" ({low:+.1f}, {high:+.1f})" if low < high else "")
    return f"× {value / other:.3g}" if other else ""
