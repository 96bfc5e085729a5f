"""Average precision as COCO computes it (suite `detection`, and in training), of boxes and of masks.

Detections of an image, the `MOST` surest of every class, are matched to its objects class by class for every IoU of
0.50, 0.55, ..., 0.95 and every range of areas. Matches with a crowd, and detections outside the range, do not count
(Lin et al. 2014, and the code of its benchmark, whose numbers these are). Precision at 101 values of recall, made
falling, is averaged. The matches of every image are stored; the bootstrap draws images and accumulates again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torchvision.ops import box_area, box_iou
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from recast.errors import RecastError
from recast.lab.data import Data
from recast.lab.data.seeding import seeded
from recast.lab.evaluation.context import Batch, Context, Score
from recast.lab.evaluation.evaluators import evaluates
from recast.lab.evaluation.stats import known_mean
from recast.lab.training.distributed import gathered_objects
from recast.papers.dense.detect.networks import check_detections, losing, total_loss
from recast.papers.dense.detect.objects import Objects
from recast.papers.dense.predictions import class_colours

MOST = 100
IOUS = np.linspace(0.5, 0.95, 10)
AREAS = {"": (0.0, 1e10), "_small": (0.0, 32.0**2), "_medium": (32.0**2, 96.0**2), "_large": (96.0**2, 1e10)}
"""Ranges in pixels of the image file."""
RECALLS = np.linspace(0, 1, 101)
PREFIXES = {"boxes": "", "masks": "mask_"}
_BITS = 2 ** np.arange(len(IOUS))
WIDTH = 2 + 2 * len(AREAS)
"""Numbers that are stored for a detection."""
SURE, ENLARGED = 0.5, 256
"""Lowest score of a detection that is drawn; side in pixels up to which small images are enlarged for boxes."""


def detections(context: Context, name: str, images: Tensor) -> list[dict[str, Tensor]]:
    """Return boxes, labels and scores of each image, without gradient; RecastError if they are not finite."""
    with torch.no_grad():
        outputs = context.models[name](images)
    check_detections(outputs, len(images), f"model {name!r}")
    if not all(each[key].isfinite().all() for each in outputs for key in ("boxes", "scores")):
        raise RecastError(f"model {name!r} gives NaN or infinite boxes on images of {context.data.name}")
    return list(outputs)


def image_scores(found: Mapping[str, Tensor], objects: Mapping[str, Tensor], classes: int, what: str) -> np.ndarray:
    """Return the stored numbers of an image, (4 · classes + 10 · detections,).

    First the number of objects of each class in each range of areas. Then of every detection its score, class (from 1;
    0: none, as in a row filled up with zeros) and, for each range, at which IoUs it matched and at which it does not
    count, a bit an IoU.
    """
    order = found["scores"].argsort(descending=True, stable=True).cpu()
    labels = found["labels"].cpu()[order]
    order = order[(labels[:, None] == labels).tril().sum(1) <= MOST]
    score, label = (found[name].cpu()[order].double().numpy() for name in ("scores", "labels"))
    truth, crowd = objects["labels"].cpu().numpy(), objects["crowd"].cpu().numpy()
    area, scale = objects["area"].cpu().numpy(), float(objects["scale"])
    overlap, areas = overlaps(found[what].cpu()[order], objects[what].cpu(), crowd, what)
    areas = areas / scale**2
    rows = np.zeros((len(order), WIDTH))
    rows[:, 0], rows[:, 1] = score, label
    counts = np.zeros((len(AREAS), classes))
    for number, (low, high) in enumerate(AREAS.values()):
        ignored = crowd | (area < low) | (area > high)
        outside = (areas < low) | (areas > high)
        for value in np.unique(np.concatenate([label, truth])):
            ours, theirs = np.flatnonzero(label == value), np.flatnonzero(truth == value)
            theirs = theirs[np.argsort(ignored[theirs], kind="stable")]  # objects that count come first
            matched, free = _match(overlap[np.ix_(ours, theirs)], ignored[theirs], crowd[theirs])
            free |= ~matched & outside[ours, None]
            rows[ours, 2 + 2 * number], rows[ours, 3 + 2 * number] = matched @ _BITS, free @ _BITS
            if 1 <= value <= classes:
                counts[number, int(value) - 1] = (~ignored[theirs]).sum()
    return np.concatenate([counts.ravel(), rows.ravel()])


def overlaps(found: Tensor, objects: Tensor, crowd: np.ndarray, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Return IoU (detections, objects), for a crowd the share of the detection in it, and the detections' areas."""
    if what == "boxes":
        found, objects = found.double(), objects.double()
        iou, ours, theirs = (each.numpy() for each in (box_iou(found, objects), box_area(found), box_area(objects)))
        both = iou * (ours[:, None] + theirs) / (1 + iou)
    else:
        flat = [(each > 0.5).flatten(1).float() for each in (found, objects)]
        both = (flat[0] @ flat[1].T).double().numpy()
        ours, theirs = (each.sum(1).double().numpy() for each in flat)
    whole = np.where(crowd, ours[:, None], ours[:, None] + theirs - both)
    return np.divide(both, whole, out=np.zeros_like(both), where=whole > 0), ours


def _match(overlap: np.ndarray, ignored: np.ndarray, crowd: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (detections, IoUs) bool: matched, and matched to an object that does not count.

    Each detection in turn takes the best free object; objects that count come before others.
    """
    matched, free = (np.zeros((len(overlap), len(IOUS)), dtype=bool) for _ in range(2))
    for level, least in enumerate(IOUS):
        taken = np.zeros(len(ignored), dtype=bool)
        for number, row in enumerate(overlap):
            best, chosen = min(least, 1 - 1e-10), -1
            for index, value in enumerate(row):
                if taken[index] and not crowd[index]:
                    continue
                if chosen >= 0 and not ignored[chosen] and ignored[index]:
                    break
                if value >= best:
                    best, chosen = value, index
            if chosen >= 0:
                taken[chosen] = matched[number, level] = True
                free[number, level] = ignored[chosen]
    return matched, free


def average_precisions(scores: np.ndarray, images: np.ndarray, classes: int) -> np.ndarray:
    """Return (draws, areas, IoUs, classes) in percent; NaN for a class without objects.

    scores: (n, k) of the images; images: (draws, n), how often each was drawn.
    """
    counts = len(AREAS) * classes
    detected = scores[:, counts:].reshape(len(scores), -1, WIDTH)
    objects = (images @ scores[:, :counts]).reshape(len(images), len(AREAS), classes)
    result = np.full((len(images), len(AREAS), len(IOUS), classes), np.nan)
    for index in range(classes):
        which, slot = np.nonzero(detected[:, :, 1] == index + 1)
        rows = detected[which, slot]
        order = np.argsort(-rows[:, 0], kind="stable")
        rows, times = rows[order], images[:, which[order]]
        for number in range(len(AREAS)):
            matched, free = (rows[:, 2 + 2 * number + i].astype(np.int64)[:, None] & _BITS > 0 for i in range(2))
            for level in range(len(IOUS)):
                counted = ~free[:, level]
                right = np.cumsum(times[:, counted] * matched[counted, level], axis=1)
                total = np.cumsum(times[:, counted], axis=1)
                result[:, number, level, index] = _precision(right, total, objects[:, number, index])
    return 100 * result


def _precision(right: np.ndarray, total: np.ndarray, objects: np.ndarray) -> np.ndarray:
    """Return the mean precision over `RECALLS` (draws,) of counts (draws, detections), the surest detection first."""
    precision = right / np.maximum(total, np.spacing(1))
    precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    result = np.full(len(right), np.nan)
    for draw in np.flatnonzero(objects > 0):
        places = np.searchsorted(right[draw] / objects[draw], RECALLS, side="left")
        places = places[places < right.shape[1]]
        result[draw] = precision[draw, places].sum() / len(RECALLS)
    return result


def summarised(values: np.ndarray, classes: Sequence[str], kinds: Mapping[str, Sequence[str]]) -> dict[str, np.ndarray]:
    """Return `average_precisions` as metrics (draws,): ap, ap50, ap75, ap_small, ..., ap@KIND and ap/CLASS."""
    with np.errstate(invalid="ignore"):
        metrics = {"ap": values[:, 0], "ap50": values[:, 0, :1], "ap75": values[:, 0, 5:6]}
        metrics |= {f"ap{area}": values[:, number] for number, area in enumerate(AREAS) if area}
        for kind, members in kinds.items():
            metrics[f"ap@{kind}"] = values[:, 0][..., [classes.index(name) for name in members]]
        metrics |= {f"ap/{name}": values[:, 0, :, index] for index, name in enumerate(classes)}
        return {name: known_mean(each.reshape(len(values), -1)) for name, each in metrics.items()}


def scores_of(found: Sequence[Mapping[str, Tensor]], objects: Any, classes: int, what: str) -> list[np.ndarray]:
    """Return `image_scores` of every image; empty if there are no masks."""
    if not all(what in each for each in (*found, *objects)):
        return []
    return [image_scores(each, target, classes, what) for each, target in zip(found, objects, strict=True)]


def stacked(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return (images, k): rows filled up with zeros to the longest."""
    return pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True).numpy()


def pool_detection(context: Context, metric: str, scores: np.ndarray, images: np.ndarray) -> dict[str, np.ndarray]:
    """Return the metrics of `boxes` or `masks`."""
    precisions = average_precisions(scores.astype(np.float64), images, len(context.data.classes))
    named = summarised(precisions, context.data.classes, context.data.kinds)
    return {f"{PREFIXES[metric]}{name}": values for name, values in named.items()}


@evaluates("detection", pool=pool_detection)
def score_detection(batch: Batch) -> Iterator[Score]:
    """Yield `image_scores` of `boxes` and, for networks that give masks, of `masks`."""
    context = batch.context
    for name in batch.models:
        outputs = detections(context, name, batch.images)
        for what in PREFIXES:
            if rows := scores_of(outputs, batch.labels, len(context.data.classes), what):
                yield Score(name, what, torch.from_numpy(stacked(rows)))


class ObjectMeter:
    """Sum of a detector's losses, AP of the boxes at IoU 0.5 and AP, in percent, of the images of all processes."""

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
        rows = [row for part in gathered_objects(self.rows) for row in part]
        precisions = average_precisions(stacked(rows), np.ones((1, len(rows))), len(self.data.classes))
        aps = summarised(precisions, self.data.classes, {})
        ap50, ap = (float(np.nan_to_num(aps[name][0])) for name in ("ap50", "ap"))
        return ap50, ap


def object_panels(batch: Batch) -> Iterator[tuple[float, list[np.ndarray]]]:
    """Yield `Panels` of boxes and masks; models differ by the pixels in boxes of a class that only one detects."""
    classes = len(batch.context.data.classes)
    outputs = [map(_sure, detections(batch.context, name, batch.images)) for name in batch.models]
    for image, truth, *predicted in zip(batch.images.cpu(), map(_sure, batch.labels), *outputs, strict=True):
        covered = torch.zeros(len(predicted), classes + 1, *image.shape[1:], dtype=torch.bool)
        for number, each in enumerate(predicted):
            for box, label in zip(each["boxes"].tolist(), each["labels"], strict=True):
                left, top, right, bottom = map(round, box)
                covered[number, label, top:bottom, left:right] = True
        differ = float((covered[-2:] != covered[-1]).any(0).any(0).double().mean())
        yield differ, [_drawn(image, each, classes) for each in ({"labels": torch.empty(0)}, truth, *predicted)]


def _sure(objects: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what is drawn: objects, and detections with a score of `SURE` or more."""
    rows = objects["scores"] >= SURE if "scores" in objects else slice(None)
    return {name: objects[name][rows].cpu() for name in ("boxes", "labels", "masks") if name in objects}


def _drawn(image: Tensor, objects: Mapping[str, Tensor], classes: int) -> np.ndarray:
    """Return the image with boxes in the colours of their classes, and masks below them."""
    palette, factor = (class_colours(classes + 1) * 255).astype(int).tolist(), max(1, ENLARGED // image.shape[1])
    colours = [tuple(palette[label]) for label in objects["labels"].tolist()]
    if colours and "masks" in objects:
        masks = objects["masks"].reshape(-1, *image.shape[1:]) > 0.5
        image = draw_segmentation_masks(image, masks, 0.5, colours)
    image = image.repeat_interleave(factor, 1).repeat_interleave(factor, 2)
    if colours:
        image = draw_bounding_boxes(image, objects["boxes"] * factor, colors=colours, width=2)
    return image.permute(1, 2, 0).numpy()
