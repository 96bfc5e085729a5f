"""Loss and validation of a network with several labels for an image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recast.errors import RecastError
from recast.lab.data import Data
from recast.lab.tasks.multilabel.evaluation import label_metrics
from recast.lab.training.distill import widened
from recast.lab.training.distributed import process_count, process_number


def multi_hot_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Return the binary cross-entropy of logits z and targets t of 0 and 1, both (B, C), in float32 at least.

        −1/(B·C) Σ_b Σ_c [t_bc · log σ(z_bc) + (1 − t_bc) · log(1 − σ(z_bc))]

    Of several outputs the logits are the first. Raises RecastError for other shapes.
    """
    logits = widened(outputs if isinstance(outputs, Tensor) else outputs[0])
    if logits.shape != targets.shape:
        raise RecastError(f"expected logits {tuple(targets.shape)} (images, classes), got {tuple(logits.shape)}")
    return F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype))


class LabelMeter:
    """Mean binary cross-entropy and mAP in percent.

    `sums` has a row for every image of every process, [1, logits, targets], and zeros elsewhere: added up over the
    processes they are the rows of all images.
    """

    def __init__(self, data: Data) -> None:
        self.data, self.place = data, process_number()
        rows, columns = len(data.val) * process_count(), 1 + 2 * len(data.classes)
        self.sums = torch.zeros(rows, columns, dtype=torch.float64)

    def add(self, model: nn.Module, images: Tensor, labels: Tensor) -> float:
        """Count images, as `Meter.add` does."""
        logits = model(images)
        self.data.check_logits(logits, len(labels))
        logits, targets = logits.cpu().double(), labels.double()
        end = self.place + len(labels) * process_count()
        self.sums[self.place : end : process_count()] = torch.cat([torch.ones(len(labels), 1), logits, targets], 1)
        self.place = end
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1).sum().item()

    def values(self, sums: Tensor) -> tuple[float, ...]:
        """Return mAP; 0 if no class has an image."""
        rows = sums[sums[:, 0] > 0, 1:].cpu().numpy()
        (value,) = label_metrics(rows, torch.ones(1, len(rows)).numpy(), self.data.classes)["map"]
        return (float(torch.tensor(value).nan_to_num()),)
