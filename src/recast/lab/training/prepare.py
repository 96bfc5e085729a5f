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
from recast.lab.config import Freeze, Recipe
from recast.lab.config.recipe import PaperConfig
from recast.lab.config.tasks import ModelTeacher, TeacherConfig
from recast.lab.config.text import changes, may_change, override
from recast.lab.data import Data, Loader, load_data
from recast.lab.data.class_order import order_classes_
from recast.lab.data.seeding import mix_seed, seeded
from recast.lab.data.table import read_labels
from recast.lab.folder.run import RunFolder, follow_up, is_kept_parent
from recast.lab.task import task_of
from recast.lab.training.distributed import check_shares
from recast.lab.training.optim import check_trainable
from recast.layers.cmhsa import recast_layers
from recast.models.build import NEW_HEAD, build
from recast.models.config import ModelConfig
from recast.models.trust import is_function
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
    """The run folder must hold the parent's weights: they are random or a function's, or the classifier is new."""
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


def recipe_of_run(recipe: Recipe, out: RunFolder) -> Recipe:
    """Return the recipe in the run folder with the fields that `may_change` from `recipe`; others must agree."""
    stored = out.recipe()
    # paths that `recipe` leaves open stay as they were, and so do weights of the parent in the run folder
    checkpoint = stored.model.checkpoint
    if checkpoint is None or Path(checkpoint).parent != out.path.resolve():
        checkpoint = recipe.model.checkpoint or checkpoint
    data = stored.data.replace(
        workers=recipe.data.workers, labels_file=recipe.data.labels_file or stored.data.labels_file
    )
    moved = recipe.data.data_dir if recipe.data.data_dir != stored.data.data_dir else None
    here = out.with_files_here(stored.replace(data=data, model=stored.model.replace(checkpoint=checkpoint)), moved)
    if recipe.data.name == "csv":
        places = {name: getattr(here.data, name) for name in ("data_dir", "labels_file")}
        recipe = with_task(recipe.replace(data=recipe.data.replace(**places)))
    completed = ("model.num_classes", "model.pretrained", "model.new_head", "data.mean", "data.std")
    if recipe.data.img_size is None:
        recipe = recipe.replace(data=recipe.data.replace(img_size=stored.data.img_size))
    if changed := changes(stored, recipe.sized(), ignore=(*may_change(), *completed)):
        raise RecastError(
            f"{out} was started with other settings ({', '.join(changed)}): continue it with "
            f"{follow_up('train', '--resume', str(out), functions=recipe.functions)}, or start a new run from "
            f"{out.recipe_file}"
        )
    task = recipe.task
    if isinstance(recipe.teacher, ModelTeacher) and recipe.teacher.teacher_checkpoint is None:
        task = stored.task
    return recipe.replace(data=here.data, model=here.model, task=task, papers=stored.papers)


def prepare(recipe: Recipe, out: RunFolder, resume: bool) -> Prepared:
    """Load data and parent, and plan. Raises RecastError for every mistake, before anything is written."""
    check_trainable(recipe.optim, recipe.amp, recipe.device)
    check_shares(recipe.data.batch_size, recipe.accumulate, recipe.task)
    check_trained_weights(recipe.model, recipe.papers, resume)
    recipe, task = recipe.sized(), task_of(recipe.task)
    data = load_data(recipe.data, recipe.augmentation, recipe.grouping, recipe.model.in_chans)
    check_images(data, recipe.data.batch_size, recipe.augment.repeats)
    config = task.network(recipe.model, data)
    remedy = "continue with the data it was started with" if resume else NEW_HEAD
    parent = _built(config, data, remedy, recipe.papers, recipe.seed)
    with seeded(mix_seed("embedding", recipe.seed)):
        parent = task.adapt_(parent, recipe.task, len(data.classes))
    size = data.img_size
    data, pixels = data.fitted_to(parent)
    if data.img_size != size:
        recipe = recipe.replace(data=recipe.data.replace(img_size=data.img_size))
    is_new, is_kept = _has_new_classifier(config, parent, data), is_kept_parent(config.checkpoint)
    was_new = is_kept and RunFolder(Path(config.checkpoint or "").parent).has_new_parent(config)
    check_teacher(recipe.teacher, is_new or was_new)
    task.check_outputs(_outputs(parent, data, config.name), data, config.name)
    check_frozen(recipe.regularization.freeze, parent, config.name, recipe.has_layers)
    planned = None
    if not recipe.is_plain:
        check_not_recast(parent, config, recipe.has_layers)
        selected = recipe.selection
        where = selected[0] if len(selected) == 1 else selected
        planned = plan(parent, data.example, recipe.recast, where=where, max_tokens=recipe.max_tokens, pool=recipe.pool)
    keeps_parent = (is_new or is_kept or config.has_returned_weights) and planned is not None and not resume
    papers, files = _with_copies(recipe.papers, out)
    recipe = recipe.replace(
        model=_completed(config, len(data.classes), out, keeps_parent),
        data=recipe.data.replace(mean=data.mean, std=data.std),
        papers=papers,
    )
    return Prepared(recipe, data, parent, planned, keeps_parent, pixels, files)


def check_trained_weights(config: ModelConfig, papers: Mapping[str, PaperConfig], resume: bool) -> None:
    """Raise RecastError for settings of papers that would overwrite trained weights."""
    if not resume and (config.checkpoint or config.pretrained):
        for paper in papers.values():
            paper.check_trained()


def check_images(data: Data, batch_size: int, repeats: int) -> None:
    """Raise RecastError for data without one of its parts, and for a batch larger than the training set."""
    if missing := [name for name, part in (("training", data.train), ("validation", data.val)) if len(part) == 0]:
        raise RecastError(f"{data.name} has no {missing[0]} images: training requires both parts")
    Loader(data.train, batch_size, shuffle_seed=0, repeats=repeats, drop_last=True)


def check_teacher(config: TeacherConfig, is_new: bool) -> None:
    """Raise RecastError for a parent that teaches although its classifier `is_new`."""
    if is_new and config.kind == "parent":
        raise RecastError(
            "task.teacher.kind=parent: the parent has a new, untrained classifier. Train it on these classes first "
            "(--where none), then give its weights as --checkpoint"
        )


def check_frozen(freeze: Freeze, parent: nn.Module, name: str, has_layers: bool) -> None:
    """Raise RecastError if the network `name` has no layer of the kind that `freeze` would train."""
    trains = {
        "all_but_attention": has_layers or any(map(is_attention, parent.modules())),
        "all_but_batch_norm": batch_norms(parent),
    }
    if not trains.get(freeze, True):
        layers = freeze.removeprefix("all_but_").replace("_", " ")
        raise RecastError(f"regularization.freeze={freeze}: {name} has no {layers}; take freeze=trunk")


def check_not_recast(parent: nn.Module, config: ModelConfig, has_layers: bool) -> None:
    """Raise RecastError for a parent that is recast already."""
    if has_layers and (layers := recast_layers(parent)):
        raise RecastError(
            f"{config.checkpoint or config.name} is already recast ({next(iter(layers))}): start from its parent, "
            "or fine-tune it with --where none"
        )


def _built(config: ModelConfig, data: Data, remedy: str, papers: Mapping[str, PaperConfig], seed: int) -> nn.Module:
    """Return the network that the run starts from; `remedy` is for data of other classes."""
    with seeded(mix_seed("parent", seed)):
        parent = build(config, num_classes=len(data.classes), advice=remedy)
        if not (config.checkpoint or config.pretrained):
            for paper in papers.values():
                paper.draw_(parent)
    if not _has_new_classifier(config, parent, data):
        # a function may state the classes of the weights that it started from
        remedy = "" if config.has_returned_weights else remedy
        order_classes_(parent, data, str(config.checkpoint or config.name), remedy)
    return parent


def _has_new_classifier(config: ModelConfig, parent: nn.Module, data: Data) -> bool:
    """Return True if the parent's classifier is untrained. What a function returns counts as trained."""
    if config.new_head or config.checkpoint is not None or config.has_returned_weights:
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


def _completed(config: ModelConfig, classes: int, out: RunFolder, keeps_parent: bool) -> ModelConfig:
    """Return the config of the parent that replays the run."""
    config = config.replace(num_classes=config.num_classes or classes)
    if not keeps_parent:
        return config
    path = out.parent_weights
    if is_function(config.name) and not (config.new_head and (config.checkpoint or config.pretrained)):
        # a checkpoint is the copy in another run
        path = out.path / Path(config.checkpoint or out.returned_weights).name
    return config.replace(checkpoint=str(path.resolve()), checkpoint_key=None, pretrained=False, new_head=False)


def _with_copies(papers: Mapping[str, PaperConfig], out: RunFolder) -> tuple[dict[str, PaperConfig], dict[str, str]]:
    """Return settings of papers that name the copies of their files, and `Prepared.files`."""
    changed, files = dict(papers), dict[str, str]()
    for name, paper in papers.items():
        for field, file in paper.files.items():
            if (path := getattr(paper, field)) is not None:
                files[file] = decode(read_bytes(path), path)
                changed[name] = changed[name].replace(**{field: f"{(out.path / file).resolve()}"})
    return changed, files
