"""The validation of a detector, which computes its losses itself."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from recast.lab.data import Data
from recast.lab.data.seeding import seeded
from recast.papers.dense.detect.evaluation import average_precisions, scores_of, stacked, summarised
from recast.papers.dense.detect.networks import check_detections, losing, total_loss
from recast.papers.dense.detect.objects import Objects


class ObjectMeter:
    """Sum of a detector's losses, AP of the boxes at IoU 0.5 and AP, in percent; in one process."""

    def __init__(self, data: Data) -> None:
        self.data, self.sums = data, torch.zeros(0, dtype=torch.float64)
        self.rows: list[np.ndarray] = []

    def add(self, model: nn.Module, images: Tensor, labels: Objects) -> float:
        """Count images, as `Meter.add` does."""
        outputs = model(images)
        check_detections(outputs, len(labels))
        self.rows += scores_of(outputs, labels, len(self.data.classes), "boxes")
        with losing(model), seeded(0):
            return total_loss(model(images, labels.to(images.device).taught())).item() * len(labels)

    def values(self, sums: Tensor) -> tuple[float, ...]:
        """Return AP at IoU 0.5, and AP."""
        precisions = average_precisions(stacked(self.rows), np.ones((1, len(self.rows))), len(self.data.classes))
        aps = summarised(precisions, self.data.classes, {})
        ap50, ap = (float(np.nan_to_num(aps[name][0])) for name in ("ap50", "ap"))
        return ap50, ap
