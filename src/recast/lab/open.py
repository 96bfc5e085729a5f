"""Open a run, or a network by name or file, for evaluate, explain, report, fold and export."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import timm
from torch import nn

from recast.errors import RecastError, listed
from recast.io import load
from recast.lab.config import Recipe
from recast.lab.config.recipe import PaperConfig
from recast.lab.data import Data, load_data
from recast.lab.data.class_order import order_classes_
from recast.lab.data.fingerprint import fingerprint_of
from recast.lab.data.images import is_image_name
from recast.lab.folder.files import read_json
from recast.lab.folder.run import RunFolder
from recast.lab.task import task_of
from recast.models.build import build
from recast.models.config import ModelConfig
from recast.models.names import FORMS, unknown_subject
from recast.models.trust import check_trusted, is_function
from recast.models.weights import PICKLED, read_header

SAVED = ".safetensors"


@dataclass(frozen=True)
class OpenRun:
    """A run folder read back: `models` holds parent, finetuned (where that arm was trained) and recast.

    Of a run that recast nothing it holds the trained network alone, as finetuned.
    """

    folder: RunFolder
    recipe: Recipe
    data: Data
    models: dict[str, nn.Module]


def open_run(folder: str | Path, data_dir: str | None = None) -> OpenRun:
    """Rebuild the three arms of a run folder, on the CPU; `data_dir` is the folder of its images if they moved.

    Raises `RecastError` as `RunFolder.check_finished` does, and for data or weights that are missing or not the run's.
    """
    run = RunFolder(folder)
    run.check_finished()
    recipe = run.recipe_here(data_dir)
    check_trusted(recipe.model.name)
    data = data_of_recipe(recipe)
    classes, task = len(data.classes), task_of(recipe.task)
    check_classes(run, data)
    if recipe.is_plain:
        network = build(recipe.model.replace(checkpoint=None, pretrained=False), num_classes=classes)
        task.adapt_(network, recipe.task, classes)
        return OpenRun(run, recipe, data, {"finetuned": load(run.weights, parent=network)})
    parent = order_classes_(build(recipe.model, num_classes=classes), data).eval()
    models, trained = {"parent": parent}, task.adapt_(copy.deepcopy(parent), recipe.task, classes)
    if (control := RunFolder(run.control).weights).is_file():
        models["finetuned"] = load(control, parent=trained)
    models["recast"] = load(run.weights, parent=trained)
    return OpenRun(run, recipe, data, models)


def data_of_recipe(recipe: Recipe, grouping: PaperConfig | None = None) -> Data:
    """Read the data of a recipe; with `grouping`, other labels than those of the training."""
    data = load_data(recipe.data, recipe.augmentation, grouping or recipe.grouping, recipe.model.in_chans)
    return data if grouping is None else replace(data, is_relabelled=True)


def check_classes(run: RunFolder, data: Data) -> None:
    """Raise RecastError unless the classes are those of the run, in the same order."""
    names = run.classes()
    remedy = "give the folder of the run's images with --data-dir"
    missing, new = ([name for name in a if name not in b] for a, b in ((names, data.classes), (data.classes, names)))
    if missing or new:
        other = " and ".join(f"{word} {listed(part, 3)}" for word, part in (("lacks", missing), ("adds", new)) if part)
        raise RecastError(f"{run} was trained on {len(names)} classes, {data.name} {other}: {remedy}")
    for number, (before, now) in enumerate(zip(names, data.classes, strict=True)):
        if before != now:
            raise RecastError(f"class {number} was {before!r} when {run} was trained, now it is {now!r}: {remedy}")


def check_same(run: RunFolder, data: Data, *, goes_on: bool) -> bool:
    """Warn if the validation images changed since the run began, or any images if training `goes_on`; return if not.

    Raises RecastError if training would continue with other names, labels or numbers of images. Changed contents only
    warn: damaged images may have been replaced.
    """
    path = run.fingerprint
    if not path.is_file():
        return True
    parts = {"train": "training", "val": "validation"} if goes_on else {"val": "validation"}
    before, now = read_json(path, "train", "val"), fingerprint_of(data, *parts)
    changes, is_refused = [], False
    try:
        trained = {content for _, content in before["train"]["contents"]}
        num_trained = sum(content in trained for _, content in now["val"]["contents"])
        for part, title in parts.items():
            names = [name for name, value in now[part].items() if before[part][name] != value]
            old, new = (_labels_by_content(side[part]["contents"]) for side in (before, now))
            if any(old[content].isdisjoint(new[content]) for content in old.keys() & new.keys()):
                names = [*dict.fromkeys((*names, "labels"))]
            changes += [f"{name} of the {title} images" for name in names]
            is_refused |= not {"sizes", "contents"}.issuperset(names)
    except (KeyError, TypeError, ValueError):
        raise RecastError(f"{path} is damaged: delete it to continue without this check") from None
    text = ", ".join(changes)
    if goes_on and is_refused:
        raise RecastError(
            f"cannot resume {run}: its data changed since it began ({text}). Restore the images, or start a new run "
            "with --out"
        )
    if changes:
        if not goes_on and (num_trained or data.is_held_out):
            anew = ", a share of the folder that is held out anew," if data.is_held_out else ""
            count = f"at least {num_trained:,} are" if num_trained else "some may be"
            text += f". Of the {len(data.val):,} images{anew} {count} training images of the run"
        warnings.warn(f"the data of {run} changed since it began: {text}", stacklevel=2)
    return not changes


def _labels_by_content(rows: Iterable[tuple[str, str]]) -> Mapping[str, set[str]]:
    """Return the labels of each content: equal images may have several."""
    labels = defaultdict[str, set[str]](set)
    for label, content in rows:
        labels[content].add(label)
    return labels


def weights_of(config: ModelConfig) -> tuple[str, str, list[str]]:
    """Return the source of the weights that `open_model` loads, a suffix for titles, and notes on random weights."""
    name = config.name
    if config.checkpoint or name.endswith(SAVED):
        return config.checkpoint or name, "", []
    if config.pretrained:
        return "published", "", []
    if is_function(name):
        note = f"The weights are those that {name} returns. If they are random, predictions and maps mean nothing; "
        return f"as returned by {name}", " (weights as returned)", [f"{note}--checkpoint loads others."]
    note = "Random weights: predictions and maps mean nothing. --checkpoint or --pretrained loads trained weights."
    return "random", " (random weights)", [note]


def names_a_run(word: str) -> bool:
    """Return True if `word` means a run folder: a folder with a recipe, or one that is not also a timm model's name."""
    return Path(word).is_dir() and (RunFolder(word).is_run or not timm.is_model(word))


def open_model(config: ModelConfig) -> nn.Module:
    """Return the network in eval mode: from a file that `recast.save` wrote, or by name with or without weights.

    A checkpoint that `recast.save` wrote for a recast network is loaded into the recast network of that name.

    Raises:
        RecastError: the name is unknown, or an error of `build` or `load`.
    """
    name = config.name
    if name.endswith(SAVED):
        return _open_saved(config)
    if Path(name).is_file() and is_image_name(name):
        raise RecastError(f"{name} is an image; give the network first: recast explain RUN|MODEL {name}")
    if Path(name).is_file() and name.endswith(PICKLED):
        raise RecastError(f"{name} was not written by recast.save: {_advice(name)}")
    try:
        return build(config).eval()
    except RecastError as error:
        raise error if timm.is_model(name.partition(".")[0]) else unknown_subject(name, error) from None


def _advice(path: str) -> str:
    """Return what to do with a file that does not say how to build its network."""
    explain = f"recast explain MODEL IMAGE --checkpoint {path}"
    return f"save the network with recast.save and its constructor; for a state dict, {explain}"


def _open_saved(config: ModelConfig) -> nn.Module:
    path = config.name
    if config.checkpoint or config.pretrained or config.num_classes is not None:
        raise RecastError(
            f"{path} holds its own network and weights: drop --checkpoint, --pretrained and --num-classes"
        )
    if not Path(path).is_file():
        raise RecastError(f"no such file: {path}")
    try:
        constructor = read_header(path)["constructor"]
    except RecastError as error:
        raise RecastError(f"{error}; {_advice(path)}") from None
    if constructor is None:
        raise RecastError(f"{path} does not say how to build its network: {_advice(path)}. A model is named {FORMS}")
    return load(path)
