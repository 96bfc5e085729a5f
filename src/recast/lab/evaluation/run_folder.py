"""The evaluation of a run folder."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from recast.errors import RecastError, listed
from recast.files import require
from recast.lab.config.evaluation import Options
from recast.lab.data import Data
from recast.lab.data.device import surroundings
from recast.lab.data.sources import without_unreadable
from recast.lab.evaluation.context import Context
from recast.lab.evaluation.evaluators import check_data, check_suites, evaluator, passes
from recast.lab.evaluation.image_values import write_images
from recast.lab.evaluation.knn import sources_knn
from recast.lab.evaluation.runner import Results, measure, open_context
from recast.lab.folder.files import locked, read_json, write_json
from recast.lab.folder.records import Difference, Row, write_records
from recast.lab.folder.run import RunFolder
from recast.lab.folder.tables import write_table
from recast.lab.open import OpenRun, check_same, data_of_recipe, open_run
from recast.lab.task import task_named
from recast.lab.training.distributed import first_then_all, held, process_count, process_number


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
    shares: bool = False,
) -> Results:
    """Measure the arms of a run on the same images and save the results in its folder.

    RUN/rows.csv, differences.csv     results on the run's own images; a suite's older rows are replaced
    RUN/analysis/SUITE.csv            tables of the suites that produce one
    RUN/evaluation.json               by suite: command, versions, machine, data, options, date
    RUN/scores/                       per-image scores: measured again only for other weights, images or options
    RUN/scores/images.npz             what each image contributes to each value, for the intervals of several runs
    RUN/predictions.png               of segmentation and detection: image, truth and the arms, where these differ most

    shares: the processes of torchrun, all of which call this, take turns at the batches; the first one writes.

    Raises `RecastError` as `open_run` and `measure` do, after writing finished results, and if another process writes
    the folder.
    """
    check_suites(suites)
    with held(Path(folder)) if shares else locked(folder):
        _check_files(RunFolder(folder))
        run = first_then_all(open_run, folder, data_dir) if shares else open_run(folder, data_dir)
        check_data(suites, run.data)
        has_its_images = check_same(run.folder, run.data, goes_on=False)
        data = _labelled(run, suites, options)
        if run.recipe.data.bad_image == "skip":
            data = without_unreadable(data, "val")
            if any(evaluator(name).sources is sources_knn for name in suites):
                data = without_unreadable(data, "train")
        context = replace(
            open_context(run.models, data, batch_size, device, options, workers),
            process=process_number() if shares else 0,
            processes=process_count() if shares else 1,
            with_new_classifier=frozenset({"parent"} if run.folder.has_new_parent(run.recipe.model) else ()),
        )
        unsaved = [] if has_its_images else [name for name in suites if context.dataset(name) == data.name]
        if unsaved:
            warnings.warn(
                f"{run.folder} keeps results on its own validation images: {listed(unsaved, 5)} of others will be "
                "printed, not saved",
                stacklevel=2,
            )
        results = Results()
        # suites that share a pass are measured together, and each group is written when it is finished
        # what only the first process measures comes last
        for together in sorted(passes(suites), key=lambda names: evaluator(names[0]).score is None):
            begin = time.time()
            measured = measure(context, together, run=run.folder.name, cache=run.folder.scores, progress=progress)
            context.store.clear()  # features of a group may fill the memory
            if not context.process:
                saved = [name for name in together if name not in unsaved]
                _write(run, measured, saved, context, command, time.time() - begin)
            results.extend(measured)
        if not context.process:
            task_named(data.val.task).draw(run, context, [name for name in suites if name not in unsaved])
        return results


def _check_files(folder: RunFolder) -> None:
    """Raise RecastError for files that results cannot be added to, before anything is measured."""
    _provenance(folder)
    folder.rows()
    folder.differences()


def _labelled(run: OpenRun, suites: Sequence[str], options: Options) -> Data:
    """Return the data of a run with the labels of the options.

    Raises RecastError for suites that need the labels of the training.
    """
    trained = run.recipe.grouping
    if options.labels is None or (grouping := trained.with_labels(options.labels)) == trained:
        return run.data
    if others := [name for name in suites if not evaluator(name).takes_other_labels]:
        raise RecastError(
            f"{run.folder} was trained with other labels: {others[0]} cannot be measured with "
            f"labels={options.labels}; only knn and retrieval can"
        )
    return data_of_recipe(run.recipe, grouping)


def _provenance(folder: RunFolder) -> dict[str, Any]:
    """Return the content of evaluation.json, {"suites": {...}}."""
    path = folder.provenance
    content = read_json(path, "suites") if path.is_file() else {"suites": {}}
    require(f"suites of {path}", content["suites"])
    return content


def _write(
    run: OpenRun, results: Results, suites: Sequence[str], context: Context, command: str, seconds: float
) -> None:
    """Write results of suites into the run's files, where they replace all older ones of these suites.

    Results on some of the images (num_images) do not replace those on more images.
    """
    content, machine, options = _provenance(run.folder), surroundings(context.device), context.options.model_dump()
    older, written = run.folder.rows(), set()
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
        entry = evaluator(name)
        recorded = (*entry.uses, "num_images", "seed", *(["labels"] if entry.takes_other_labels else []))
        content["suites"][name] = {
            "command": command,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 1),
            "together_with": [other for other in suites if other != name],  # of the same pass, which share its seconds
            "dataset": rows[0].dataset if rows else run.data.name,
            "images": images,
            "options": {key: options[key] for key in options if key in recorded},
            "device": str(machine["device"]),
            "machine": f"{machine['platform']}, {machine['cpu_count']} CPUs",
            "versions": {package: str(machine[package]) for package in ("recast", "torch", "timm", "python")},
        }
    write_records(run.folder.rows_file, Row, [row for row in results.rows if row.suite in written])
    write_records(run.folder.differences_file, Difference, [d for d in results.differences if d.suite in written])
    write_images(run.folder.image_values, results.images, written)
    for name in results.tables.keys() & written:
        write_table(run.folder.analysis, results.tables[name])
    write_json(run.folder.provenance, content)
