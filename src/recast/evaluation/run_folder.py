"""The three arms of a run folder, rebuilt from its files, and their evaluation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from recast.config import Recipe
from recast.data import Data, load_data, loader
from recast.errors import RecastError
from recast.evaluation.bench import PixelModel
from recast.evaluation.suites import evaluate
from recast.explain.attention import write_attention
from recast.io import load
from recast.models.build import build
from recast.recipe import load_recipe
from recast.rows import Row, write_rows
from recast.surgery import gpsa_layers

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


def check_run(folder: str | Path) -> None:
    """Raise `RecastError` for a folder without a finished recast arm, before anything of it is loaded."""
    folder = Path(folder)
    if not (folder / "recipe.yaml").is_file():
        raise RecastError(f"{folder} is no run folder: it has no recipe.yaml (recast train writes one)")
    if not (folder / "weights.safetensors").is_file():
        raise RecastError(f"{folder} is not trained to its end: finish it with recast train --resume {folder}")


def open_run(folder: str | Path, *, num_val: int | None = None) -> Run:
    """Rebuild the three arms of a run folder, on the CPU. `num_val` takes that many validation images, class-balanced.

    Raises `RecastError` as `check_run` does, and for data or weights that are not there or not the run's.
    """
    check_run(folder)
    folder = Path(folder)
    recipe = load_recipe(folder / "recipe.yaml")
    data = load_data(recipe.data if num_val is None else replace(recipe.data, num_val=num_val), recipe.augment)
    if recipe.model.num_classes not in (None, len(data.classes)):
        raise RecastError(
            f"{folder} was trained on {recipe.model.num_classes} classes, {data.name} has {len(data.classes)}: "
            f"set data.data_dir in {folder / 'recipe.yaml'} to the run's own data"
        )
    _check_order(folder, data)
    if recipe.is_plain:
        network = build(replace(recipe.model, checkpoint=None, pretrained=False), num_classes=len(data.classes))
        return Run(folder, recipe, data, {"finetuned": load(folder / "weights.safetensors", parent=network)})
    parent = build(recipe.model, num_classes=len(data.classes)).eval()
    models = {"parent": parent}
    control = folder / "finetuned" / "weights.safetensors"
    if control.is_file():
        models["finetuned"] = load(control, parent=parent)
    models["recast"] = load(folder / "weights.safetensors", parent=parent)
    return Run(folder, recipe, data, models)


def _check_order(folder: Path, data: Data) -> None:
    """The classes are those of the run, in its order: the logits are."""
    path = folder / "classes.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else data.classes
    for number, (then, now) in enumerate(zip(known, data.classes, strict=False)):
        if then != now:
            raise RecastError(
                f"class {number} was {then!r} when {folder} was trained, now it is {now!r}: other classes, or in "
                f"another order; set data.data_dir in {folder / 'recipe.yaml'} to the run's own data"
            )


def evaluate_run(
    folder: str | Path,
    suites: Sequence[str],
    *,
    num_val: int | None = None,
    batch_size: int = 256,
    device: str = "auto",
    eps: Sequence[float] = (1.0, 4.0),
    progress: bool = True,
) -> list[Row]:
    """Measure the arms of a run side by side; writes `rows.csv` and `attention.npz` into the folder, returns the rows.

    Raises `RecastError` as `open_run` and `evaluate` do; nothing is written then.
    """
    run = open_run(folder, num_val=num_val)
    rows = evaluate(
        run.models,
        suites,
        run.data,
        run=run.folder.resolve().name,
        batch_size=batch_size,
        device=device,
        eps=eps,
        progress=progress,
    )
    write_rows(run.folder / "rows.csv", rows)
    if "recast" in run.models and gpsa_layers(run.models["recast"]):
        write_pictures(run)
    return rows


def write_pictures(run: Run, count: int = NUM_PICTURES) -> Path:
    """Maps of the first validation images of `count` different classes, for the report."""
    first: dict[int, Tensor] = {}
    for images, labels in loader(run.data.val, 1, bad_image="skip"):
        first.setdefault(int(labels), images)
        if len(first) == count:
            break
    pixels = torch.cat(list(first.values()))
    normalise = PixelModel(nn.Identity(), run.data.mean, run.data.std)
    return write_attention(
        run.folder / "attention.npz",
        run.models["recast"],
        pixels,
        list(first),
        run.data.classes,
        normalise,
    )
