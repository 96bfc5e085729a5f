"""Loss and validation of a classifier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timm.loss import BinaryCrossEntropy as BinaryLoss
from torch import Tensor, nn
from torch.nn import functional as F

from recast.errors import RecastError
from recast.lab.config.tasks import BinaryCrossEntropy, OneLabelTask
from recast.lab.data import Data
from recast.lab.training.distill import widened


def balanced_weights(labels: Tensor, num_classes: int) -> Tensor:
    """Return weights N/(C·N_c) of the classes (C,), by which all count equally (scikit-learn's `balanced`)."""
    return len(labels) / (num_classes * labels.bincount(minlength=num_classes).clamp(min=1).double())


def label_loss(
    config: OneLabelTask, num_classes: int, weights: Tensor | None = None
) -> Callable[[Any, Tensor], Tensor]:
    """Return the loss that `config` names: logits z (B, C), targets → a scalar, computed in float32 at least.

        ce   −1/B Σ_b Σ_c t_bc · log softmax(z_b)_c
        bce  −1/(B·C) Σ_b Σ_c [t_bc · log σ(z_bc) + (1 − t_bc) · log(1 − σ(z_bc))]

    Labels (B,) become t = 1 − s + s/C for their class and s/C for the others, s the label smoothing. Targets (B, C) are
    taken as they are: timm's Mixup has smoothed them. With a threshold θ, bce's t are then 1 where t > θ, else 0. The
    first of several outputs is the logits. With `weights` (C,) ce multiplies the term of an image by Σ_c w_c t_bc, t
    before smoothing.
    Sources: Szegedy et al. 2016 (smoothing); Wightman et al. 2021, RSB (bce over mixed labels); DeiT III (θ = 0).

    Raises RecastError for a threshold that all classes pass or none.
    """
    smoothing, is_binary = config.label_smoothing, isinstance(config.loss, BinaryCrossEntropy)
    threshold = config.loss.bce_threshold if isinstance(config.loss, BinaryCrossEntropy) else None
    others = smoothing / num_classes
    # equal counts as passed: mixing λ·t + (1 − λ)·t of equal targets may round up
    if threshold is not None and not (others if smoothing else -1) < threshold < 1 - smoothing + others:
        raise RecastError(
            f"task.loss.bce_threshold={threshold} gives all classes the same target: with label_smoothing={smoothing} "
            f"it must lie between {others:.3g} and {1 - smoothing + others:.3g}"
        )
    binary = BinaryLoss(smoothing=smoothing, target_threshold=threshold)

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        logits = widened(outputs if isinstance(outputs, Tensor) else outputs[0])
        are_labels = targets.dim() == 1
        targets = targets if are_labels else targets.to(logits.dtype)
        if is_binary:
            return binary(logits, targets)
        if weights is None:
            return F.cross_entropy(logits, targets, label_smoothing=smoothing if are_labels else 0.0)
        terms = F.cross_entropy(logits, targets, label_smoothing=smoothing if are_labels else 0.0, reduction="none")
        of_class = weights.to(logits)
        return (terms * (of_class[targets] if are_labels else targets @ of_class)).mean()

    return loss


class ClassMeter:
    """Mean cross-entropy and top-1 in percent."""

    def __init__(self, data: Data) -> None:
        self.data, self.sums = data, torch.zeros(2, dtype=torch.float64)

    def add(self, model: nn.Module, images: Tensor, labels: Tensor) -> float:
        """Count images, as `Meter.add` does."""
        logits = model(images)
        self.data.check_logits(logits, len(labels))
        right = int((logits.argmax(1).cpu() == labels).sum())
        self.sums += torch.tensor([right, len(labels)], dtype=torch.float64)
        return F.cross_entropy(logits.cpu().double(), labels, reduction="sum").item()

    def values(self, sums: Tensor) -> tuple[float, ...]:
        """Return top-1."""
        right, images = sums.tolist()
        return (100 * right / images,)
