"""The three arms of a run folder, rebuilt from its files, and their evaluation."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.transforms.v2.functional import normalize

from recast.analysis.queries import write_attention
from recast.data import Data, Loader, load_data
from recast.device import surroundings
from recast.errors import RecastError
from recast.evaluation.context import Context, PixelModel
from recast.evaluation.suites import EVALUATORS, Results, check_suites, groups, measure, open_context
from recast.io import load
from recast.layers.gpsa import gpsa_layers
from recast.models.build import build
from recast.run.config import Recipe
from recast.run.config.evaluation import Options
from recast.run.files import read_json, read_names, require, write_json
from recast.run.recipe import load_recipe
from recast.run.records import Difference, Provenance, Row
from recast.run.tables import read_records, write_records, write_table

NUM_PICTURES = 4


@dataclass(frozen=True)
class Run:
    """A run folder read back: `models` holds parent, finetuned (where that arm was trained) and recast.

    Of a run that recast nothing it holds the trained network alone, as finetuned.
    """

    folder: Path
    recipe: Recipe
    data: Data
    models: dict[str, nn.Module]

    @property
    def kept(self) -> dict[int, Path]:
        """Epoch → the weights of that epoch, ascending, where the recipe kept some (`keep_every`)."""
        paths = (self.folder / "checkpoints").glob("epoch-*.safetensors")
        numbered = ((path.stem.removeprefix("epoch-"), path) for path in paths)
        return dict(sorted((int(number), path) for number, path in numbered if number.isdecimal()))


def check_run(folder: str | Path) -> None:
    """Raise `RecastError` for a folder without a finished recast arm, before anything of it is loaded."""
    folder = Path(folder)
    if not (folder / "recipe.yaml").is_file():
        raise RecastError(f"{folder} is no run folder: it has no recipe.yaml (recast train writes one)")
    if not (folder / "weights.safetensors").is_file():
        raise RecastError(f"{folder} is not trained to its end: finish it with recast train --resume {folder}")


def open_run(folder: str | Path) -> Run:
    """Rebuild the three arms of a run folder, on the CPU.

    Raises `RecastError` as `check_run` does, and for data or weights that are not there or not the run's.
    """
    check_run(folder)
    folder = Path(folder)
    recipe = load_recipe(folder / "recipe.yaml")
    data = load_data(recipe.data, recipe.augment)
    classes = len(data.classes)
    remedy = f"set data.data_dir in {folder / 'recipe.yaml'} to the run's own data"
    if recipe.model.num_classes not in (None, classes):
        raise RecastError(
            f"{folder} was trained on {recipe.model.num_classes} classes, {data.name} has {classes}: {remedy}"
        )
    known = read_names(folder / "classes.json") if (folder / "classes.json").is_file() else data.classes
    for number, (then, now) in enumerate(zip(known, data.classes, strict=False)):
        if then != now:  # the logits are in the order of the run
            raise RecastError(
                f"class {number} was {then!r} when {folder} was trained, now it is {now!r}: other classes, or in "
                f"another order; {remedy}"
            )
    if recipe.is_plain:
        network = build(replace(recipe.model, checkpoint=None, pretrained=False), num_classes=classes)
        return Run(folder, recipe, data, {"finetuned": load(folder / "weights.safetensors", parent=network)})
    parent = build(recipe.model, num_classes=classes).eval()
    models = {"parent": parent}
    if (control := folder / "finetuned" / "weights.safetensors").is_file():
        models["finetuned"] = load(control, parent=parent)
    models["recast"] = load(folder / "weights.safetensors", parent=parent)
    return Run(folder, recipe, data, models)


def evaluate_run(
    folder: str | Path,
    suites: Sequence[str],
    *,
    batch_size: int = 256,
    device: str = "auto",
    options: Options = Options(),
    workers: int = 0,
    again: bool = False,
    command: str = "",
    progress: bool = True,
) -> Results:
    """Measure the arms of a run side by side and keep everything in its folder.

    RUN/rows.csv, differences.csv     what was measured; a suite's older lines are replaced
    RUN/analysis/SUITE.csv            the tables of the suites that fill one
    RUN/evaluation.json               by suite: command, versions, machine, data, options, date
    RUN/scores/                       per-image scores: measured again only for other weights, images or options
    RUN/attention.npz                 maps of a few images, for the report

    again: measure anew what is in RUN/scores. Raises `RecastError` as `open_run` and `measure` do; what was finished
    by then is kept.
    """
    check_suites(suites)
    _provenance(Path(folder))  # what cannot be added to is found before anything is measured
    run = open_run(folder)
    context = open_context(run.models, run.data, batch_size, device, options, workers)
    if again:
        for name in suites:
            shutil.rmtree(run.folder / "scores" / name, ignore_errors=True)
    results = Results()
    # What shares a pass is measured together, and each group is written as soon as it is there.
    for together in groups(suites):
        begin = time.time()
        name, cache = run.folder.resolve().name, run.folder / "scores"
        fresh = replace(context, epochs=kept_models(run), store={})  # what one group keeps may fill the memory
        found = measure(fresh, together, run=name, cache=cache, progress=progress)
        write_results(run, found, together, context, command, time.time() - begin)
        results.extend(found)
    if "recast" in run.models and gpsa_layers(run.models["recast"]):
        write_pictures(run)
    return results


def _provenance(folder: Path) -> dict[str, Any]:
    """evaluation.json as it stands, {"suites": {...}}."""
    path = folder / "evaluation.json"
    known = read_json(path, "suites") if path.is_file() else {"suites": {}}
    require(f"suites of {path}", known["suites"], ())
    return known


def kept_models(run: Run) -> list[tuple[str, int, Callable[[], nn.Module]]]:
    """The recast model at the epochs whose weights were kept (`keep_every`): (arm, epoch, function that loads it)."""

    def load_kept(path: Path) -> nn.Module:
        return PixelModel(load(path, parent=run.models["parent"]), run.data.mean, run.data.std).eval()

    kept = run.kept if "recast" in run.models else {}
    return [("recast", epoch, partial(load_kept, path)) for epoch, path in kept.items()]


def write_results(
    run: Run, found: Results, suites: Sequence[str], context: Context, command: str, seconds: float
) -> None:
    """Put results into the run's files; a suite's new ones replace all its older ones.

    A look at some images (num_samples) does not replace what was measured on more of them.
    """
    known, machine = _provenance(run.folder), surroundings(context.device)
    options = asdict(context.options)
    path = run.folder / "rows.csv"
    older = read_records(path, Row) if path.is_file() else []
    written = []
    for name in suites:
        rows = [row for row in found.rows if row.suite == name]
        if not rows and name not in found.tables:
            continue
        images = max(row.n for row in rows) if rows else found.tables[name].images
        before = known["suites"].get(name, {}).get("images", 0)
        if options["num_samples"] is not None and before > images:
            warnings.warn(
                f"{run.folder} keeps {name} of {before:,} images: this look at {images:,} is not written", stacklevel=2
            )
            continue
        written.append(name)
        if rows and name in known["suites"] and rows == [row for row in older if row.suite == name]:
            continue  # read from RUN/scores: they were made as it says
        provenance = Provenance(
            command=command,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=round(seconds, 1),
            together_with=[other for other in suites if other != name],
            dataset=rows[0].dataset if rows else run.data.name,
            images=images,
            options={key: options[key] for key in options if key in (*EVALUATORS[name].uses, "num_samples", "seed")},
            device=str(machine["device"]),
            machine=f"{machine['platform']}, {machine['cpu_count']} CPUs",
            versions={what: str(machine[what]) for what in ("recast", "torch", "timm", "python")},
        )
        known["suites"][name] = asdict(provenance)
    write_records(path, Row, [row for row in found.rows if row.suite in written])
    differences = [line for line in found.differences if line.suite in written]
    write_records(run.folder / "differences.csv", Difference, differences)
    for name in found.tables.keys() & set(written):
        write_table(run.folder / "analysis", found.tables[name])
    write_json(run.folder / "evaluation.json", known)


def write_pictures(run: Run) -> Path:
    """Maps of the first validation images of a few different classes, for the report."""
    first: dict[int, Tensor] = {}
    for images, labels in Loader(run.data.val, 1, bad_image="skip"):
        first.setdefault(int(labels), images)
        if len(first) == NUM_PICTURES:
            break
    return write_attention(
        run.folder / "attention.npz",
        run.models["recast"],
        torch.cat(list(first.values())),
        list(first),
        run.data.classes,
        lambda images: normalize(images, run.data.mean, run.data.std),
    )
