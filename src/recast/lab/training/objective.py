"""What a recipe trains for: the labels, a teacher beside them, an embedding, or first the parent's features."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from timm.loss import BinaryCrossEntropy
from torch import Tensor, nn
from torch.nn import functional as F

from recast.errors import RecastError
from recast.lab.config import Recipe, RegularizationConfig, Task
from recast.lab.data import Data
from recast.lab.data.pairs import IGNORE
from recast.lab.tasks.detect import total_loss
from recast.lab.tasks.segment import class_maps
from recast.lab.training.distill import Distillation, build_teacher, train_token_, widened
from recast.lab.training.embedding import EmbeddingLoss
from recast.lab.training.features import FeatureDistillation, keep_recast_gradients_
from recast.lab.training.regularization import set_drop_path_
from recast.layers.gpsa import gpsa_layers

AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
AUXILIARY = 0.4
"""Weight of the loss of a segmenter's auxiliary head (Zhao et al. 2017, PSPNet)."""


def label_loss(config: RegularizationConfig, num_classes: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss that `config` names: logits z (B, C), targets → a scalar, computed in float32 at least.

        ce   −1/B Σ_b Σ_c t_bc · log softmax(z_b)_c
        bce  −1/(B·C) Σ_b Σ_c [t_bc · log σ(z_bc) + (1 − t_bc) · log(1 − σ(z_bc))]

    Labels (B,) become t = 1 − s + s/C for their class and s/C for the others, s the label smoothing. Targets (B, C) are
    taken as they are: timm's Mixup has smoothed them. With a threshold θ, bce's t are then 1 where t > θ, else 0.
    Sources: Szegedy et al. 2016 (smoothing); Wightman et al. 2021, RSB (bce over mixed labels); DeiT III (θ = 0).

    Raises RecastError for a threshold that all classes pass or none, and, when called, for logits or targets of another
    shape.
    """
    smoothing, threshold = config.label_smoothing, config.bce_threshold
    if threshold is not None:
        _check_threshold(config, threshold, num_classes)
    binary = BinaryCrossEntropy(smoothing=smoothing, target_threshold=threshold)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        are_labels = _check_shapes(logits, targets, num_classes)
        logits = widened(logits)
        targets = targets if are_labels else targets.to(logits.dtype)
        if config.loss == "bce":
            return binary(logits, targets)
        return F.cross_entropy(logits, targets, label_smoothing=smoothing if are_labels else 0.0)

    return loss


def pixel_loss(config: RegularizationConfig, num_classes: int) -> Callable[[Any, Tensor], Tensor]:
    """Cross-entropy of every pixel: what a segmenter returns, masks (B, H, W) → a scalar, in float32 at least.

        1/(B·H·W) Σ −log softmax(z)_label over the pixels whose class is known (+ AUXILIARY times the same of `aux`)

    A pixel that is ignored counts in the divisor: the mean over parts and processes is that of the whole batch.
    """

    def loss(outputs: Any, masks: Tensor) -> Tensor:
        maps = class_maps(outputs, num_classes, (masks.shape[1], masks.shape[2]))
        total = torch.zeros((), device=masks.device)
        for name, logits in maps.items():
            found = F.cross_entropy(
                widened(logits), masks, ignore_index=IGNORE, label_smoothing=config.label_smoothing, reduction="sum"
            )
            total = total + (found if name == "out" else AUXILIARY * found)
        return total / masks.numel()

    return loss


def object_loss(_config: RegularizationConfig, _num_classes: int) -> Callable[[Any, Any], Tensor]:
    """The sum of the losses that a detector gives in training."""
    return lambda outputs, _objects: total_loss(outputs)


LOSSES: dict[Task, Callable[[RegularizationConfig, int], Callable[[Any, Any], Tensor]]] = {
    "classify": label_loss, "segment": pixel_loss, "detect": object_loss,
}  # fmt: skip
"""What is learnt, by what is asked of an image."""


def _check_threshold(config: RegularizationConfig, threshold: float, num_classes: int) -> None:
    if config.loss == "ce":
        raise RecastError(
            f"regularization.bce_threshold={threshold} belongs to loss='bce', got loss='ce': leave it out"
        )
    smoothing = config.label_smoothing
    others, own = smoothing / num_classes, 1 - smoothing + smoothing / num_classes
    # equal counts as passed: mixing λ·t + (1 − λ)·t of equal targets may round up
    if smoothing > 0 and threshold <= others:
        raise RecastError(
            f"regularization.bce_threshold={threshold} turns every class into 1: label_smoothing={smoothing} gives "
            f"each of the {num_classes} classes {others:.3g}; set label_smoothing=0 (DeiT III), or a higher threshold"
        )
    if threshold >= own:
        raise RecastError(
            f"regularization.bce_threshold={threshold} turns every class into 0: a label is at most {own:.3g}; "
            "set a lower threshold"
        )


def _check_shapes(logits: Tensor, targets: Tensor, num_classes: int) -> bool:
    """Whether the targets are labels; raises for logits or targets that are neither (B, C) nor (B,)."""
    if logits.dim() != 2 or logits.shape[1] != num_classes:
        raise RecastError(f"expected logits (images, {num_classes} classes), got {tuple(logits.shape)}")
    if targets.shape == logits.shape[:1] and not targets.is_floating_point():
        return True
    if targets.shape == logits.shape and targets.is_floating_point():
        return False
    raise RecastError(
        f"expected {len(logits)} labels (whole numbers), or targets of shape {tuple(logits.shape)}, "
        f"got {tuple(targets.shape)} of {targets.dtype}"
    )


class Objective:
    """The loss of a recipe at each of its steps: `at(step)` chooses it, a call computes it.

    For `distill.feature_epochs` epochs a recast network learns its parent's features with its recast layers alone; a
    network without recast layers (the control arm) has nothing to learn there and trains on its labels all the time.

    `parent` is the teacher of `distill.name=parent`, and the one whose features are learned.
    """

    def __init__(
        self, recipe: Recipe, data: Data, student: nn.Module, parent: nn.Module | None, batches: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        config, classes, amp = recipe.distill, len(data.classes), AMP_DTYPES.get(recipe.amp)
        self.task = data.task
        self.labels = LOSSES[data.task](recipe.regularization, classes)
        self.embedding: EmbeddingLoss | None = None
        if recipe.embedding.is_on:
            steps = recipe.epochs * batches
            self.embedding = EmbeddingLoss(recipe, data, student, self.labels, steps, device, amp)
        self.distillation: Distillation | None = None
        if config.name is not None:
            teacher = build_teacher(
                config, parent, classes, student=(data.mean, data.std), img_size=data.img_size,
                device=device, amp=amp,
            )  # fmt: skip
            train_token_(student)
            self.distillation = Distillation(config, teacher, self.labels)
        self.feature_steps, self.watching = round(config.feature_epochs * batches), ExitStack()
        """While `watching` is open, the student's features are looked at: close it to leave the student as it was."""
        self.features: FeatureDistillation | None = None
        if not config.feature_epochs:
            return
        if parent is None:
            raise RecastError(
                "distill.feature_epochs needs the parent whose features are learned: pass fit(parent=...)"
            )
        if recipe.compile:
            raise RecastError("features are read by hooks, which torch.compile leaves out: set compile=false")
        if gpsa_layers(student):
            self.features = FeatureDistillation(student, parent)
            if (rate := recipe.regularization.drop_path) is not None:
                # the copy of the parent leaves out the branches that the student leaves out
                set_drop_path_(self.features.parent, rate, recipe.regularization.drop_path_mode)

    def inputs(self, images: Tensor, targets: Any) -> tuple[Any, ...]:
        """What the network is given in training: a detector, what it is to find too."""
        return (images, targets.taught()) if self.task == "detect" else (images,)

    def at(self, step: int) -> None:
        """Step number `step` of the whole run (from 0) comes next."""
        if self.embedding is not None:
            self.embedding.step = step
        if step >= self.feature_steps:
            self.watching.close()
        elif self.features is not None and not self.features.watching:
            self.watching.enter_context(self.features)

    def __call__(self, outputs: Any, images: Tensor, targets: Tensor) -> Tensor:
        """Mean loss over the images of a part; for an embedding the targets are the images' numbers."""
        if self.embedding is not None:
            return self.embedding(outputs, images, targets)
        if self.features is not None and self.features.watching:
            return self.features(outputs, images, targets)
        if self.distillation is not None:
            return self.distillation(outputs, images, targets)
        return self.labels(outputs if isinstance(outputs, Tensor) or self.task != "classify" else outputs[0], targets)

    def after_backward(self, model: nn.Module) -> None:
        """When all gradients of a batch are there: while features are learned, only the recast layers move."""
        if self.features is not None and self.features.watching:
            keep_recast_gradients_(model)

    def after_step(self, model: nn.Module) -> None:
        """When the weights have moved."""
        if self.embedding is not None:
            self.embedding.after_step(model)
