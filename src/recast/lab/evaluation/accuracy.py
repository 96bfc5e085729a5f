"""Accuracy on unchanged images (suite `clean`), at other sizes (`resolution`) and filtered (`frequency`)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from recast.errors import RecastError, SizeError, first_line
from recast.lab.config.evaluation import parse_size
from recast.lab.data.datasets import ImageFiles, ImageTensors
from recast.lab.evaluation.context import Batch, Context, NotMeasured, Score, Source
from recast.lab.evaluation.derived_images import ResizedImages

BINS = 15
"""Number of bins of the expected calibration error."""
FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5)
"""Default sizes, relative to that of the data."""
Band = Literal["low", "high"]
RADII = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
"""Radii in units of π; the corners of the spectrum are at √2."""


def score_top(batch: Batch) -> Iterator[Score]:
    """Score top1, and top5 for six classes or more, among the classes of the source."""
    for name in batch.models:
        yield Score(name, "top1", batch.is_correct(name))
        if batch.logits(name).shape[1] >= 6:
            yield Score(name, "top5", batch.is_correct(name, k=5))


def score_part(batch: Batch) -> Iterator[Score]:
    """Score top1/PART, such as top1/gaussian_noise/1."""
    return batch.top1(f"top1/{batch.source.part}")


def score_clean(batch: Batch) -> Iterator[Score]:
    """Score top1, top5, loss (cross-entropy) and ece."""
    yield from score_top(batch)
    for name in batch.models:
        logits = batch.logits(name)
        yield Score(name, "loss", F.cross_entropy(logits.double(), batch.labels, reduction="none"))
        yield Score(name, "ece", calibration_gaps(logits, batch.labels))


def calibration_gaps(logits: Tensor, labels: Tensor) -> Tensor:
    """Return (B, 15): correct − confidence in the column of the confidence's bin, 0 elsewhere.

    The bins are ((b − 1)/15, b/15] (Guo et al. 2017, arXiv:1706.04599).
    """
    confidence, prediction = logits.double().softmax(1).max(1)
    gap = (prediction == labels).double() - confidence
    bins = (confidence * BINS).ceil().long().sub(1).clamp(0, BINS - 1)
    return torch.zeros(len(labels), BINS, dtype=torch.float64, device=logits.device).scatter_(
        1, bins[:, None], gap[:, None]
    )


def expected_calibration_error(means: np.ndarray) -> np.ndarray:
    """Return the ECE in percent: 100 Σ_b |Σ_{i in b} (correctᵢ − confidenceᵢ)| / n (Guo et al. 2017, Eq. 3)."""
    return 100 * np.abs(means).sum(axis=-1)


def default_sizes(side: int) -> tuple[tuple[int, int], ...]:
    """Return half to one and a half of a side in multiples of 32 (8 below 128, 4 below 32), and the side."""
    multiple = 32 if side >= 128 else 8 if side >= 32 else 4
    sides = {max(multiple, multiple * round(factor * side / multiple)) for factor in FACTORS if factor != 1}
    return tuple((each, each) for each in sorted({*sides, side}))


def sources_resolution(context: Context) -> list[Source]:
    """Return the validation images at each of options.sizes (T-CNN, d'Ascoli et al. 2021, Fig. 7).

    Images are opened again for each size. The crop keeps the same share of an image at all sizes: a larger size shows
    the same part of the image in more pixels.
    """
    images = context.data.val
    if not isinstance(images, ImageFiles | ImageTensors):
        raise NotMeasured(f"resolution requires images with a class each, {context.data.name} has others")
    sizes = tuple(dict.fromkeys(parse_size(size) for size in context.options.sizes or ()))
    return [
        Source(ResizedImages(images, (height, width)), f"{height}x{width}")
        for height, width in sizes or default_sizes(images.img_size)
    ]


def score_resolution(batch: Batch) -> Iterator[Score]:
    """Score top1@HxW; a model that does not support a size is skipped with one warning."""
    size = batch.source.part
    refused = batch.context.store.setdefault("refused sizes", set())
    for name in batch.models:
        if (name, size) in refused:
            continue
        try:
            correct = batch.is_correct(name)
        except torch.OutOfMemoryError:
            raise
        except (AssertionError, RuntimeError, ValueError, IndexError) as error:  # networks raise different errors
            is_another_mistake = isinstance(error, RecastError) and not isinstance(error, SizeError)
            if is_another_mistake or batch.first > 0:  # the earlier batches succeeded
                raise
            refused.add((name, size))
            message = f"{name} does not support images of {size}, skipping it there: {first_line(error)}"
            warnings.warn(message, stacklevel=2)
            continue
        yield Score(name, f"top1@{size}", correct)


def keep_frequencies(images: Tensor, band: Band, radius: float) -> Tensor:
    """Keep frequencies of pixels (B, C, H, W) up to `radius`·π (low) or above it (high), and each channel's mean:

        x ← F⁻¹[M · F[x]]      low: M = 1 where ρ ≤ radius, high: M = 1 where ρ > radius or ρ = 0, else 0
        ρ² = (2n/H)² + (2m/W)²      of bin (n, m), −H/2 ≤ n < H/2: 1 is π, in any direction and at any height and width

    The high-passed image keeps the mean (ρ = 0) so that its pixels do not lie around 0: low + high = image + mean.
    Values outside [0, 1] are not clipped, which would bring other frequencies back. Borders wrap around, as in every
    discrete Fourier transform.

    Raises `RecastError` for another band, and a radius that is negative or NaN.

    Example:
        >>> images = torch.rand(2, 3, 16, 16, dtype=torch.float64)
        >>> low, high = (recast.lab.evaluation.accuracy.keep_frequencies(images, band, 0.5) for band in ("low", "high"))
        >>> (low + high).allclose(images + images.mean((2, 3), keepdim=True))
        True
    """
    if band not in get_args(Band):
        raise RecastError(f"band must be one of {get_args(Band)}, got {band!r}")
    if not radius >= 0:
        raise RecastError(f"radius must be >= 0 (in units of π), got {radius}")
    height, width = images.shape[-2:]
    pixels = images.to(torch.promote_types(images.dtype, torch.float32))
    rows = 2 * torch.fft.fftfreq(height, device=pixels.device)
    columns = 2 * torch.fft.rfftfreq(width, device=pixels.device)
    distance = (rows[:, None].square() + columns.square()).sqrt()
    # 1e-6: bins on the circle belong to it whatever the rounding
    mask = distance <= radius + 1e-6 if band == "low" else (distance > radius + 1e-6) | (distance == 0)
    spectrum = torch.fft.rfft2(pixels) * mask
    return torch.fft.irfft2(spectrum, s=(height, width)).to(images.dtype)


def score_frequency(batch: Batch) -> Iterator[Score]:
    """Score top-1 as low@F and high@F for F of `RADII`: images with only frequencies up to, or above, F·π."""
    for band in get_args(Band):
        for radius in RADII:
            yield from batch.top1(f"{band}@{radius:g}", keep_frequencies(batch.images, band, radius))
