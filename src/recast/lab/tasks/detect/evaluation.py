"""How well objects are found: average precision as COCO computes it (suite `detection`), of boxes and of masks.

Detections of an image, of every class the `MOST` surest, are matched to its objects class by class for every IoU of
0.50, 0.55, ..., 0.95 and every range of areas; what matches a crowd, or lies outside the range, does not count (Lin et
al. 2014, and the code of its benchmark, whose numbers these are). Precision at 101 values of recall, made falling, is
averaged. Of every image the matches are kept; the bootstrap draws images and accumulates again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchvision.ops import box_area, box_iou

from recast.errors import RecastError
from recast.lab.evaluation.context import Batch, Context, Score
from recast.lab.evaluation.stats import known_mean
from recast.lab.tasks.detect.networks import check_detections
from recast.lab.tasks.predictions import class_colours

MOST = 100
IOUS = np.linspace(0.5, 0.95, 10)
AREAS = {"": (0.0, 1e10), "_small": (0.0, 32.0**2), "_medium": (32.0**2, 96.0**2), "_large": (96.0**2, 1e10)}
"""Ranges in pixels of the image as it is on the disk."""
RECALLS = np.linspace(0, 1, 101)
PREFIXES = {"boxes": "", "masks": "mask_"}
_BITS = 2 ** np.arange(len(IOUS))
WIDTH = 2 + 2 * len(AREAS)
"""Numbers that are kept of a detection."""
SURE, ENLARGED = 0.5, 256
"""Score from which on a detection is drawn; side in pixels up to which small images are enlarged for boxes."""


def found_objects(context: Context, name: str, images: Tensor) -> list[dict[str, Tensor]]:
    """Return boxes, labels and scores of each image, without gradient; RecastError if they are not."""
    with torch.no_grad():
        outputs = context.models[name](images)
    check_detections(outputs, len(images), f"model {name!r}")
    if not all(one[key].isfinite().all() for one in outputs for key in ("boxes", "scores")):
        raise RecastError(f"model {name!r} gives NaN or infinite boxes on images of {context.data.name}")
    return list(outputs)


def image_scores(found: Mapping[str, Tensor], objects: Mapping[str, Tensor], classes: int, what: str) -> np.ndarray:
    """What is kept of an image, (4 · classes + 10 · detections,): how many objects of each class there are in each
    range of areas; then of every detection its score, class (from 1; 0: none, as in a row filled up with zeros) and,
    for each range, at which IoUs it matched and at which it does not count, a bit an IoU."""
    order = found["scores"].argsort(descending=True, stable=True).cpu()
    labels = found["labels"].cpu()[order]
    order = order[(labels[:, None] == labels).tril().sum(1) <= MOST]
    score, label = (found[name].cpu()[order].double().numpy() for name in ("scores", "labels"))
    truth, crowd = objects["labels"].cpu().numpy(), objects["crowd"].cpu().numpy()
    area, scale = objects["area"].cpu().numpy(), float(objects["scale"])
    overlap, own_area = overlaps(found[what].cpu()[order], objects[what].cpu(), crowd, what)
    own_area = own_area / scale**2
    kept = np.zeros((len(order), WIDTH))
    kept[:, 0], kept[:, 1] = score, label
    counts = np.zeros((len(AREAS), classes))
    for number, (low, high) in enumerate(AREAS.values()):
        ignored = crowd | (area < low) | (area > high)
        outside = (own_area < low) | (own_area > high)
        for one in np.unique(np.concatenate([label, truth])):
            ours, theirs = np.flatnonzero(label == one), np.flatnonzero(truth == one)
            theirs = theirs[np.argsort(ignored[theirs], kind="stable")]  # what counts comes first
            matched, free = _match(overlap[np.ix_(ours, theirs)], ignored[theirs], crowd[theirs])
            free |= ~matched & outside[ours, None]
            kept[ours, 2 + 2 * number], kept[ours, 3 + 2 * number] = matched @ _BITS, free @ _BITS
            if 1 <= one <= classes:
                counts[number, int(one) - 1] = (~ignored[theirs]).sum()
    return np.concatenate([counts.ravel(), kept.ravel()])


def overlaps(found: Tensor, objects: Tensor, crowd: np.ndarray, what: str) -> tuple[np.ndarray, np.ndarray]:
    """IoU (detections, objects), of a crowd the share of the detection in it; and the detections' areas."""
    if what == "boxes":
        found, objects = found.double(), objects.double()
        iou, own, theirs = (one.numpy() for one in (box_iou(found, objects), box_area(found), box_area(objects)))
        both = iou * (own[:, None] + theirs) / (1 + iou)
    else:
        flat = [(one > 0.5).flatten(1).float() for one in (found, objects)]
        both = (flat[0] @ flat[1].T).double().numpy()
        own, theirs = (one.sum(1).double().numpy() for one in flat)
    whole = np.where(crowd, own[:, None], own[:, None] + theirs - both)
    return np.divide(both, whole, out=np.zeros_like(both), where=whole > 0), own


def _match(overlap: np.ndarray, ignored: np.ndarray, crowd: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(detections, IoUs) bool: matched, and matched to what does not count. One after the other each detection takes
    the best object that is left; one that counts goes before one that does not."""
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
    """(draws, areas, IoUs, classes) in percent, of the images' scores (n, k), where image i was drawn images[draw, i]
    times; NaN for a class without objects."""
    counts = len(AREAS) * classes
    found = scores[:, counts:].reshape(len(scores), -1, WIDTH)
    objects = (images @ scores[:, :counts]).reshape(len(images), len(AREAS), classes)
    result = np.full((len(images), len(AREAS), len(IOUS), classes), np.nan)
    for one in range(classes):
        which, slot = np.nonzero(found[:, :, 1] == one + 1)
        kept = found[which, slot]
        order = np.argsort(-kept[:, 0], kind="stable")
        kept, times = kept[order], images[:, which[order]]
        for number in range(len(AREAS)):
            there = objects[:, number, one]
            matched, free = (kept[:, 2 + 2 * number + i].astype(np.int64)[:, None] & _BITS > 0 for i in range(2))
            for level in range(len(IOUS)):
                counted = ~free[:, level]
                right = np.cumsum(times[:, counted] * matched[counted, level], axis=1)
                said = np.cumsum(times[:, counted], axis=1)
                result[:, number, level, one] = _precision(right, said, there)
    return 100 * result


def _precision(right: np.ndarray, said: np.ndarray, there: np.ndarray) -> np.ndarray:
    """(draws,): mean precision over `RECALLS`, of counts (draws, detections) from the surest on."""
    precision = right / np.maximum(said, np.spacing(1))
    precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    result = np.full(len(right), np.nan)
    for draw in np.flatnonzero(there > 0):
        places = np.searchsorted(right[draw] / there[draw], RECALLS, side="left")
        places = places[places < right.shape[1]]
        result[draw] = precision[draw, places].sum() / len(RECALLS)
    return result


def summarised(found: np.ndarray, classes: Sequence[str], kinds: Mapping[str, Sequence[str]]) -> dict[str, np.ndarray]:
    """`average_precisions` as metrics (draws,): ap, ap50, ap75, ap_small, ..., ap@KIND and ap/CLASS."""
    with np.errstate(invalid="ignore"):
        metrics = {"ap": found[:, 0], "ap50": found[:, 0, :1], "ap75": found[:, 0, 5:6]}
        metrics |= {f"ap{area}": found[:, number] for number, area in enumerate(AREAS) if area}
        for kind, members in kinds.items():
            metrics[f"ap@{kind}"] = found[:, 0][..., [classes.index(name) for name in members]]
        metrics |= {f"ap/{name}": found[:, 0, :, index] for index, name in enumerate(classes)}
        return {name: known_mean(values.reshape(len(found), -1)) for name, values in metrics.items()}


def score_detection(batch: Batch) -> Iterator[Score]:
    """`boxes` and, of networks that give masks, `masks`: `image_scores`."""
    context = batch.context
    for name in batch.models:
        found = found_objects(context, name, batch.images)
        for what in PREFIXES:
            if rows := scores_of(found, batch.labels, len(context.data.classes), what):
                yield Score(name, what, torch.from_numpy(stacked(rows)))


def scores_of(found: Sequence[Mapping[str, Tensor]], objects: Any, classes: int, what: str) -> list[np.ndarray]:
    """`image_scores` of every image; empty where there are no masks."""
    if not all(what in one for one in (*found, *objects)):
        return []
    return [image_scores(one, target, classes, what) for one, target in zip(found, objects, strict=True)]


def stacked(rows: Sequence[np.ndarray]) -> np.ndarray:
    """(images, k): rows as long as the longest, zeros behind."""
    return pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True).numpy()


def pool_detection(context: Context, metric: str, scores: np.ndarray, images: np.ndarray) -> dict[str, np.ndarray]:
    """The metrics of `boxes` or `masks`."""
    found = average_precisions(scores.astype(np.float64), images, len(context.data.classes))
    named = summarised(found, context.data.classes, context.data.kinds)
    return {f"{PREFIXES[metric]}{name}": values for name, values in named.items()}


def object_panels(batch: Batch) -> Iterator[tuple[float, list[np.ndarray]]]:
    """`Panels` of boxes and the masks in them; models differ by the pixels of classes that one alone sees."""
    classes = len(batch.context.data.classes)
    said = [found_objects(batch.context, name, batch.images) for name in batch.models]
    for image, truth, *predicted in zip(batch.images.cpu(), batch.labels, *said, strict=True):
        seen = []
        for one in predicted:
            covered = torch.zeros(classes + 1, *image.shape[1:], dtype=torch.bool)
            for box, label, _ in _sure(one):
                left, top, right, bottom = (round(side) for side in box)
                covered[label, top:bottom, left:right] = True
            seen.append(covered)
        differ = float(torch.stack([(one != seen[-1]).any(0) for one in seen[-2:]]).any(0).double().mean())
        yield differ, [_drawn(image, one, classes) for one in ({}, truth, *predicted)]


def _sure(found: Mapping[str, Tensor]) -> Iterator[tuple[list[float], int, Tensor | None]]:
    if not found:
        return
    masks = found.get("masks")
    for index, label in enumerate(found["labels"].tolist()):
        if "scores" not in found or found["scores"][index] >= SURE:
            mask = None if masks is None else masks[index].reshape(masks.shape[-2:]).cpu()
            yield found["boxes"][index].tolist(), label, mask


def _drawn(image: Tensor, found: Mapping[str, Tensor], classes: int) -> np.ndarray:
    """The image with boxes in the colours of their classes, and masks below them."""
    colours, pixels = class_colours(classes + 1), image.permute(1, 2, 0).double().numpy().copy()
    for _, label, mask in _sure(found):
        if mask is not None:
            pixels[mask.numpy() > 0.5] = 0.5 * pixels[mask.numpy() > 0.5] + 0.5 * colours[label]
    factor = max(1, ENLARGED // len(pixels))
    picture = Image.fromarray((pixels.repeat(factor, 0).repeat(factor, 1) * 255).round().astype(np.uint8))
    brush = ImageDraw.Draw(picture)
    for box, label, _ in _sure(found):
        brush.rectangle([side * factor for side in box], outline=tuple((colours[label] * 255).astype(int)), width=2)
    return np.asarray(picture) / 255
