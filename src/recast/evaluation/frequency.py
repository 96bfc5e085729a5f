"""Suite `frequency`: accuracy on images of which only the low or only the high frequencies are left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor

from recast.errors import RecastError
from recast.evaluation.bench import Batch, Bench, Score, is_correct

Band = Literal["low", "high"]
RADII = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
"""In units of π; the corners of the spectrum are at √2."""


def keep_frequencies(images: Tensor, band: Band, radius: float) -> Tensor:
    """Pixels (B, C, H, W) with frequencies up to `radius`·π (low) or above it (high), and the mean of each channel:

        x ← F⁻¹[M · F[x]]      low: M = 1 where ρ ≤ radius, high: M = 1 where ρ > radius or ρ = 0, else 0
        ρ² = (2n/H)² + (2m/W)²      of bin (n, m), −H/2 ≤ n < H/2: 1 is π, in any direction and at any height and width

    The mean (ρ = 0) stays in the high-passed image too, else its pixels would lie around 0 instead of where they were:
    low + high = image + mean. What leaves [0, 1] is not cut off, for that would bring other frequencies back. The
    borders of an image meet, as they do in every discrete Fourier transform.

    Raises `RecastError` for another band, and a radius that is negative or NaN.
    """
    if band not in get_args(Band):
        raise RecastError(f"band must be one of {get_args(Band)}, got {band!r}")
    if not radius >= 0:
        raise RecastError(f"a radius is a number of 0 or more, in units of π, got {radius}")
    height, width = images.shape[-2:]
    pixels = images.to(torch.promote_types(images.dtype, torch.float32))
    rows = 2 * torch.fft.fftfreq(height, device=pixels.device)
    columns = 2 * torch.fft.rfftfreq(width, device=pixels.device)
    distance = (rows[:, None].square() + columns.square()).sqrt()
    # bins on the circle itself belong to it whatever the rounding
    kept = distance <= radius + 1e-6 if band == "low" else (distance > radius + 1e-6) | (distance == 0)
    spectrum = torch.fft.rfft2(pixels) * kept
    return torch.fft.irfft2(spectrum, s=(height, width)).to(images.dtype)


def score_frequency(bench: Bench, batch: Batch) -> Iterator[Score]:
    """top-1 as low@F and high@F, F of `RADII`: on images with only the frequencies up to, or above, F·π."""
    for band in get_args(Band):
        for radius in RADII:
            filtered = keep_frequencies(batch.images, band, radius)
            for name in bench.models:
                yield Score(name, f"{band}@{radius:g}", is_correct(bench.logits(name, filtered), batch.labels))
