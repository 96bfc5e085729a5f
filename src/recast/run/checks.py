"""What fields of a recipe ask of one another; what a field asks by itself is in its type (`recast.run.fields`)."""

from __future__ import annotations

import dataclasses

from recast.errors import RecastError
from recast.run.config import Recipe, ScheduleConfig
from recast.run.fields import check_fields
from recast.run.schedule import parse_dates


def check_recipe(recipe: Recipe) -> None:
    """Raise RecastError for what no training can use: the first number out of its range, the first two that clash."""
    check_fields(recipe)  # again: recipes may have been changed since they were made
    for field in dataclasses.fields(recipe):
        if dataclasses.is_dataclass(part := getattr(recipe, field.name)):
            check_fields(part, f"{field.name}.")
    if recipe.augment.scale[0] > recipe.augment.scale[1]:
        raise RecastError(f"augment.scale must be (smallest, largest) share of the area, got {recipe.augment.scale}")
    if recipe.calibrate and recipe.recast.gate != "sigmoid":
        raise RecastError("calibrate is for gate='sigmoid': the linear gate already starts as the parent itself")
    if recipe.optim.gate_l1 and recipe.recast.gate != "linear":
        raise RecastError(
            f"optim.gate_l1 closes the heads of gate='linear', got gate={recipe.recast.gate!r}: leave it out"
        )
    _check_schedule(recipe)
    if recipe.regularization.freeze == "trunk" and recipe.has_layers:
        raise RecastError(
            "regularization.freeze=trunk trains attention pooling and the classifier alone, so the recast layers "
            f"(where {' '.join(recipe.where)}) would never train: add --where none, or leave freeze out"
        )
    if recipe.distill.feature_epochs > recipe.epochs:
        raise RecastError(
            f"distill.feature_epochs must be at most epochs ({recipe.epochs}), got {recipe.distill.feature_epochs}: "
            "it is the first part of the training"
        )


def _check_schedule(recipe: Recipe) -> None:
    """Options that the schedule has no use for, and a schedule without anything to do."""
    config = recipe.schedule
    for field, belongs in (("conv_epochs", "at_once"), ("dates", "listed"), ("order", "progressive")):
        if getattr(config, field) != getattr(ScheduleConfig(), field) and config.name != belongs:
            raise RecastError(
                f"schedule.{field} belongs to schedule={belongs}, got schedule={config.name}: leave it out"
            )
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
