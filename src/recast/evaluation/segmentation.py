"""How well pixels are classified: mIoU, mAcc and aAcc (suite `segmentation`).

Of every image three counts a class are kept, of pixels that are labelled with it, predicted as it, and both; the
metrics are functions of their sums over all images, as in the benchmarks, and the bootstrap draws images.
"""

from __future__ import annotations

from collections.abc import Iterator
from colorsys import hsv_to_rgb

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from recast.data.pairs import IGNORE
from recast.evaluation.context import Batch, Context, Score, Source, sampled
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
        for index, label in enumerate(classes):
            yield Score(name, f"iou/{label}", counts[:, :, index])


def draw_predictions(context: Context, count: int = 6, among: int = 64) -> Image.Image:
    """Image, mask and every model's prediction side by side, a row an image: of the first `among` images those of whose
    pixels the models say most different things. What is ignored is white."""
    rows: list[tuple[float, list[np.ndarray]]] = []
    hues = np.arange(len(context.data.classes))
    colours = np.stack([hsv_to_rgb(0.618 * hue % 1, 0.75, 0.95 - 0.4 * (hue % 2)) for hue in hues])
    palette = np.concatenate([np.zeros((1, 3)), colours[1:], np.ones((IGNORE + 1 - len(colours), 3))])
    for batch in context.batches(Source(sampled(context.data.val, among))):
        said = torch.stack([context.maps(name, batch.images).argmax(1) for name in batch.models], 1).cpu()
        for image, mask, predicted in zip(batch.images.cpu(), batch.labels.cpu(), said, strict=True):
            differ = float((predicted[:1] != predicted).any(0).double().mean())
            maps = [palette[values.numpy()] for values in (mask, *predicted)]
            rows.append((differ, [image.permute(1, 2, 0).numpy(), *maps]))
    chosen = sorted(rows, key=lambda row: -row[0])[:count]
    grid = np.concatenate([np.concatenate(panels, 1) for _, panels in chosen])
    return Image.fromarray((grid * 255).round().astype(np.uint8))


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
