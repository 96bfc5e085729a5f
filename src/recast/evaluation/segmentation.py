"""How well pixels are classified: mIoU, mAcc and aAcc (suite `segmentation`).

Of every image three counts a class are kept, of pixels that are labelled with it, predicted as it, and both; the
metrics are functions of their sums over all images, as in the benchmarks, and the bootstrap draws images.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from recast.data.pairs import IGNORE
from recast.evaluation.context import Batch, Score
from recast.evaluation.stats import Statistic


def pixel_counts(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """(B, 3, classes): pixels of an image that are labelled with a class, predicted as it, and both; of those labelled
    `IGNORE` none. predicted and labels (B, H, W)."""
    known = labels != IGNORE
    found = []
    for which, values in ((known, labels), (known, predicted), (known & (predicted == labels), labels)):
        ones = which.flatten(1).double()
        sums = torch.zeros(len(labels), classes, dtype=torch.float64, device=labels.device)
        found.append(sums.scatter_add_(1, values.flatten(1).clamp(max=classes - 1), ones))
    return torch.stack(found, 1)


def score_segmentation(batch: Batch) -> Iterator[Score]:
    """miou, macc, aacc, and iou/CLASS."""
    classes = batch.context.data.classes
    for name in batch.models:
        predicted = batch.context.maps(name, batch.images).argmax(1)
        counts = pixel_counts(predicted, batch.labels, len(classes)) / batch.labels[0].numel()
        yield Score(name, "miou", counts.flatten(1))
        yield Score(name, "macc", counts[:, ::2].flatten(1))
        yield Score(name, "aacc", counts[:, ::2].sum(2))
        for kind, members in batch.context.data.kinds.items():
            which = [classes.index(label) for label in members]
            yield Score(name, f"miou@{kind}", counts[:, :, which].flatten(1))
        for index, label in enumerate(classes):
            yield Score(name, f"iou/{label}", counts[:, :, index])


def mean_iou(means: np.ndarray) -> np.ndarray:
    """100 · mean over the classes of both/(labelled + predicted − both), of those that are labelled or predicted."""
    labelled, predicted, both = np.moveaxis(_by_class(means, 3), -2, 0)
    return _mean_ratio(both, labelled + predicted - both)


def mean_accuracy(means: np.ndarray) -> np.ndarray:
    """100 · mean over the classes of both/labelled, of those that are labelled; of one sum of all it is the pixels'."""
    labelled, both = np.moveaxis(_by_class(means, 2), -2, 0)
    return _mean_ratio(both, labelled)


def _by_class(means: np.ndarray, parts: int) -> np.ndarray:
    return means.reshape(*means.shape[:-1], parts, -1)


def _mean_ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """NaN where there is no whole at all."""
    there = whole > 0
    ratios = np.divide(part, whole, out=np.zeros_like(part), where=there)
    count = there.sum(-1)
    return 100 * np.divide(ratios.sum(-1), count, out=np.full(count.shape, np.nan), where=count > 0)


STATISTICS: dict[str, Statistic] = {"miou": mean_iou, "iou": mean_iou, "macc": mean_accuracy, "aacc": mean_accuracy}
