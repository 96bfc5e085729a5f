"""The three arms of a run folder, rebuilt from its files, and their evaluation."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import nn

from recast.errors import RecastError
from recast.files import require
from recast.io import load
from recast.lab.config import Recipe
from recast.lab.config.evaluation import Options
from recast.lab.data import Data, load_data
from recast.lab.data.class_order import order_classes_
from recast.lab.data.fingerprint import check_classes, check_same
from recast.lab.data.sources import without_unreadable
from recast.lab.device import surroundings
from recast.lab.evaluation.context import Context
from recast.lab.evaluation.knn import sources_knn
from recast.lab.evaluation.runner import Results, measure, open_context
from recast.lab.evaluation.suites import check_data, check_suites, evaluator, passes
from recast.lab.folder.files import locked, read_json, write_json
from recast.lab.folder.image_values import write_images
from recast.lab.folder.names import ANALYSIS, CONTROL, DIFFERENCES, PROVENANCE, ROWS, SCORES, WEIGHTS
from recast.lab.folder.records import Difference, Row, write_records
from recast.lab.folder.run import RunFolder
from recast.lab.folder.tables import read_records, write_table
from recast.lab.task import task_of, task_of_images
from recast.models.build import build
from recast.models.trust import check_trusted


@dataclass(frozen=True)
class OpenRun:
    """A run folder read back: `models` holds parent, finetuned (where that arm was trained) and recast.

    Of a run that recast nothing it holds the trained network alone, as finetuned.
    """

    folder: Path
    recipe: Recipe
    data: Data
    models: dict[str, nn.Module]


def open_run(folder: str | Path, data_dir: str | None = None) -> OpenRun:
    """Rebuild the three arms of a run folder, on the CPU; `data_dir` is the folder of its images if they moved.

    Raises `RecastError` as `RunFolder.check_finished` does, and for data or weights that are missing or not the run's.
    """
    run, folder = RunFolder(folder), Path(folder)
    run.check_finished()
    recipe = run.recipe_here(data_dir)
    check_trusted(recipe.model.name)
    data = data_of(recipe)
    classes, task = len(data.classes), task_of(recipe)
    check_classes(folder, data)
    if recipe.is_plain:
        network = build(recipe.model.replace(checkpoint=None, pretrained=False), num_classes=classes)
        task.adapt_(network, recipe, classes)
        return OpenRun(folder, recipe, data, {"finetuned": load(folder / WEIGHTS, parent=network)})
    parent = order_classes_(build(recipe.model, num_classes=classes), data).eval()
    models, trained = {"parent": parent}, task.adapt_(copy.deepcopy(parent), recipe, classes)
    if (control := folder / CONTROL / WEIGHTS).is_file():
        models["finetuned"] = load(control, parent=trained)
    models["recast"] = load(folder / WEIGHTS, parent=trained)
    return OpenRun(folder, recipe, data, models)


def data_of(recipe: Recipe, labels: str | None = None) -> Data:
    """Read the data of a recipe. labels: "coarse" or "fine"; None: those of the training."""
    config = recipe.labels if labels is None else recipe.labels.replace(labels=labels)
    return load_data(recipe.data, recipe.augmentation, config, recipe.model.in_chans)


def evaluate_run(
    folder: str | Path,
    suites: Sequence[str],
    *,
    batch_size: int = 256,
    device: str = "auto",
    options: Options = Options(),
    workers: int = 0,
    command: str = "",
    progress: bool = True,
    data_dir: str | None = None,
) -> Results:
    """Measure the arms of a run on the same images and save the results in its folder.

    RUN/rows.csv, differences.csv     results; a suite's older rows are replaced
    RUN/analysis/SUITE.csv            tables of the suites that produce one
    RUN/evaluation.json               by suite: command, versions, machine, data, options, date
    RUN/scores/                       per-image scores: measured again only for other weights, images or options
    RUN/scores/images.npz             what each image contributes to each value, for the intervals of several runs
    RUN/predictions.png               of segmentation and detection: image, truth and the arms, where these differ most

    Raises `RecastError` as `open_run` and `measure` do, after writing finished results, and if another process writes
    the folder.
    """
    check_suites(suites)
    folder = Path(folder)
    with locked(folder):
        _check_files(folder)
        run = open_run(folder, data_dir)
        check_data(suites, run.data)
        check_same(folder, run.data, goes_on=False)
        data = _labelled(run, suites, options)
        if run.recipe.data.bad_image == "skip":
            data = without_unreadable(data, "val")
            if any(evaluator(name).sources is sources_knn for name in suites):
                data = without_unreadable(data, "train")
        context = replace(
            open_context(run.models, data, batch_size, device, options, workers),
            untaught=frozenset({"parent"} if RunFolder(folder).has_new_parent(run.recipe) else ()),
        )
        scores, results = folder / SCORES, Results()
        # suites that share a pass are measured together, and each group is written when it is finished
        for together in passes(suites):
            begin = time.time()
            measured = measure(context, together, run=folder.resolve().name, cache=scores, progress=progress)
            context.store.clear()  # features of a group may fill the memory
            _write(run, measured, together, context, command, time.time() - begin)
            results.extend(measured)
        task_of_images(data).draw(run, context, suites)
        return results


def _check_files(folder: Path) -> None:
    """Raise RecastError for files that results cannot be added to, before anything is measured."""
    _provenance(folder)
    for name, kind in ((ROWS, Row), (DIFFERENCES, Difference)):
        if (folder / name).is_file():
            read_records(folder / name, kind)


def _labelled(run: OpenRun, suites: Sequence[str], options: Options) -> Data:
    """Return the data of a run with the labels of the options.

    Raises RecastError for suites that need the labels of the training.
    """
    trained = run.recipe.labels.labels
    if options.labels in (None, trained):
        return run.data
    if others := [name for name in suites if "labels" not in evaluator(name).uses]:
        raise RecastError(
            f"{run.folder} was trained with {trained} labels: {others[0]} cannot be measured with "
            f"labels={options.labels}; only knn and retrieval can"
        )
    return data_of(run.recipe, options.labels)


def _provenance(folder: Path) -> dict[str, Any]:
    """Return the content of evaluation.json, {"suites": {...}}."""
    path = folder / PROVENANCE
    content = read_json(path, "suites") if path.is_file() else {"suites": {}}
    require(f"suites of {path}", content["suites"])
    return content


def _write(
    run: OpenRun, results: Results, suites: Sequence[str], context: Context, command: str, seconds: float
) -> None:
    """Write results into the run's files, where they replace all older ones of their suites.

    Results on some of the images (num_images) do not replace those on more images.
    """
    content, machine, options = _provenance(run.folder), surroundings(context.device), context.options.model_dump()
    path, written = run.folder / ROWS, set()
    older = read_records(path, Row) if path.is_file() else []
    for name in suites:
        rows = [row for row in results.rows if row.suite == name]
        if not rows and name not in results.tables:
            continue
        images = max(row.n for row in rows) if rows else results.tables[name].images
        before = content["suites"].get(name, {}).get("images", 0)
        if options["num_images"] is not None and before > images:
            warnings.warn(
                f"{run.folder} keeps {name} of {before:,} images; the result on {images:,} is not saved", stacklevel=2
            )
            continue
        written.add(name)
        if rows and name in content["suites"] and rows == [row for row in older if row.suite == name]:
            continue  # read from RUN/scores: the older provenance is right
        content["suites"][name] = {
            "command": command,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 1),
            "together_with": [other for other in suites if other != name],  # of the same pass, which share its seconds
            "dataset": rows[0].dataset if rows else run.data.name,
            "images": images,
            "options": {key: options[key] for key in options if key in (*evaluator(name).uses, "num_images", "seed")},
            "device": str(machine["device"]),
            "machine": f"{machine['platform']}, {machine['cpu_count']} CPUs",
            "versions": {package: str(machine[package]) for package in ("recast", "torch", "timm", "python")},
        }
    write_records(path, Row, [row for row in results.rows if row.suite in written])
    write_records(run.folder / DIFFERENCES, Difference, [d for d in results.differences if d.suite in written])
    write_images(run.folder, results.images, written)
    for name in results.tables.keys() & written:
        write_table(run.folder / ANALYSIS, results.tables[name])
    write_json(run.folder / PROVENANCE, content)
