"""Numbers of a recipe that no training can use."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from recast.errors import RecastError
from recast.run.config import Recipe, ScheduleConfig
from recast.run.schedule import parse_dates


class Range(NamedTuple):
    """Which numbers are allowed, in words, and the fields of a recipe that hold such numbers (or several, or None)."""

    text: str
    holds: Callable[[float], bool]
    fields: tuple[str, ...]


# Written so that NaN, of which every comparison is false, lies in no range.
RANGES = (
    Range(
        "1 or more",
        lambda x: 1 <= x < math.inf,
        ("data.batch_size", "data.img_size", "data.test_size", "data.num_train", "data.num_val", "model.num_classes",
         "model.input_size", "augment.repeats", "optim.base_batch", "distill.teacher_size", "accumulate", "save_steps",
         "keep", "keep_every", "schedule.probe_images"),
    ),
    Range("0 or more", lambda x: 0 <= x < math.inf,
          ("data.workers", "calibrate", "recalibrate_bn", "epochs", "schedule.conv_epochs")),
    Range(
        "0 or a positive number",
        lambda x: 0 <= x < math.inf,
        ("augment.color_jitter", "augment.mixup", "augment.cutmix", "optim.lr", "optim.gate_lr", "optim.pool_lr",
         "optim.weight_decay", "optim.warmup_epochs", "optim.warmup_lr", "optim.min_lr", "optim.gate_l1",
         "regularization.layer_scale", "distill.feature_epochs"),
    ),
    Range("a positive number", lambda x: 0 < x < math.inf,
          ("optim.clip_grad", "optim.eps", "distill.temperature", "data.std")),
    Range("between 0 and 1", lambda x: 0 <= x <= 1,
          ("augment.erasing", "augment.mix_prob", "augment.mix_switch_prob", "distill.teacher_weight")),
    Range(
        "at least 0 and below 1",
        lambda x: 0 <= x < 1,
        ("regularization.label_smoothing", "regularization.bce_threshold", "regularization.drop_path",
         "regularization.ema_decay", "optim.momentum", "optim.betas"),
    ),
    Range("above 0 and at most 1", lambda x: 0 < x <= 1,
          ("optim.layer_decay", "data.crop_pct", "data.data_fraction", "augment.scale")),
    Range("above 0 and below 1", lambda x: 0 < x < 1, ("data.val_fraction",)),
)  # fmt: skip


def check_ranges(recipe: Recipe) -> None:
    """Raise RecastError that names the first field that holds a number out of its range."""
    for allowed in RANGES:
        for field in allowed.fields:
            value = attrgetter(field)(recipe)
            several = isinstance(value, tuple)
            numbers = () if value is None else value if several else (value,)
            if not all(allowed.holds(number) for number in numbers):
                each = "each " if several else ""
                raise RecastError(f"{field} must {each}be {allowed.text}, got {value}")
    if recipe.augment.scale[0] > recipe.augment.scale[1]:
        raise RecastError(f"augment.scale must be (smallest, largest) share of the area, got {recipe.augment.scale}")
    check_schedule(recipe)
    check_freeze(recipe)
    if recipe.distill.feature_epochs > recipe.epochs:
        raise RecastError(
            f"distill.feature_epochs must be at most epochs ({recipe.epochs}), got {recipe.distill.feature_epochs}: "
            "it is the first part of the training"
        )


def check_schedule(recipe: Recipe) -> None:
    """Raise RecastError for options that a schedule has no use for."""
    config = recipe.schedule
    for field, belongs in (("conv_epochs", "at_once"), ("dates", "listed")):
        if getattr(config, field) and config.name != belongs:
            raise RecastError(
                f"schedule.{field} belongs to schedule={belongs}, got schedule={config.name}: leave it out"
            )
    if config.order != ScheduleConfig().order and config.name != "progressive":
        raise RecastError(f"schedule.order belongs to schedule=progressive, got schedule={config.name}: leave it out")
    if config.name == "at_once" and config.conv_epochs >= recipe.epochs:
        raise RecastError(
            f"schedule.conv_epochs is {config.conv_epochs} of {recipe.epochs} epochs: no epoch of attention is left; "
            "take fewer, or --where none for the convolutional network alone"
        )
    if config.name == "listed":
        late = [f"{epoch}" for epoch in parse_dates(config.dates) if not 1 <= epoch <= recipe.epochs]
        if late:
            raise RecastError(f"schedule.dates must lie in the training, epochs 1 to {recipe.epochs}, got {late[0]}")
    if config.name == "before":
        return
    if "learned" in (config.name, config.order) and recipe.recast.stride != "keep":
        raise RecastError(
            f"a learned schedule measures gates where the recast is exact, got stride={recipe.recast.stride}: take keep"
        )
    if not recipe.has_layers:
        raise RecastError(
            f"where none recasts no convolution, so schedule={config.name} has no layers: leave one of them out"
        )
    unused = {"calibrate": recipe.calibrate, "recalibrate_bn": recipe.recalibrate_bn,
              "distill.feature_epochs": recipe.distill.feature_epochs}  # fmt: skip
    if used := [field for field, value in unused.items() if value]:
        raise RecastError(
            f"{used[0]} prepares a network that is recast before training, got schedule={config.name}: leave it out"
        )


def check_freeze(recipe: Recipe) -> None:
    """Raise RecastError where layers would be recast that never train."""
    if recipe.regularization.freeze == "trunk" and recipe.has_layers:
        raise RecastError(
            "regularization.freeze=trunk trains attention pooling and the classifier alone, so the recast layers "
            f"(where {' '.join(recipe.where)}) would never train: add --where none, or leave freeze out"
        )
