"""The start of a run: an empty folder, the complete recipe, the data and the parent."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recast.analysis.transformers import is_attention
from recast.errors import RecastError, first_line
from recast.lab.config import Recipe
from recast.lab.config.tasks import ModelTeacher
from recast.lab.config.text import changes, functions_of, may_change, override
from recast.lab.data import Data, Loader, load_data
from recast.lab.data.class_order import order_classes_
from recast.lab.data.seeding import mix_seed, seeded
from recast.lab.data.table import read_labels
from recast.lab.folder.names import PARENT_WEIGHTS, RECIPE
from recast.lab.folder.run import RunFolder, is_kept_parent
from recast.lab.task import task_of
from recast.lab.training.distributed import check_shares
from recast.lab.training.optim import check_trainable
from recast.layers.cmhsa import recast_layers
from recast.models.build import NEW_HEAD, build
from recast.models.config import ModelConfig
from recast.models.trust import follow_up
from recast.modes import in_eval
from recast.reading import decode, read_bytes
from recast.surgery.plan import Plan
from recast.surgery.planning import plan
from recast.surgery.scales import batch_norms


@dataclass(frozen=True)
class Prepared:
    """Data and parent of a run."""

    recipe: Recipe
    """Complete (classes, normalisation, files in the run folder): it replays the run."""
    data: Data
    parent: nn.Module
    plan: Plan | None
    """None if nothing is recast."""
    keeps_parent: bool
    """The run folder must hold the parent's weights: they are random, or the classifier is new."""
    pixels: str
    """Line with size and normalisation of the images."""
    files: Mapping[str, str]
    """Texts for the run folder by the names of their files (`PaperConfig.files`)."""


def with_task(recipe: Recipe) -> Recipe:
    """Return the recipe with the task of its table: multi-label if requested or if an image has several labels."""
    if recipe.data.name != "csv" or recipe.task.kind not in ("classify", "multilabel"):
        return recipe
    if recipe.task.kind == "classify":
        if not (count := (table := read_labels(recipe.data)).several):
            return recipe
        warnings.warn(
            f"{table.file}: {count} of {len(table.images)} images have several labels or none: task.kind is "
            "multilabel, without the recipe's Mixup, CutMix and label smoothing",
            stacklevel=2,
        )
    return override(recipe, {"data": {"name": "csv_multilabel"}, "task": {"kind": "multilabel"}})


def recipe_of_run(recipe: Recipe, out: Path) -> Recipe:
    """Return the recipe in the run folder with the fields that `may_change` from `recipe`; others must agree."""
    stored = RunFolder(out).recipe()
    completed = ("model.num_classes", "model.pretrained", "model.new_head", "data.mean", "data.std")
    if recipe.data.img_size is None:
        recipe = recipe.replace(data=recipe.data.replace(img_size=stored.data.img_size))
    if changed := changes(stored, with_size(recipe), ignore=(*may_change(), *completed)):
        raise RecastError(
            f"{out} was started with other settings ({', '.join(changed)}): continue it with "
            f"{follow_up('train', '--resume', str(out), functions=functions_of(recipe))}, or start a new run from "
            f"{out / RECIPE}"
        )
    # paths that `recipe` leaves open stay as they were, and so do weights of the parent in the run folder
    checkpoint = stored.model.checkpoint
    if checkpoint is None or Path(checkpoint).parent != out.resolve():
        checkpoint = recipe.model.checkpoint or checkpoint
    data = {"workers": recipe.data.workers, "data_dir": recipe.data.data_dir or stored.data.data_dir,
            "labels_file": recipe.data.labels_file or stored.data.labels_file}  # fmt: skip
    task = recipe.task
    if isinstance(recipe.teacher, ModelTeacher) and recipe.teacher.teacher_checkpoint is None:
        task = stored.task
    return recipe.replace(
        data=stored.data.replace(**data), model=stored.model.replace(checkpoint=checkpoint), task=task,
        papers=stored.papers,
    )  # fmt: skip


def with_size(recipe: Recipe) -> Recipe:
    """Return the recipe with the image size that the network is built for, unless the recipe has a size."""
    if recipe.data.img_size is not None or recipe.model.input_size is None:
        return recipe
    return recipe.replace(data=recipe.data.replace(img_size=recipe.model.input_size))


def prepare(recipe: Recipe, out: Path, resume: bool) -> Prepared:
    """Load data and parent, and plan. Raises RecastError for every mistake, before anything is written."""
    check_trainable(recipe)
    check_shares(recipe)
    if not resume and (recipe.model.checkpoint or recipe.model.pretrained):
        for paper in recipe.papers.values():
            paper.check_trained()
    recipe, task = with_size(recipe), task_of(recipe)
    data = load_data(recipe.data, recipe.augmentation, recipe.grouping, recipe.model.in_chans)
    _check_images(recipe, data)
    config = task.network(recipe.model, data)
    remedy = "continue with the data it was started with" if resume else NEW_HEAD
    parent = _build_parent(recipe, config, data, remedy)
    size = data.img_size
    data, pixels = data.fitted_to(parent)
    if data.img_size != size:
        recipe = recipe.replace(data=recipe.data.replace(img_size=data.img_size))
    is_new = _has_new_classifier(config, parent, data) or is_kept_parent(config.checkpoint)
    if is_new and recipe.teacher.kind == "parent":
        raise RecastError(
            "task.teacher.kind=parent: the parent has a new, untrained classifier. Train it on these classes first "
            "(--where none), then give its weights as --checkpoint"
        )
    task.check_outputs(_outputs(parent, data, config.name), data, config.name)
    _check_frozen(recipe, parent)
    planned = None
    if not recipe.is_plain:
        if recipe.has_layers and (layers := recast_layers(parent)):
            raise RecastError(
                f"{config.checkpoint or config.name} is already recast ({next(iter(layers))}): start from its parent, "
                "or fine-tune it with --where none"
            )
        selected = recipe.selection
        where = selected[0] if len(selected) == 1 else selected
        planned = plan(parent, data.example, recipe.recast, where=where, max_tokens=recipe.max_tokens, pool=recipe.pool)
    keeps_parent = is_new and planned is not None and not resume
    recipe, files = _completed(recipe, config, data, out, keeps_parent)
    return Prepared(recipe, data, parent, planned, keeps_parent, pixels, files)


def _check_images(recipe: Recipe, data: Data) -> None:
    """Raise RecastError for images that this recipe cannot train on."""
    if missing := [name for name, part in (("training", data.train), ("validation", data.val)) if len(part) == 0]:
        raise RecastError(f"{data.name} has no {missing[0]} images: training requires both parts")
    Loader(  # raises for a batch larger than the training set
        data.train, recipe.data.batch_size, shuffle_seed=recipe.seed, repeats=recipe.augment.repeats, drop_last=True
    )
    task_of(recipe).check_data(recipe, data)


def _build_parent(recipe: Recipe, config: ModelConfig, data: Data, remedy: str) -> nn.Module:
    """Return the network that the run starts from, as its task trains it; `remedy` is for data of other classes."""
    with seeded(mix_seed("parent", recipe.seed)):
        parent = build(config, num_classes=len(data.classes), advice=remedy)
        if not (config.checkpoint or config.pretrained):
            for paper in recipe.papers.values():
                paper.draw_(parent)
    if not _has_new_classifier(config, parent, data):
        order_classes_(parent, data, str(config.checkpoint or config.name), remedy)
    with seeded(mix_seed("embedding", recipe.seed)):
        return task_of(recipe).adapt_(parent, recipe, len(data.classes))


def _has_new_classifier(config: ModelConfig, parent: nn.Module, data: Data) -> bool:
    """Return True if the parent's classifier is untrained."""
    if config.new_head or config.checkpoint is not None:
        return config.new_head
    cfg = getattr(parent, "pretrained_cfg", None)
    classes = cfg.get("num_classes") if isinstance(cfg, Mapping) else None
    keeps_head = config.name.startswith("torchvision:") or classes == len(data.classes)
    return not (config.pretrained and keeps_head)


def _outputs(parent: nn.Module, data: Data, name: str) -> Any:
    """Return the parent's outputs for an image. Raises RecastError if it cannot take one of these channels and size."""
    try:
        with torch.no_grad(), in_eval(parent):
            return parent(data.example)
    except (AssertionError, RuntimeError, ValueError) as error:
        size = data.img_size
        if channels := re.search(r"to have (\d+) channels, but got (\d+) channels", str(error)):
            raise RecastError(
                f"{name} takes images of {channels[1]} channel{'s' * (channels[1] != '1')}, but "
                f"{data.train.image_name(0)} is read with {channels[2]}: set model.in_chans={channels[1]}"
            ) from None
        raise RecastError(
            f"{name} cannot take images of {size}x{size} ({first_line(error)}): set data.img_size, or "
            f"model.input_size={size} for a network with a fixed size"
        ) from None


def _check_frozen(recipe: Recipe, parent: nn.Module) -> None:
    """Raise RecastError if the network has no layer of the kind that the recipe would train."""
    freeze = recipe.regularization.freeze
    trains = {
        "all_but_attention": recipe.has_layers or any(map(is_attention, parent.modules())),
        "all_but_batch_norm": batch_norms(parent),
    }
    if not trains.get(freeze, True):
        layers = freeze.removeprefix("all_but_").replace("_", " ")
        raise RecastError(f"regularization.freeze={freeze}: {recipe.model.name} has no {layers}; take freeze=trunk")


def _completed(
    recipe: Recipe, config: ModelConfig, data: Data, out: Path, keeps_parent: bool
) -> tuple[Recipe, dict[str, str]]:
    """Return the recipe that replays the run, and `Prepared.files`."""
    config = config.replace(num_classes=config.num_classes or len(data.classes))
    if keeps_parent:
        path = f"{(out / PARENT_WEIGHTS).resolve()}"
        config = config.replace(checkpoint=path, checkpoint_key=None, pretrained=False, new_head=False)
    papers, files = dict(recipe.papers), dict[str, str]()
    for name, paper in recipe.papers.items():
        for field, file in paper.files.items():
            if (path := getattr(paper, field)) is not None:
                files[file] = decode(read_bytes(path), path)
                papers[name] = papers[name].replace(**{field: f"{(out / file).resolve()}"})
    data_config = recipe.data.replace(mean=data.mean, std=data.std)
    return recipe.replace(model=config, data=data_config, papers=papers), files
