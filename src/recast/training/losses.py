"""The label term of a training loss: cross-entropy, or binary cross-entropy of every class."""

from __future__ import annotations

from collections.abc import Callable

import torch
from timm.loss import BinaryCrossEntropy
from torch import Tensor
from torch.nn import functional as F

from recast.errors import RecastError
from recast.run.config import RegularizationConfig

LabelLoss = Callable[[Tensor, Tensor], Tensor]
"""Logits (B, C) and targets → a scalar; targets are labels (B,) of whole numbers, or shares of the classes (B, C)."""


def widened(values: Tensor) -> Tensor:
    """`values` in float32 where they are narrower (autocast's logits): exponentials and sums need the digits."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def label_loss(config: RegularizationConfig, num_classes: int) -> LabelLoss:
    """The loss that `config` names, as a function of logits z (B, C) and targets, computed in float32 at least.

        ce   −1/B Σ_b Σ_c t_bc · log softmax(z_b)_c
        bce  −1/(B·C) Σ_b Σ_c [t_bc · log σ(z_bc) + (1 − t_bc) · log(1 − σ(z_bc))]

    Labels become t = 1 − s + s/C for their class and s/C for the others, s the label smoothing. Targets (B, C) are
    taken as they are: timm's Mixup has smoothed them. With a threshold θ, bce's t are then 1 where t > θ, else 0.
    Sources: Szegedy et al. 2016 (smoothing); Wightman et al. 2021, RSB (bce over mixed labels); DeiT III (θ = 0).

    Raises RecastError for numbers out of range, a threshold that all classes pass or none, and, when called, for
    logits or targets of another shape.
    """
    smoothing, threshold = config.label_smoothing, config.bce_threshold
    if not 0 <= smoothing < 1:
        raise RecastError(f"regularization.label_smoothing must be at least 0 and below 1, got {smoothing}")
    if config.loss == "ce" and threshold is not None:
        raise RecastError(
            f"regularization.bce_threshold={threshold} belongs to loss='bce', got loss='ce': leave it out"
        )
    if threshold is not None:
        _check_threshold(threshold, smoothing, num_classes)
    binary = BinaryCrossEntropy(smoothing=smoothing, target_threshold=threshold)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        are_labels = _check_shapes(logits, targets, num_classes)
        logits = widened(logits)
        targets = targets if are_labels else targets.to(logits.dtype)
        if config.loss == "bce":
            result: Tensor = binary(logits, targets)
            return result
        return F.cross_entropy(logits, targets, label_smoothing=smoothing if are_labels else 0.0)

    return loss


def _check_threshold(threshold: float, smoothing: float, num_classes: int) -> None:
    others, own = smoothing / num_classes, 1 - smoothing + smoothing / num_classes
    # equal counts as passed: mixing λ·t + (1 − λ)·t of equal targets may round up
    if threshold < 0 or (smoothing > 0 and threshold <= others):
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
