"""How well pixels are classified: mIoU, mAcc, aAcc and boundary IoU (suite `segmentation`).

Of every image three counts a class are kept, of pixels that are labelled with it, predicted as it, and both; the
metrics are functions of their sums over all images, as in the benchmarks, and the bootstrap draws images. Boundary IoU
(Cheng et al. 2021) counts, of either map, only pixels near the edge of their class.

Shapes: images (B, 3, H, W), logits (B, classes, H, W).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from recast.errors import RecastError
from recast.lab.evaluation.context import Batch, Context, Score, Source
from recast.lab.evaluation.evaluators import evaluates
from recast.lab.evaluation.stats import Statistic, known_mean, ratio
from recast.papers.dense.predictions import class_colours
from recast.papers.dense.segment.networks import pixel_logits
from recast.papers.dense.segment.pairs import IGNORE, OUTSIDE, ImagePairs

Forward = Callable[[Tensor], Tensor]
"""Images → logits for every pixel."""
WIDTH = 0.02
"""Width of the inner boundary of a class, in diagonals of the image."""


def class_logits(context: Context, name: str, images: Tensor) -> Tensor:
    """Return logits (B, classes, H, W) without gradient, for every pixel of the images; RecastError if they are not."""
    with torch.no_grad():
        outputs = context.models[name](images)
    size = images.shape[2], images.shape[3]
    logits = pixel_logits(outputs, len(context.data.classes), size, f"model {name!r}")["out"]
    if not logits.isfinite().all():
        raise RecastError(f"model {name!r} gives NaN or infinite logits on images of {context.data.name}")
    return logits.float()


def pixel_counts(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return (B, 3, classes): the pixels labelled with a class, predicted as it, and both, without `IGNORE`.

    predicted and labels: (B, H, W).
    """
    known, counts = labels != IGNORE, []
    for which, values in ((known, labels), (predicted != IGNORE, predicted), (known & (predicted == labels), labels)):
        sums = torch.zeros(len(labels), classes, dtype=torch.float64, device=labels.device)
        counts.append(sums.scatter_add_(1, values.flatten(1).clamp(max=classes - 1), which.flatten(1).double()))
    return torch.stack(counts, 1)


def inner_boundary(labels: Tensor) -> Tensor:
    """Return labels (B, H, W) with `IGNORE` where all pixels less than d + 1 rows and columns away have the same class.

    A class keeps its mask without the mask eroded d times by 3 x 3 pixels, as in the paper's code. d is 2 % of the
    diagonal, at least 1; beyond the image's border, and on ignored pixels, there is no class.
    """
    d = max(1, round(WIDTH * math.hypot(*labels.shape[1:])))
    framed = F.pad(labels.float(), (1, 1, 1, 1), value=-1)
    both = torch.stack([framed, -framed], 1)
    largest = F.max_pool2d(F.max_pool2d(both, (2 * d + 1, 1), 1, (d, 0)), (1, 2 * d + 1), 1, (0, d))
    is_inside = largest[:, 0] == -largest[:, 1]
    return labels.masked_fill(is_inside[:, 1:-1, 1:-1], IGNORE)


def over_views(forward: Forward, images: Tensor, scales: Sequence[float], flip: bool) -> Tensor:
    """Return the mean class probabilities over scales and mirror images; for a single view its logits."""
    views = list(product(scales, (False, True) if flip else (False,)))
    outputs = []
    for scale, is_mirrored in views:
        sides = [max(1, round(side * scale)) for side in images.shape[2:]]
        view = images if scale == 1 else F.interpolate(images, sides, mode="bicubic", antialias=True).clamp(0, 1)
        logits = forward(view.flip(3)).flip(3) if is_mirrored else forward(view)
        if scale != 1:
            logits = F.interpolate(logits, images.shape[2:], mode="bilinear")
        outputs.append(logits if len(views) == 1 else logits.softmax(1))
    return sum(outputs[1:], outputs[0]) / len(outputs)


def sources_segmentation(context: Context) -> list[Source]:
    """Return the validation images: their middle squares, or all of them."""
    images = context.data.val
    if context.options.test_mode == "square" or not isinstance(images, ImagePairs):
        return [context.validation]
    return [Source(replace(images, is_whole=True))]


def _parts(batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images and masks of one size: the whole batch, or one after the other without its filling."""
    if batch.options.test_mode == "square":
        yield batch.images, batch.labels
        return
    for image, mask in zip(batch.images, batch.labels, strict=True):
        height, width = (int((mask != OUTSIDE).any(axis).sum()) for axis in (1, 0))
        yield image[None, :, :height, :width], mask[None, :height, :width]


def mean_iou(means: np.ndarray) -> np.ndarray:
    """Return 100 · mean of both/(labelled + predicted − both) over the classes that are labelled or predicted."""
    labelled, predicted, both = np.moveaxis(means.reshape(*means.shape[:-1], 3, -1), -2, 0)
    return 100 * known_mean(ratio(both, labelled + predicted - both))


def mean_accuracy(means: np.ndarray) -> np.ndarray:
    """Return 100 · mean of both/labelled over the labelled classes; that of the pixels for a single sum."""
    labelled, both = np.moveaxis(means.reshape(*means.shape[:-1], 2, -1), -2, 0)
    return 100 * known_mean(ratio(both, labelled))


STATISTICS: dict[str, Statistic] = dict.fromkeys(("miou", "boundary_iou", "iou"), mean_iou)
STATISTICS |= {"macc": mean_accuracy, "aacc": mean_accuracy}
OPTIONS = ("test_mode", "test_scales", "test_flip")


@evaluates("segmentation", sources=sources_segmentation, statistics=STATISTICS, uses=OPTIONS)
def score_segmentation(batch: Batch) -> Iterator[Score]:
    """Yield miou, macc, aacc, boundary_iou, and iou/CLASS."""
    context, options = batch.context, batch.options
    classes, side = context.data.classes, context.data.val.img_size
    for name in batch.models:
        forward, parts = partial(class_logits, context, name), []
        for images, masks in _parts(batch):
            predicted = over_views(forward, images, options.test_scales, options.test_flip).argmax(1)
            predicted = predicted.masked_fill(masks == IGNORE, IGNORE)
            maps = [(predicted, masks), (inner_boundary(predicted), inner_boundary(masks))]
            parts.append(torch.stack([pixel_counts(*pair, len(classes)) for pair in maps]))
        counts, edges = torch.cat(parts, 1) / side**2
        for metric, those in (("miou", counts), ("boundary_iou", edges)):
            yield Score(name, metric, those.flatten(1))
            for kind, members in context.data.kinds.items():
                which = [classes.index(label) for label in members]
                yield Score(name, f"{metric}@{kind}", those[:, :, which].flatten(1))
        yield Score(name, "macc", counts[:, ::2].flatten(1))
        yield Score(name, "aacc", counts[:, ::2].sum(2))
        for index, label in enumerate(classes):
            yield Score(name, f"iou/{label}", counts[:, :, index])


def mask_panels(batch: Batch) -> Iterator[tuple[float, list[np.ndarray]]]:
    """Yield `Panels` of masks; ignored pixels are white."""
    colours = class_colours(len(batch.context.data.classes))
    palette = np.concatenate([np.zeros((1, 3)), colours[1:], np.ones((IGNORE + 1 - len(colours), 3))])
    classes = torch.stack([class_logits(batch.context, name, batch.images).argmax(1) for name in batch.models], 1).cpu()
    for image, mask, predicted in zip(batch.images.cpu(), batch.labels.cpu(), classes, strict=True):
        differ = float((predicted[-1] != predicted[-2:]).any(0).double().mean())
        maps = [palette[values.numpy()] for values in (mask, *predicted)]
        yield differ, [image.permute(1, 2, 0).numpy(), *maps]
