"""What a classifier learns, and how it is validated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timm.loss import BinaryCrossEntropy as BinaryLoss
from torch import Tensor, nn
from torch.nn import functional as F

from recast.errors import RecastError
from recast.lab.config.tasks import BinaryCrossEntropy, ImageTask
from recast.lab.data import Data
from recast.lab.training.distill import widened
from recast.models.build import check_logits


def balanced_weights(labels: Tensor, num_classes: int) -> Tensor:
    """Return weights N/(C·N_c) of the classes (C,), by which all count equally (scikit-learn's `balanced`)."""
    return len(labels) / (num_classes * labels.bincount(minlength=num_classes).clamp(min=1).double())


def label_loss(config: ImageTask, num_classes: int, weights: Tensor | None = None) -> Callable[[Any, Tensor], Tensor]:
    """Return the loss that `config` names: logits z (B, C), targets → a scalar, computed in float32 at least.

        ce   −1/B Σ_b Σ_c t_bc · log softmax(z_b)_c
        bce  −1/(B·C) Σ_b Σ_c [t_bc · log σ(z_bc) + (1 − t_bc) · log(1 − σ(z_bc))]

    Labels (B,) become t = 1 − s + s/C for their class and s/C for the others, s the label smoothing. Targets (B, C) are
    taken as they are: timm's Mixup has smoothed them. With a threshold θ, bce's t are then 1 where t > θ, else 0. Of
    several outputs the logits are the first. With `weights` (C,) ce multiplies the term of an image by Σ_c w_c t_bc of
    the t before smoothing.
    Sources: Szegedy et al. 2016 (smoothing); Wightman et al. 2021, RSB (bce over mixed labels); DeiT III (θ = 0).

    Raises RecastError for a threshold that all classes pass or none, and, when called, for logits or targets of another
    shape.
    """
    smoothing, is_binary = config.label_smoothing, isinstance(config.loss, BinaryCrossEntropy)
    threshold = config.loss.bce_threshold if isinstance(config.loss, BinaryCrossEntropy) else None
    if threshold is not None:
        _check_threshold(smoothing, threshold, num_classes)
    binary = BinaryLoss(smoothing=smoothing, target_threshold=threshold)

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        logits = outputs if isinstance(outputs, Tensor) else outputs[0]
        are_labels = _check_shapes(logits, targets, num_classes)
        logits = widened(logits)
        targets = targets if are_labels else targets.to(logits.dtype)
        if is_binary:
            return binary(logits, targets)
        if weights is None:
            return F.cross_entropy(logits, targets, label_smoothing=smoothing if are_labels else 0.0)
        terms = F.cross_entropy(logits, targets, label_smoothing=smoothing if are_labels else 0.0, reduction="none")
        of_class = weights.to(logits)
        return (terms * (of_class[targets] if are_labels else targets @ of_class)).mean()

    return loss


def _check_threshold(smoothing: float, threshold: float, num_classes: int) -> None:
    others, own = smoothing / num_classes, 1 - smoothing + smoothing / num_classes
    # equal counts as passed: mixing λ·t + (1 − λ)·t of equal targets may round up
    if smoothing > 0 and threshold <= others:
        raise RecastError(
            f"task.loss.bce_threshold={threshold} turns every class into 1: label_smoothing={smoothing} gives "
            f"each of the {num_classes} classes {others:.3g}; set label_smoothing=0 (DeiT III), or a higher threshold"
        )
    if threshold >= own:
        raise RecastError(
            f"task.loss.bce_threshold={threshold} turns every class into 0: a label is at most {own:.3g}; "
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


class ClassMeter:
    """Mean cross-entropy and top-1 in percent."""

    def __init__(self, data: Data) -> None:
        self.data, self.sums = data, torch.zeros(2, dtype=torch.float64)

    def add(self, model: nn.Module, images: Tensor, labels: Tensor) -> float:
        """Count images, as `Meter.add` does."""
        logits = model(images)
        check_logits(logits, len(labels), len(self.data.classes), self.data.name)
        right = int((logits.argmax(1).cpu() == labels).sum())
        self.sums += torch.tensor([right, len(labels)], dtype=torch.float64)
        return F.cross_entropy(logits.cpu().double(), labels, reduction="sum").item()

    def values(self, sums: Tensor) -> tuple[float, ...]:
        """Return top-1."""
        right, images = sums.tolist()
        return (100 * right / images,)
