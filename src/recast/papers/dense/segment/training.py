"""Loss and validation of a segmenter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recast.lab.data import Data
from recast.lab.training.distill import widened
from recast.papers.dense.config import SegmentConfig
from recast.papers.dense.segment.evaluation import mean_accuracy, mean_iou, pixel_counts
from recast.papers.dense.segment.networks import pixel_logits
from recast.papers.dense.segment.pairs import IGNORE

AUXILIARY_WEIGHT = 0.4
"""Weight of the loss of a segmenter's auxiliary head (Zhao et al. 2017, PSPNet)."""


def pixel_loss(config: SegmentConfig, num_classes: int) -> Callable[[Any, Tensor], Tensor]:
    """Return the cross-entropy of every pixel: outputs, masks (B, H, W) → a scalar, computed in float32 at least.

        1/(B·H·W) Σ −log softmax(z)_label over the pixels of known class (+ AUXILIARY_WEIGHT times the same of `aux`)

    Ignored pixels count in the divisor, so that the mean over parts and processes is that of the whole batch.
    """

    def loss(outputs: Any, masks: Tensor) -> Tensor:
        maps = pixel_logits(outputs, num_classes, (masks.shape[1], masks.shape[2]))
        total = torch.zeros((), device=masks.device)
        for name, logits in maps.items():
            part = F.cross_entropy(
                widened(logits), masks, ignore_index=IGNORE, label_smoothing=config.label_smoothing, reduction="sum"
            )
            total = total + (part if name == "out" else AUXILIARY_WEIGHT * part)
        return total / masks.numel()

    return loss


class PixelMeter:
    """Mean cross-entropy of the pixels, their top-1 (aAcc) and mIoU in percent."""

    def __init__(self, data: Data) -> None:
        self.classes = len(data.classes)
        self.sums = torch.zeros(3 * self.classes, dtype=torch.float64)

    def add(self, model: nn.Module, images: Tensor, labels: Tensor) -> float:
        """Count images, as `Meter.add` does."""
        logits = pixel_logits(model(images), self.classes, (labels.shape[1], labels.shape[2]))["out"].cpu().double()
        predicted = logits.argmax(1).masked_fill(labels == IGNORE, IGNORE)
        self.sums += pixel_counts(predicted, labels, self.classes).sum(0).flatten()
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
        return loss.item() / labels[0].numel()

    def values(self, sums: Tensor) -> tuple[float, ...]:
        """Return aAcc and mIoU."""
        counts = sums.reshape(3, self.classes).numpy()
        return float(mean_accuracy(counts[::2].sum(1))), float(mean_iou(counts.ravel()))
