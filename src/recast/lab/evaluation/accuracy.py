"""Accuracy on unchanged images (suite `clean`), and at other sizes (`resolution`)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch.nn import functional as F

from recast.errors import RecastError, SizeError, first_line
from recast.lab.config.evaluation import parse_size
from recast.lab.data.datasets import ImageFiles, ImageTensors
from recast.lab.evaluation.context import Batch, Context, NotMeasured, Score, Source
from recast.lab.evaluation.derived_images import ResizedImages
from recast.lab.evaluation.evaluators import evaluates
from recast.lab.evaluation.stats import plain_mean

FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5)
"""Default sizes, relative to that of the data."""


def score_top(batch: Batch) -> Iterator[Score]:
    """Score top1, and top5 for six classes or more, among the classes of the source."""
    for name in batch.models:
        yield Score(name, "top1", batch.is_correct(name))
        if batch.logits(name).shape[1] >= 6:
            yield Score(name, "top5", batch.is_correct(name, k=5))


def score_part(batch: Batch) -> Iterator[Score]:
    """Score top1/PART, such as top1/gaussian_noise/1."""
    return batch.top1(f"top1/{batch.source.part}")


@evaluates("clean", statistics={"loss": plain_mean})
def score_clean(batch: Batch) -> Iterator[Score]:
    """Score top1, top5 and loss (cross-entropy)."""
    yield from score_top(batch)
    for name in batch.models:
        yield Score(name, "loss", F.cross_entropy(batch.logits(name).double(), batch.labels, reduction="none"))


def default_sizes(side: int) -> tuple[tuple[int, int], ...]:
    """Return half to one and a half of a side in multiples of 32 (8 below 128, 4 below 32), and the side."""
    multiple = 32 if side >= 128 else 8 if side >= 32 else 4
    sides = {max(multiple, multiple * round(factor * side / multiple)) for factor in FACTORS if factor != 1}
    return tuple((length, length) for length in sorted({*sides, side}))


def sources_resolution(context: Context) -> list[Source]:
    """Return the validation images at each of options.sizes (T-CNN, d'Ascoli et al. 2021, Fig. 7).

    Images are opened again for each size. The crop keeps the same share of an image at all sizes: a larger size shows
    the same part of the image in more pixels.
    """
    images = context.data.val
    if not isinstance(images, ImageFiles | ImageTensors):
        raise NotMeasured(f"resolution requires images with one class each, which {context.data.name} does not have")
    sizes = tuple(dict.fromkeys(parse_size(size) for size in context.options.sizes or ()))
    return [
        Source(ResizedImages(images, (height, width)), f"{height}x{width}")
        for height, width in sizes or default_sizes(images.img_size)
    ]


@evaluates("resolution", sources=sources_resolution)
def score_resolution(batch: Batch) -> Iterator[Score]:
    """Score top1@HxW; a model that does not support a size is skipped with one warning."""
    size = batch.source.part
    refused = batch.context.store.setdefault("refused sizes", set())
    for name in batch.models:
        if (name, size) in refused:
            continue
        try:
            correct = batch.is_correct(name)
        except (AssertionError, RuntimeError, ValueError, IndexError) as error:  # networks raise different errors
            is_about_size = isinstance(error, SizeError) or not isinstance(error, RecastError | torch.OutOfMemoryError)
            if not is_about_size or batch.number >= batch.context.processes:  # the earlier batches succeeded
                raise
            refused.add((name, size))
            message = f"{name} does not support images of {size}; skipping this size: {first_line(error)}"
            warnings.warn(message, stacklevel=2)
            continue
        yield Score(name, f"top1@{size}", correct)
