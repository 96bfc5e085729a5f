"""`recast evaluate RUN`: the arms of a run, side by side; or two saved networks."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from recast.config import Count, FilePath, Pixels, Workers
from recast.errors import RecastError
from recast.files import read_names
from recast.lab.cli.command import Command, Compute, Line, print_json
from recast.lab.cli.guard import complain
from recast.lab.config import DataConfig
from recast.lab.config.evaluation import Options
from recast.lab.recipe import load_recipe, why_untaught
from recast.lab.records import Difference, Row
from recast.lab.suites import METRICS, PER_CLASS, SUITES, base
from recast.lab.tasks import suites_of, task_of
from recast.models.trust import trusting

if TYPE_CHECKING:
    from recast.lab.evaluation.context import Context, NotMeasured

EXAMPLES = """  recast evaluate runs/mine
  recast evaluate runs/mine --suite clean,pgd --eps 0.5,1,2 --steps 20 --restarts 3 --num-images 1000
  recast evaluate runs/mine --suite imagenet-c,imagenet-a,imagenet-r --sets /data/robustness
  recast evaluate runs/mine --suite resolution --sizes 160 224 192x256
  recast evaluate finetuned.safetensors child.safetensors --data-dir photos    (of a training loop of one's own)
"""
LEGEND = "\nin brackets the 95 % interval of the paired difference over the images, where any changed; × the ratio"
UNITS = {"peak_memory": ", bytes", "macs": " per image", "no_gradient": ", of images"}
NO_CONTROL = "the parent fine-tuned the same way is missing, and without it a gain proves nothing"
NAMES = {"parent": "parent", "finetuned": "fine-tuned", "recast": "recast"}


def evaluate(
    *runs: str,
    suite: str | None = None,
    batch_size: Count = 256,
    workers: Workers = 0,
    device: str = "auto",
    data: str | None = None,
    data_dir: FilePath | None = None,
    img_size: Pixels | None = None,
    trust: bool = False,
    options: Options,
    output: Compute,
    line: Line,
) -> int:
    """Measure parent, fine-tuned parent and recast model of each run on the same images, with 95 % intervals.
    What was measured is kept in RUN/scores by weights, images and options: the same command goes on where it stopped.
    Two files of recast.save are compared on the validation images of --data, normalised as they state.

    Args:
        runs: Run folders of recast train; or two files of recast.save, the one to judge last.
        suite: What to measure, with commas. None: all of the default ones that fit the run, clean images of files.
        batch_size: Images at a time.
        workers: Processes that load images.
        device: auto, cpu, cuda or mps.
        data: Data set of two files. None: folder.
        data_dir: Folder of that data set.
        img_size: Side of its images in pixels. None: the networks' own.
        trust: Run the code (pkg.module:function) that the files name.
    """
    suites = suite.split(",") if suite else []
    if options.sizes is not None and "resolution" not in suites:
        raise RecastError("--sizes requires --suite resolution")
    are_files = any(Path(word).is_file() for word in runs)
    if not are_files and (data or data_dir or img_size):
        raise RecastError("--data, --data-dir and --img-size require two files of recast.save; a run has its own data")
    from recast.lab.evaluation.run_folder import check_run, evaluate_run
    from recast.lab.evaluation.runner import measure

    rows: list[Row] = []
    missing: dict[str, NotMeasured] = {}
    progress = sys.stderr.isatty()
    try:
        if are_files:
            config = DataConfig(data or "folder", data_dir, img_size=img_size, workers=workers)
            context = _open_files(runs, config, batch_size, device, options, trust)
            results = measure(context, suites or [context.data.task.main[0]], progress=progress)
            rows, missing = results.rows, {str(error): error for error in results.not_measured}
            if not output.as_json:
                names = dict(zip(context.models, runs, strict=True))
                print(arms_table(rows, results.differences, names=names) + LEGEND)
            runs = ()
        with trusting(trust=trust):
            for folder in runs:  # all of them before the first is measured
                check_run(folder)
            for folder in runs:
                results = evaluate_run(
                    folder, suites or _suites_of(Path(folder)), batch_size=batch_size, device=device, options=options,
                    workers=workers, command=line, progress=progress,
                )  # fmt: skip
                rows += results.rows
                missing |= {str(error): error for error in results.not_measured}
                if not output.as_json:
                    table = arms_table(results.rows, results.differences, compared_with(Path(folder), results.rows))
                    print(f"{folder}\n{table}{LEGEND}" if results.rows else folder)
                    for saved in results.tables.values():
                        print(f"  {Path(folder, 'analysis', saved.name)}.csv: {len(saved.rows)} rows")
                if {row.model for row in results.rows} == {"parent", "recast"}:
                    print(f"note: {NO_CONTROL}", file=sys.stderr)
    except KeyboardInterrupt:
        note = "what was scored is kept, and the same command goes on from there"
        raise KeyboardInterrupt(f"interrupted: {note}") from None
    if output.as_json:
        print_json([asdict(row) for row in rows])
    for error in missing:
        complain("recast evaluate", f"error: {error}")
    if rows and runs and not output.as_json:
        print(f"next: recast report {shlex.join(runs)}" + (" --out FILE.html" if runs[1:] else ""))
    return 2 if missing else 0


COMMAND = Command(
    evaluate, "RUN… [options]",
    EXAMPLES + "\nSuites:\n" + "\n".join(f"  {name:16} {suite.help}" for name, suite in SUITES.items()),
)  # fmt: skip


def _open_files(
    files: Sequence[str], config: DataConfig, batch_size: int, device: str, options: Options, trust: bool
) -> Context:
    """Open two files of `recast.save`: images as the networks state (timm's do), else as the data set says."""
    from recast.io import load
    from recast.lab.data import load_data
    from recast.lab.evaluation.context import PixelModel
    from recast.lab.evaluation.runner import open_context
    from recast.models.build import input_defaults

    if len(files) != 2:
        raise RecastError(f"expected run folders, or two files of recast.save, got {len(files)} words")
    networks = {file: load(file, trust=trust) for file in files}
    stated = {file: input_defaults(network) for file, network in networks.items()}
    sides = {defaults.size[0] for defaults in stated.values() if defaults}
    if config.img_size is None and len(sides) > 1:
        raise RecastError(f"the networks take images of {sorted(sides)} pixels: choose one, --img-size")
    channels = {len(defaults.mean) for defaults in stated.values() if defaults} - {3}
    in_chans = next(iter(channels), None)
    images = load_data(config.replace(img_size=config.img_size or next(iter(sides), None)), in_chans=in_chans)
    for file in (file for file in files if stated[file] is None):
        print(f"note: {file} states no normalisation; it gets that of {images.name}", file=sys.stderr)
    models = {
        arm: PixelModel(networks[file], (stated[file] or images).mean, (stated[file] or images).std)
        for arm, file in zip(("finetuned", "recast"), files, strict=True)
    }
    return open_context(models, images, batch_size, device, options, config.workers)


def _suites_of(folder: Path) -> list[str]:
    """Return the default suites that make sense for a run."""
    recipe = load_recipe(folder / "recipe.yaml", complete=True)
    fits = suites_of(task_of(recipe), only_default=True)
    if recipe.model.in_chans is not None:
        fits = [name for name in fits if not SUITES[name].needs_rgb]
    return [name for name in fits if name != "heads" or recipe.has_layers]


def compared_with(folder: Path, rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the arms that the recast one is compared with: not a parent that never learnt these classes."""
    names = folder / "classes.json"
    classes = len(read_names(names)) if names.is_file() else 0
    untaught = why_untaught(load_recipe(folder / "recipe.yaml", complete=True), folder, classes, rows)
    return ("finetuned",) if untaught else ("parent", "finetuned")


def arms_table(
    rows: Sequence[Row],
    differences: Sequence[Difference] = (),
    others: Sequence[str] = ("parent", "finetuned"),
    names: Mapping[str, str] = NAMES,
) -> str:
    """Return one line per metric: the arms, and what recast is above the others.

    Behind a difference stands its 95 % interval, if any image changed sides. Of a corruption suite only means over the
    kinds are shown, and no single class; the rest is in rows.csv.
    """
    from rich.table import Table

    from recast.surgery.table import render  # needs torch, which the help does without

    intervals = {(d.suite, d.metric, d.against): (d.low, d.high) for d in differences if d.model == "recast"}
    values: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row.metric.count("/") < 2 and not PER_CLASS.match(row.metric):
            values.setdefault((row.suite, row.metric), {})[row.model] = row.value
    others = [other for other in others if other in names]
    table = Table()
    table.add_column("measure", no_wrap=True)
    for title in (*names.values(), *(f"{names['recast']}\n− {names[other]}" for other in others)):
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
