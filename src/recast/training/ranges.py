"""Numbers of a recipe that no training can use."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from recast.config import Recipe
from recast.errors import RecastError


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
         "keep"),
    ),
    Range("0 or more", lambda x: 0 <= x < math.inf, ("data.workers", "calibrate", "recalibrate_bn", "epochs")),
    Range(
        "0 or a positive number",
        lambda x: 0 <= x < math.inf,
        ("augment.color_jitter", "augment.mixup", "augment.cutmix", "optim.lr", "optim.gate_lr", "optim.weight_decay",
         "optim.warmup_epochs", "optim.warmup_lr", "optim.min_lr", "optim.gate_l1", "regularization.layer_scale",
         "distill.feature_epochs"),
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
    if recipe.distill.feature_epochs > recipe.epochs:
        raise RecastError(
            f"distill.feature_epochs must be at most epochs ({recipe.epochs}), got {recipe.distill.feature_epochs}: "
            "it is the first part of the training"
        )
