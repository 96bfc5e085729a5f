"""What a run starts from: the folder, the recipe with nothing left open, the data and the parent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recast.analysis.transformers import is_attention
from recast.errors import RecastError, first_line
from recast.files import LOCK, as_json, is_ours, read_lines, read_names, read_text
from recast.lab.config import LabelsConfig, Recipe
from recast.lab.config.tasks import ModelTeacher
from recast.lab.data import Data, Loader, load_data
from recast.lab.data.datasets import IMAGENET, ImageFiles, LabelledImages
from recast.lab.data.fingerprint import FINGERPRINT
from recast.lab.data.seeding import mix_seed, seeded
from recast.lab.data.sources import class_images
from recast.lab.device import check_memory, choose_device
from recast.lab.experimental.ranking import plan_best
from recast.lab.recipe import COARSE_FILE, PARENT_WEIGHTS, SEAL, changes, functions_of, load_recipe, may_change
from recast.lab.tasks import task_of
from recast.lab.training.distributed import process_count
from recast.lab.training.optim import check_trainable
from recast.layers.attention_pool import attention_pools
from recast.models.build import build, input_defaults
from recast.models.config import ModelConfig
from recast.models.names import split_name
from recast.models.trust import follow_up
from recast.reading import decode, read_bytes
from recast.surgery.limits import Budget
from recast.surgery.plan import Plan
from recast.surgery.planning import plan
from recast.surgery.scales import batch_norms
from recast.tracing.hooks import in_eval
from recast.tracing.observe import observe

PARENT = "parent"
"""The one thing that may be in a run folder before the run: a folder with the training of its parent."""

WRITTEN = ("classes.json", FINGERPRINT, COARSE_FILE, PARENT_WEIGHTS, "recipe.yaml", "environment.json", "plan.json",
           "verify.json", "schedule.json", "metrics.jsonl")  # fmt: skip
"""The files that a run folder holds before its first state, in the order in which they are written."""
MARKS = {"recipe.yaml": SEAL.encode(), "environment.json": b'"recast": "', PARENT_WEIGHTS: b'"recast":"'}
"""What those of them say that a run wrote."""
BEFORE_STATES = {"checkpoints": "epoch-0000.safetensors", "tensorboard": "events.out.tfevents.*"}
"""Folders of a run before its first state, and what they hold."""

WAKING_IMAGES = 512
"""Training images that queries and keys are taken from with query_key=images."""


RANKED_IMAGES = 512
"""Training images that layers are ranked on with where=auto."""

NEW_HEAD = {
    "parent": "task.teacher.kind=parent: the parent's classifier is a new one, which knows nothing of these "
    "classes. Train it on them first (--where none), then give its weights as --checkpoint",
    "where=auto": "layers are ranked by what a trained network's gates promise, and this classifier is new: train it "
    "on these images first (--where none), then give its weights as --checkpoint",
}

SMALL = 2**25
"""Bytes of a batch of images below which memory is not looked at."""


@dataclass(frozen=True)
class Prepared:
    """Data and parent of a run."""

    recipe: Recipe
    """With what was left open filled in (classes, normalisation, the files that the run keeps): it replays the run."""
    data: Data
    parent: nn.Module
    plan: Plan | None
    """None where nothing is recast."""
    keeps_parent: bool
    """The parent's weights are found nowhere else (random ones, or a new head): the run folder is to keep them."""
    pixels: str
    """A line on the size and normalisation of the images, and where they are from."""
    coarse: str | None
    """The text of the file of coarse classes, which the run folder is to keep."""


def never_began(out: Path) -> bool:
    """Whether `out` is free, or holds what a run writes before its first state and nothing else: the run that left it
    was killed, or its disk was full, and the same command may start again."""
    there = {path.name for path in out.iterdir()} - {PARENT, LOCK} if out.is_dir() else set()
    if not there:
        return True
    first = WRITTEN[: WRITTEN.index("recipe.yaml")]
    return (
        _is_ours(out / "classes.json")
        and all(is_ours(out / name, mark) for name, mark in MARKS.items() if name in there)
        and (there <= {*first} or "recipe.yaml" in there)
        and there <= {*WRITTEN, *BEFORE_STATES, "resume", "wandb.id", "wandb"}
        and not any((out / "resume").glob("*"))
        and all(path.match(name) for folder, name in BEFORE_STATES.items() for path in (out / folder).glob("*"))
        and (len(read_lines(out / "metrics.jsonl")[0]) < 2 if "metrics.jsonl" in there else True)
    )


def _is_ours(classes: Path) -> bool:
    """Whether the names of classes are written as a run writes them."""
    try:
        return read_text(classes) == as_json(read_names(classes))
    except RecastError:
        return False


def withdraw(out: Path, parent: str | None) -> None:
    """Remove what a run wrote into `out` that never came to its first state, but the weights that it started from."""
    for path in (out / name for name in WRITTEN):
        if parent is None or path.resolve() != Path(parent).resolve():
            path.unlink(missing_ok=True)
    for folder, name in BEFORE_STATES.items():
        for path in (out / folder).glob(name):
            path.unlink()
    for folder in (*BEFORE_STATES, "resume"):
        with suppress(OSError):  # there is none
            (out / folder).rmdir()


def refuse_used(out: Path) -> None:
    """Raise RecastError unless a new run may start in `out`."""
    if never_began(out):
        return
    used = sorted(path.name for path in out.iterdir() if path.name not in (PARENT, LOCK))
    if "recipe.yaml" in used:
        raise RecastError(f"run folder {out} exists: choose another one with --out, or continue it with --resume {out}")
    raise RecastError(f"{out} is not empty ({used[0]}): choose another folder with --out")


def recipe_of_run(recipe: Recipe, out: Path) -> Recipe:
    """The recipe in the run folder with what `may_change` of `recipe`, which must agree with it otherwise."""
    if not (out / "recipe.yaml").is_file():
        raise RecastError(f"{out} holds no run to resume: it has no recipe.yaml")
    stored = load_recipe(out / "recipe.yaml", complete=True)
    filled = ("model.num_classes", "model.pretrained", "model.new_head", "data.mean", "data.std")
    if _is_chosen_here(recipe):
        recipe = recipe.replace(where=stored.where, budget=stored.budget)
    if recipe.data.img_size is None:
        recipe = recipe.replace(data=recipe.data.replace(img_size=stored.data.img_size))
    if changed := changes(stored, with_size(recipe), ignore=(*may_change(), *filled)):
        raise RecastError(
            f"{out} was started with another {', '.join(changed)}: go on with "
            f"{follow_up('train', '--resume', str(out), functions=functions_of(recipe))}, or start a new run from "
            f"{out}/recipe.yaml"
        )
    # what `recipe` leaves open is where it was; a parent that is kept in the run folder is the run's
    kept = stored.model.checkpoint is not None and Path(stored.model.checkpoint).parent == out.resolve()
    checkpoint = stored.model.checkpoint if kept else recipe.model.checkpoint or stored.model.checkpoint
    data = {"workers": recipe.data.workers, "data_dir": recipe.data.data_dir or stored.data.data_dir}
    task = recipe.task
    if isinstance(recipe.teacher, ModelTeacher) and recipe.teacher.teacher_checkpoint is None:
        task = stored.task
    return recipe.replace(
        data=stored.data.replace(**data), model=stored.model.replace(checkpoint=checkpoint), task=task,
        papers=stored.papers,
    )  # fmt: skip


def with_size(recipe: Recipe) -> Recipe:
    """A network built for one size gets images of that size, where the recipe leaves their size open."""
    if recipe.data.img_size is not None or recipe.model.input_size is None:
        return recipe
    return recipe.replace(data=recipe.data.replace(img_size=recipe.model.input_size))


def with_pixels(data: Data, size: int, test_size: int) -> Data:
    """The same image files, as large as this."""
    train, val = (
        replace(part, img_size=side) if isinstance(part, ImageFiles) else part
        for part, side in ((data.train, size), (data.val, test_size))
    )
    return replace(data, train=train, val=val, img_size=size)


def prepare(recipe: Recipe, out: Path, resume: bool) -> Prepared:
    """Load data and parent, and plan. Raises RecastError for whatever is wrong, before anything is written."""
    check_trainable(recipe)
    _check_start(recipe, resume)
    recipe, task = with_size(recipe), task_of(recipe)
    data = load_data(recipe.data, recipe.augmentation, recipe.labels)
    _check_images(recipe, data)
    config = task.network(recipe.model, data)
    parent = _parent(recipe, config, data)
    recipe, data, pixels = _with_norm(recipe, data, parent)
    is_new = _is_new(config, parent, data)
    if is_new and (recipe.teacher.kind == "parent" or _is_chosen_here(recipe)):
        raise RecastError(NEW_HEAD["parent" if recipe.teacher.kind == "parent" else "where=auto"])
    example = torch.zeros(1, 3, data.img_size, data.img_size)
    _check_memory(parent, example, recipe)
    task.check_outputs(_outputs(parent, example, config.name), data, config.name)
    if recipe.optim.pool_lr is not None and recipe.is_plain and not attention_pools(parent):
        raise RecastError(
            f"optim.pool_lr is the rate of attention pooling, which {config.name} has not: leave it out, or take "
            "pool.kind=single"
        )
    _check_frozen(recipe, parent)
    planned = None if recipe.is_plain else _plan(recipe, parent, data, example)
    if planned is not None and _is_chosen_here(recipe):
        recipe = recipe.replace(where=[step.name for step in planned.steps], budget="tokens=none")
    config = config.replace(num_classes=config.num_classes or len(data.classes))
    if keeps_parent := is_new and planned is not None and not resume:
        path = f"{(out / PARENT_WEIGHTS).resolve()}"
        config = config.replace(checkpoint=path, checkpoint_key=None, pretrained=False, new_head=False)
    papers, coarse = dict(recipe.papers), None
    for name, paper in papers.items():
        if isinstance(paper, LabelsConfig) and paper.coarse_file is not None:
            coarse = decode(read_bytes(paper.coarse_file), paper.coarse_file)
            papers[name] = paper.replace(coarse_file=f"{(out / COARSE_FILE).resolve()}")
    recipe = recipe.replace(model=config, data=recipe.data.replace(mean=data.mean, std=data.std), papers=papers)
    return Prepared(recipe, data, parent, planned, keeps_parent, pixels, coarse)


def _check_start(recipe: Recipe, resume: bool) -> None:
    """Raise RecastError for a start of random weights that would wipe trained ones."""
    if not resume and (recipe.model.checkpoint or recipe.model.pretrained):
        for paper in recipe.papers.values():
            paper.check_trained()


def _check_images(recipe: Recipe, data: Data) -> None:
    """Raise RecastError for images that this recipe cannot train on."""
    if missing := [name for name, part in (("training", data.train), ("validation", data.val)) if len(part) == 0]:
        raise RecastError(f"{data.name} has no {missing[0]} images: training needs both parts")
    Loader(  # a batch that the data cannot fill is found now, not after the recast
        data.train, recipe.data.batch_size, shuffle_seed=recipe.seed, repeats=recipe.augment.repeats, drop_last=True
    )
    task_of(recipe).check_data(recipe, data)


def _parent(recipe: Recipe, config: ModelConfig, data: Data) -> nn.Module:
    """The network that the run starts from, in the form that its task trains."""
    with seeded(mix_seed("parent", recipe.seed)):
        parent = build(config, num_classes=len(data.classes))
        for paper in () if config.checkpoint or config.pretrained else recipe.papers.values():
            paper.draw_(parent)
    with seeded(mix_seed("embedding", recipe.seed)):
        return task_of(recipe).adapt_(parent, recipe, len(data.classes))


def _with_norm(recipe: Recipe, data: Data, parent: nn.Module) -> tuple[Recipe, Data, str]:
    """Recipe and data with the size and normalisation that the parent knows, and `Prepared.pixels`."""
    defaults, size_from = input_defaults(parent), ""
    is_stated = defaults is not None or split_name(recipe.model.name)[0] == "torchvision"
    if not is_stated and recipe.data.img_size is None and isinstance(data.train, ImageFiles):
        size = data.train.own_size(recipe.data.bad_image == "skip")
        data = with_pixels(data, size, recipe.data.test_size or size)
        recipe = recipe.replace(data=recipe.data.replace(img_size=size))
        size_from = " (the files' own, as the network states none; --img-size)"
    norm_from = "the data set's"
    if defaults is not None and len(defaults.mean) == 3:  # pixels must come as the parent knows them
        mean = data.mean if recipe.data.mean else defaults.mean
        std = data.std if recipe.data.std else defaults.std
        data, norm_from = replace(data, mean=mean, std=std), "the network's"
    elif (data.mean, data.std) == IMAGENET:
        norm_from = "ImageNet's, as the network states none; set others with --mean and --std"
    if recipe.data.mean or recipe.data.std:
        norm_from = "as given"
    norm = (" ".join(f"{value:.3g}" for value in values) for values in (data.mean, data.std))
    text = "images: {0}x{0} pixels{1}, mean {2}, std {3} ({4})".format(data.img_size, size_from, *norm, norm_from)
    return recipe, data, text


def _is_new(config: ModelConfig, parent: nn.Module, data: Data) -> bool:
    """Whether the parent's classifier has weights that nobody trained."""
    cfg = getattr(parent, "pretrained_cfg", None)
    own_classes = cfg.get("num_classes") if isinstance(cfg, Mapping) else None
    own_head = config.name.startswith("torchvision:") or own_classes == len(data.classes)
    return config.new_head or (config.checkpoint is None and not (config.pretrained and own_head))


def _outputs(parent: nn.Module, example: torch.Tensor, name: str) -> Any:
    """What the parent gives for an image. Raises RecastError where it cannot take one of this size."""
    try:
        with torch.no_grad(), in_eval(parent):
            return parent(example)
    except (AssertionError, RuntimeError, ValueError) as error:
        size = example.shape[-1]
        raise RecastError(
            f"{name} cannot take images of {size}x{size} ({first_line(error)}): set data.img_size, or "
            f"model.input_size={size} for a network built for one size"
        ) from None


def _is_chosen_here(recipe: Recipe) -> bool:
    """Whether the recipe leaves the layers to a measurement: recipe.yaml of the run then names those that it found."""
    return recipe.where == ["auto"]


def _plan(recipe: Recipe, parent: nn.Module, data: Data, example: torch.Tensor) -> Plan:
    limits = Budget.parse(recipe.budget)
    if _is_chosen_here(recipe) and process_count() > 1:
        raise RecastError(
            f"{process_count()} processes would measure for themselves which layers to take: write the plan first, "
            "recast plan … --out plan.json, and give it as --plan"
        )
    if not _is_chosen_here(recipe):
        where = recipe.where[0] if len(recipe.where) == 1 else recipe.where
        return plan(parent, example, recipe.recast, where=where, budget=limits, pool=recipe.pool)
    images, labels = class_images(data, RANKED_IMAGES, recipe.seed, recipe.data.bad_image, torch.device("cpu"))
    return plan_best(parent, images, labels, recipe.recast, limits, recipe.pool)[0]


def _check_frozen(recipe: Recipe, parent: nn.Module) -> None:
    """Raise RecastError where the network has nothing of what the recipe would train."""
    freeze = recipe.regularization.freeze
    has = {
        "all_but_attention": recipe.has_layers or any(map(is_attention, parent.modules())),
        "all_but_batch_norm": batch_norms(parent),
    }
    if not has.get(freeze, True):
        what = freeze.removeprefix("all_but_").replace("_", " ")
        raise RecastError(f"regularization.freeze={freeze}: {recipe.model.name} has no {what}; take freeze=trunk")


def _check_memory(parent: nn.Module, example: torch.Tensor, recipe: Recipe) -> None:
    """Raise RecastError for a training whose batches cannot fit. What a step keeps is halved (amp), as the parent's."""
    count = recipe.data.batch_size // (recipe.accumulate * process_count())
    if count * example.nbytes < SMALL:
        return
    try:
        kept = 0 if recipe.grad_checkpointing else observe(parent, example, set()).activation_bytes / 2
    except RecastError:  # told by the pass that follows
        return
    what = f"batches of {count:,} images of {recipe.data.img_size or example.shape[-1]:,} pixels a side"
    check_memory(count * (example.nbytes + kept), what, choose_device(recipe.device))


def some_images(
    part: LabelledImages, count: int, recipe: Recipe, data: Data, device: torch.device, whole: bool = False
) -> Iterator[torch.Tensor]:
    """`count` images of a part in the order of the recipe's seed, normalised, in batches; `whole`: uncut ones."""
    size, missing = min(recipe.data.batch_size, 128), count
    for images, _ in Loader(part, size, shuffle_seed=recipe.seed, bad_image=recipe.data.bad_image):
        images = images if whole else images[:missing]
        yield data.normalised(images, device)
        missing -= len(images)
        if missing <= 0:
            return
