"""`recast evaluate RUN`: the arms of a run, side by side."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from recast.config import Count, Workers
from recast.errors import RecastError
from recast.files import read_names
from recast.lab.cli.command import Command, Compute, Line, print_json
from recast.lab.cli.guard import complain
from recast.lab.config.evaluation import Options
from recast.lab.recipe import functions_of, load_recipe, why_untaught
from recast.lab.records import Difference, Row
from recast.lab.suites import METRICS, PER_CLASS, SUITES, base
from recast.lab.tasks import suites_of, task_of
from recast.models.trust import follow_up, trusting

if TYPE_CHECKING:
    from recast.lab.evaluation.runner import Results

EXAMPLES = """  recast evaluate runs/mine
  recast evaluate runs/mine --suite clean,pgd --eps 0.5,1,2 --steps 20 --restarts 3 --num-images 1000
  recast evaluate runs/mine --suite imagenet-c,imagenet-a,imagenet-r --sets /data/robustness
  recast evaluate runs/mine --suite resolution --sizes 160 224 192x256
"""
LEGEND = "\nin brackets the 95 % interval of the paired difference over the images, where any changed; × the ratio"
UNITS = {"peak_memory": ", bytes", "macs": " per image", "weight_decay": ", log₁₀", "no_gradient": ", of images"}


def evaluate(
    *runs: str,
    suite: Annotated[list[str], Parameter(consume_multiple=False)] | None = None,
    batch_size: Count = 256,
    workers: Workers = 0,
    device: str = "auto",
    again: bool = False,
    trust: bool = False,
    options: Annotated[Options, Parameter(name="*")],
    output: Annotated[Compute, Parameter(name="*")],
    line: Line,
) -> int:
    """Measure parent, fine-tuned parent and recast model of each run on the same images, with 95 % intervals.
    What was measured is kept in RUN/scores by weights, images and options: the same command goes on where it stopped.

    Args:
        runs: Run folders of recast train.
        suite: What to measure, with commas. None: all of the default ones that fit the run.
        batch_size: Images at a time.
        workers: Processes that load images.
        device: auto, cpu, cuda or mps.
        again: Measure anew what is in RUN/scores.
        trust: Run the code (pkg.module:function) that the files name.
    """
    if options.sizes is not None and "resolution" not in (suite or ()):
        raise RecastError("--sizes requires --suite resolution")
    from recast.lab.evaluation.context import NotMeasured
    from recast.lab.evaluation.run_folder import check_run, evaluate_run

    rows: list[Row] = []
    missing: dict[str, NotMeasured] = {}
    try:
        with trusting(trust=trust):
            for folder in runs:  # all of them before the first is measured
                check_run(folder)
            for folder in runs:
                results = evaluate_run(
                    folder, suite or _suites_of(Path(folder)), batch_size=batch_size, device=device, options=options,
                    workers=workers, again=again, command=line, progress=sys.stderr.isatty(),
                )  # fmt: skip
                rows += results.rows
                missing |= {str(error): error for error in results.not_measured}
                if not output.as_json:
                    _print(Path(folder), results)
                if {row.model for row in results.rows} == {"parent", "recast"}:
                    print(f"note: {_why_two_arms(Path(folder))}", file=sys.stderr)
    except KeyboardInterrupt:
        note = "what was scored is kept, and the same command goes on from there"
        raise KeyboardInterrupt(f"interrupted: {note}") from None
    if output.as_json:
        print_json([asdict(row) for row in rows])
    for error in missing:
        complain("recast evaluate", f"error: {error}")
    if rows and not output.as_json:
        print(f"next: recast report {shlex.join(runs)}" + (" --out FILE.html" if runs[1:] else ""))
    return 2 if missing else 0


COMMAND = Command(
    evaluate, "RUN… [options]",
    EXAMPLES + "\nSuites:\n" + "\n".join(f"  {name:16} {suite.help}" for name, suite in SUITES.items()),
)  # fmt: skip


def _print(folder: Path, results: Results) -> None:
    table = arms_table(results.rows, results.differences, compared_with(folder, results.rows))
    print(f"{folder}\n{table}{LEGEND}" if results.rows else str(folder))
    for saved in results.tables.values():
        print(f"  {folder / 'analysis' / saved.name}.csv: {len(saved.rows)} rows")


def _suites_of(folder: Path) -> list[str]:
    """Return the default suites that make sense for a run."""
    recipe = load_recipe(folder / "recipe.yaml", complete=True)
    has_arms, has_heads = not recipe.is_plain, recipe.has_layers
    fits = suites_of(task_of(recipe), only_default=True)
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
