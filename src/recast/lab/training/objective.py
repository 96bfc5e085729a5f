"""What a recipe trains for: its task's loss, a teacher beside it, or first the parent's features."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from recast.errors import RecastError
from recast.lab.config import Recipe
from recast.lab.config.tasks import Teaching
from recast.lab.data import Data
from recast.lab.tasks import task_of
from recast.lab.training.distill import Distillation, build_teacher, train_token_
from recast.lab.training.features import FeatureDistillation, keep_recast_gradients_
from recast.lab.training.regularization import set_recipe_drop_path_
from recast.layers.gpsa import gpsa_layers

AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Objective:
    """The loss of a recipe at each of its steps: `at(step)` chooses it, a call computes it.

    For `schedule.feature_epochs` epochs a recast network learns its parent's features with its recast layers alone; a
    network without recast layers (the control arm) has nothing to learn there and trains on its labels all the time.

    `parent` is the teacher of `task.teacher.kind=parent`, and the one whose features are learned.
    """

    def __init__(
        self, recipe: Recipe, data: Data, student: nn.Module, parent: nn.Module | None, batches: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        config, amp, feature_epochs = recipe.teacher, AMP_DTYPES.get(recipe.amp), recipe.schedule.start.feature_epochs
        self.task = task_of(recipe)
        self.labels = self.task.loss(recipe.task, data)
        steps = recipe.epochs * batches
        self.stateful = self.task.stateful_loss(recipe, data, student, self.labels, steps, device, amp)
        self.distillation: Distillation | None = None
        if isinstance(config, Teaching):
            teacher = build_teacher(
                config, parent, len(data.classes), student=(data.mean, data.std), img_size=data.img_size,
                device=device, amp=amp,
            )  # fmt: skip
            train_token_(student)
            self.distillation = Distillation(config, teacher, self.labels)
        self.feature_steps, self.watching = round(feature_epochs * batches), ExitStack()
        """While `watching` is open, the student's features are looked at: close it to leave the student as it was."""
        self.features: FeatureDistillation | None = None
        if not feature_epochs:
            return
        if parent is None:
            raise RecastError(
                "schedule.feature_epochs needs the parent whose features are learned: pass fit(parent=...)"
            )
        if recipe.compile:
            raise RecastError("features are read by hooks, which torch.compile leaves out: set compile=false")
        if gpsa_layers(student):
            self.features = FeatureDistillation(student, parent)
            # the copy of the parent leaves out the branches that the student leaves out
            set_recipe_drop_path_(self.features.parent, recipe)

    def at(self, step: int) -> None:
        """Step number `step` of the whole run (from 0) comes next."""
        if self.stateful is not None:
            self.stateful.step = step
        if step >= self.feature_steps:
            self.watching.close()
        elif self.features is not None and not self.features.watching:
            self.watching.enter_context(self.features)

    def __call__(self, outputs: Any, images: Tensor, targets: Tensor) -> Tensor:
        """Mean loss over the images of a part."""
        if self.stateful is not None:
            return self.stateful(outputs, images, targets)
        if self.features is not None and self.features.watching:
            return self.features(outputs, images, targets)
        if self.distillation is not None:
            return self.distillation(outputs, images, targets)
        return self.labels(outputs, targets)

    def after_backward(self, model: nn.Module) -> None:
        """When all gradients of a batch are there: while features are learned, only the recast layers move."""
        if self.features is not None and self.features.watching:
            keep_recast_gradients_(model)

    def after_step(self, model: nn.Module) -> None:
        """When the weights have moved."""
        if self.stateful is not None:
            self.stateful.after_step(model)
