"""The loss of a recipe: its task's, with a teacher beside it where there is one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recast.lab.config import Recipe
from recast.lab.config.tasks import Teaching
from recast.lab.data import Data
from recast.lab.tasks import task_of
from recast.lab.training.distill import Distillation, build_teacher, train_token_

AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Objective:
    """The loss of every step. `parent` is the teacher of `task.teacher.kind=parent`."""

    def __init__(
        self, recipe: Recipe, data: Data, student: nn.Module, parent: nn.Module | None, batches: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        config, amp = recipe.teacher, AMP_DTYPES.get(recipe.amp)
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

    def __call__(self, outputs: Any, images: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over the images of a part."""
        if self.stateful is not None:
            return self.stateful(outputs, images, targets)
        if self.distillation is not None:
            return self.distillation(outputs, images, targets)
        return self.labels(outputs, targets)
