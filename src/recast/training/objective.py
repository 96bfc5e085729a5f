"""What a recipe trains for: the labels, a teacher beside them, or first the parent's features."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from recast.data import Data
from recast.errors import RecastError
from recast.run.config import Recipe
from recast.surgery.apply import gpsa_layers
from recast.training.distill import Distillation, Normalisation, Outputs, build_teacher, train_token_
from recast.training.features import FeatureDistillation, keep_recast_gradients_
from recast.training.losses import label_loss
from recast.training.regularization import set_drop_path_
from recast.training.update import AMP_DTYPES


class Objectives:
    """The loss of a recipe at each of its steps: `at(step)` chooses it, a call computes it.

    For `distill.feature_epochs` epochs a recast network learns its parent's features with its recast layers alone; a
    network without recast layers (the control arm) has nothing to learn there and trains on its labels all the time.

    `parent` is the teacher of `distill.name=parent`, and the one whose features are learned.
    """

    def __init__(
        self, recipe: Recipe, data: Data, student: nn.Module, parent: nn.Module | None, batches: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        config, classes = recipe.distill, len(data.classes)
        self.labels = label_loss(recipe.regularization, classes)
        self.distillation: Distillation | None = None
        if config.name is not None:
            normalisation = Normalisation(data.mean, data.std)
            teacher = build_teacher(
                config, parent, classes, student=normalisation, img_size=data.img_size, device=device,
                amp=AMP_DTYPES.get(recipe.amp),
            )  # fmt: skip
            train_token_(student)
            self.distillation = Distillation(config, teacher, self.labels)
        self.feature_steps = 0
        self.features: FeatureDistillation | None = None
        if config.feature_epochs and parent is None:
            raise RecastError(
                "distill.feature_epochs needs the parent whose features are learned: pass fit(parent=...)"
            )
        if config.feature_epochs and recipe.compile:
            raise RecastError("features are read by hooks, which torch.compile leaves out: set compile=false")
        if config.feature_epochs and parent is not None and gpsa_layers(student):
            self.feature_steps = round(config.feature_epochs * batches)
            watched = copy.deepcopy(parent)
            if recipe.regularization.drop_path is not None:  # it leaves out the branches that the student leaves out
                set_drop_path_(watched, recipe.regularization.drop_path, recipe.regularization.drop_path_mode)
            self.features = FeatureDistillation(student, watched)
        self.in_features = False

    def at(self, step: int) -> None:
        """Step number `step` of the whole run (from 0) comes next."""
        if self.features is None:
            return
        self.in_features = step < self.feature_steps
        if self.in_features:
            self.features.attach()
        else:
            self.features.detach()

    def close(self) -> None:
        """Leave the student as it was found."""
        if self.features is not None:
            self.features.detach()

    def __call__(self, outputs: Outputs, images: Tensor, targets: Tensor) -> Tensor:
        """Mean loss over the images of a part."""
        if self.in_features and self.features is not None:
            return self.features(outputs, images, targets)
        if self.distillation is not None:
            return self.distillation(outputs, images, targets)
        return self.labels(outputs if isinstance(outputs, Tensor) else outputs[0], targets)

    def after_backward(self, model: nn.Module) -> None:
        """While features are learned, only the recast layers move."""
        if self.in_features:
            keep_recast_gradients_(model)
