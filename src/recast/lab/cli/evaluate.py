"""`recast evaluate RUN`: the arms of a run, side by side; or two saved networks."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recast.config import Count, FilePath, Pixels
from recast.errors import RecastError
from recast.lab.cli.command import Command, Compute, Line, Output, print_json
from recast.lab.cli.guard import check_alone, complain, later_process
from recast.lab.config import DataConfig
from recast.lab.config.evaluation import Options
from recast.lab.config.types import Workers
from recast.lab.evaluation.suites import METRICS, SUITES, base, is_of_class
from recast.lab.folder.files import read_existing, read_names
from recast.lab.folder.records import Difference, Row
from recast.lab.folder.run import RunFolder, follow_up
from recast.lab.task import suites_of, task_named, task_of
from recast.models.trust import trusting

if TYPE_CHECKING:
    from recast.lab.evaluation.runner import Results

EXAMPLES = """  recast evaluate runs/mine
  recast evaluate runs/mine --suite clean,pgd --eps 0.5,1,2 --steps 20 --num-images 1000
  recast evaluate runs/mine --suite imagenet-c,imagenet-a,imagenet-r --sets /data/robustness
  recast evaluate runs/mine --suite resolution --sizes 160 224 192x256
  torchrun --nproc_per_node 8 -m recast evaluate runs/mine    (processes take turns at batches)
  recast evaluate finetuned.safetensors child.safetensors --data-dir photos    (from your own training loop)
"""
LEGEND = "\nin brackets: 95 % interval of the paired difference, over the images only; ×: ratio"
UNITS = {"peak_memory": ", bytes", "macs": " per image", "no_gradient": ", of images"}
NO_CONTROL = "the parent fine-tuned the same way is missing; without this control a gain is no evidence for attention"
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
    Scores are kept in RUN/scores: run the same command again to continue an interrupted evaluation.
    Two files of recast.save are compared on the validation images of --data, with the normalisation that each states.

    Args:
        runs: Run folders of recast train; or two files of recast.save, the baseline first.
        suite: Suites, separated by commas. None: the default suites that fit the run; for two files, clean images.
        batch_size: Images per batch.
        workers: Processes that load images.
        device: auto, cpu, cuda or mps.
        data: Data set for two files. None: folder.
        data_dir: Folder of that data set, or of the images of a run if they moved.
        img_size: Side of its images in pixels. None: the networks' own.
        trust: Allow code that the files name (pkg.module:function) to run.
    """
    suites = suite.split(",") if suite else []
    if options.sizes is not None and "resolution" not in suites:
        raise RecastError("--sizes requires --suite resolution")
    are_files = any(Path(word).is_file() for word in runs)
    if not are_files and (data or img_size):
        raise RecastError("--data and --img-size require two files of recast.save; a run has its own data")
    if data_dir and not are_files and len(runs) > 1:
        raise RecastError(f"--data-dir is the folder of one run's images, got {len(runs)} runs: evaluate one at a time")
    how = {"batch_size": batch_size, "device": device, "options": options, "workers": workers}
    try:
        if are_files:
            check_alone("evaluate of two files")
            images = DataConfig(data or "folder", data_dir, img_size=img_size)
            results = _compare_files(runs, images, suites, how, trust, output)
        else:
            results = _evaluate_runs(runs, suites, {**how, "command": line, "data_dir": data_dir}, trust, output)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; scores are kept: run the same command again to continue") from None
    if later_process():
        return 0
    if output.as_json:
        print_json([asdict(row) for row in results.rows])
    for message in dict.fromkeys(map(str, results.not_measured)):
        complain("recast evaluate", f"error: {message}")
    if not (results.not_measured or are_files or output.as_json):
        print("next: " + follow_up("report", *runs, *(["--out", RunFolder(runs[0]).report.name] if runs[1:] else [])))
    return 2 if results.not_measured else 0


COMMAND = Command(
    evaluate,
    "RUN… [options]",
    EXAMPLES + "\nSuites:\n" + "\n".join(f"  {name:16} {suite.help}" for name, suite in SUITES.items()),
)


def _evaluate_runs(
    folders: Sequence[str], suites: Sequence[str], how: Mapping[str, Any], trust: bool, output: Output
) -> Results:
    """Measure the arms of each run, print their tables, and return all results."""
    try:
        for folder in folders:  # all of them before the first is measured
            RunFolder(folder).check_finished()
            RunFolder(folder).recipe_here(how["data_dir"])
        from recast.lab.evaluation.evaluators import check_suites

        if suites:
            check_suites(suites)
    except RecastError as error:
        error.is_reported = bool(later_process())  # by the first
        raise
    from recast.lab.evaluation.run_folder import evaluate_run
    from recast.lab.evaluation.runner import Results
    from recast.lab.training.distributed import process_group

    results, is_first = Results(), not later_process()
    with warnings.catch_warnings(), trusting(trust=trust), process_group(how["device"], timedelta(days=2)) as device:
        if not is_first:
            warnings.simplefilter("ignore")
        for folder in folders:
            chosen = suites or _suites_of(Path(folder))
            shows = is_first and sys.stderr.isatty()
            measured = evaluate_run(folder, chosen, progress=shows, shares=True, **{**how, "device": device})
            results.extend(measured)
            if is_first and not output.as_json:
                _print_run(Path(folder), measured)
            if {row.model for row in measured.rows} == {"parent", "recast"}:
                print(f"note: {NO_CONTROL}", file=sys.stderr)
    return results


def _print_run(folder: Path, results: Results) -> None:
    print(folder)
    if results.rows:
        print(format_arms(results.rows, results.differences, compared_with(folder, results.rows)) + LEGEND)
    for table in results.tables.values():
        print(f"  {folder / 'analysis' / table.name}.csv: {len(table.rows)} rows")


def _compare_files(
    files: Sequence[str], images: DataConfig, suites: Sequence[str], how: Mapping[str, Any], trust: bool, output: Output
) -> Results:
    """Measure two files of `recast.save` on the same images, print their table, and return the results."""
    import torch

    from recast.io import load
    from recast.lab.data import load_data
    from recast.lab.data.class_order import order_classes_
    from recast.lab.evaluation.context import PixelModel
    from recast.lab.evaluation.runner import measure, open_context
    from recast.models.build import input_defaults
    from recast.modes import in_eval

    if len(files) != 2:
        raise RecastError(f"expected run folders, or two files of recast.save, got {', '.join(files)}")
    networks = {file: load(file, trust=trust) for file in files}
    inputs = {file: input_defaults(network) for file, network in networks.items()}
    sides = {stated.size[0] for stated in inputs.values() if stated}
    if images.img_size is None and len(sides) > 1:
        raise RecastError(f"the networks take images of {sorted(sides)} pixels: choose one size with --img-size")
    channels = {len(stated.mean) for stated in inputs.values() if stated} - {3}
    images = images.replace(img_size=images.img_size or next(iter(sides), None))
    data = load_data(images, in_chans=next(iter(channels), None))
    models = {}
    for arm, file in zip(("finetuned", "recast"), files, strict=True):
        remedy = f"give images of the classes of {file} (--data, --data-dir)"
        order_classes_(networks[file], data, file, remedy)
        if inputs[file] is None:
            print(f"note: {file} states no normalisation; using that of {data.name}", file=sys.stderr)
        normalisation = inputs[file] or data
        models[arm] = PixelModel(networks[file], normalisation.mean, normalisation.std)
        if data.val.task == "classify":
            with torch.no_grad(), in_eval(networks[file]):
                logits = models[arm](data.example)
            data.check_logits(logits, 1, file, remedy)
    context = open_context(models, data, **how)
    results = measure(context, suites or [task_named(data.val.task).main[0]], progress=sys.stderr.isatty())
    for name in results.tables:
        print(f"note: skipping suite {name}: it writes a table into run folders, and these are files", file=sys.stderr)
    if results.rows and not output.as_json:
        origin = f", held out of {len(data.train) + len(data.val):,} images" * data.is_held_out
        print(f"{data.name}: {len(context.data.val):,} validation images{origin}")
        names = dict(zip(models, files, strict=True))
        print(format_arms(results.rows, results.differences, names=names) + LEGEND)
    return results


def _suites_of(folder: Path) -> list[str]:
    """Return the default suites that make sense for a run."""
    recipe = RunFolder(folder).recipe()
    fits = suites_of(task_of(recipe.task), only_default=True)
    return [name for name in fits if recipe.model.in_chans is None or not SUITES[name].needs_rgb]


def compared_with(folder: Path, rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the arms that the recast one is compared with: not a parent that never learnt these classes."""
    run = RunFolder(folder)
    classes = read_existing(run.classes_file, read_names) or ()
    no_baseline = run.why_no_baseline(run.recipe().model, len(classes), rows)
    return ("finetuned",) if no_baseline else ("parent", "finetuned")


def format_arms(
    rows: Sequence[Row],
    differences: Sequence[Difference] = (),
    others: Sequence[str] = ("parent", "finetuned"),
    names: Mapping[str, str] = NAMES,
) -> str:
    """Return one line per metric: the arms, and what recast is above the others.

    Behind a difference stands its 95 % interval over the images, if they determine one. Of a corruption suite only
    means over the kinds are shown, and no single class; the rest is in rows.csv.
    """
    from rich.table import Table

    from recast.surgery.table import render  # needs torch, which the help does without

    intervals = {(d.suite, d.metric, d.against): (d.low, d.high) for d in differences if d.model == "recast"}
    values: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row.metric.count("/") < 2 and not is_of_class(row.metric):
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
        low, high = interval or (-math.inf, math.inf)
        return f"{value - other:+z.2f}" + (f" ({low:+z.1f}, {high:+z.1f})" if math.isfinite(high - low) else "")
    return f"× {value / other:.3g}" if other else ""
