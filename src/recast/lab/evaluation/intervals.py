"""The interval of a mean over seeds and images, of one arm or of a paired difference. Imports no torch.

A value x_si belongs to seed s and image i, both drawn at random (crossed random effects). Its mean x̄ varies with both:

    A = s²_seeds / S            variance over seeds of the means over images, S − 1 degrees of freedom
    B = s²_images / N           variance over images of the means over seeds
    E = s²_rest / (S N)         contained in A as well as in B

The interval over the images is the score interval of Tango (1998) for paired proportions, of Wilson (1927) for one
proportion: the mean m belongs to it if |x̄ − m| ≤ z √(s²(m) / N), z = 1.96 for 95 %, with the variance of the likeliest
distribution of mean m on the values in the sample and the ends of their range. The ends of differences are ±100 points,
so that the interval is that of 0 of N if no image changes sides, or ± the largest change if `ENOUGH` images changed.
Values without a range get x̄ ± t·√B, with the degrees of freedom of their variance by their kurtosis κ:
2 (N − 1) / (κ − 1), at most N − 1.

Let b be the distance of an end from x̄. The interval over both is

    x̄ ± max(b, √(b² (1 − (1 − c) E / B) + t²_{S−1} max(0, A − c E))),        c = (S − 2) / (S + 1)

The squares of the half-widths are added, with the degrees of freedom of each (c = 0: Banerjee 1960, Zou & Donner 2008):
Satterthwaite's approximation claims a difference too often, as it takes a small A of two or three seeds for a precise
one. E is known well from many images, so a part c of it needs no t: for normal values and every A and B ≥ E the
interval then contains the truth in 0.940 to 0.980, with two seeds in 0.950 to 0.993 (`studies/interval_coverage.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

POINTS = (-100.0, 100.0)
"""Range of the difference of two percentages of an image."""
PERCENT = (0.0, 100.0)
"""Range of the percentage of an image."""
ENOUGH = 20
"""Number of changed images from which a larger change than theirs is unlikely."""
POWER = 0.8
"""Probability with which the smallest detectable difference is shown."""


@dataclass(frozen=True)
class Interval:
    """A mean with its interval, infinite if the values do not determine one."""

    mean: float
    low: float
    high: float
    detectable: float
    """Smallest true difference that such a sample shows with a probability of 80 %."""


def interval(values: ArrayLike, ends: tuple[float, float] | None = None, confidence: float = 0.95) -> Interval:
    """Return the mean of values and its interval over seeds and images.

    Args:
        values: (seeds, images), such as differences of two arms on the same images. One seed gives the interval over
            the images only, of these networks. One image, or one value per run, gives the interval over the seeds.
        ends: lowest and highest value that an image can have: `POINTS`, `PERCENT`; None if there is no such value.
        confidence: share of such intervals that contain the truth.

    Returns:
        The `Interval`. Its width is never 0: it is infinite for a single value, and for equal values without `ends`.

    Example:
        >>> nothing_changed = interval([[0.0] * 100], POINTS)
        >>> round(nothing_changed.low, 1), round(nothing_changed.high, 1)
        (-3.7, 3.7)
        >>> three_seeds = interval([[1.0], [2.0], [3.0]])
        >>> round(three_seeds.low, 2), round(three_seeds.high, 2)
        (-0.48, 4.48)
    """
    from scipy.special import ndtri, stdtrit

    quantile = (1 + confidence) / 2
    x = np.asarray(values, dtype=float)
    seeds, images = x.shape
    of_images, of_seeds, mean = x.mean(0), x.mean(1), float(x.mean())
    if not np.isfinite(x).all():
        return Interval(mean, -math.inf, math.inf, math.inf)
    low, high = _over_images(of_images, ends, quantile)
    from_seeds, share = np.zeros(2), 1.0
    if seeds > 1:
        rest = 0.0
        if images == 1:
            low = high = mean
        elif (from_images := of_images.var(ddof=1) / images) > 0:
            residuals = x - of_images - of_seeds[:, None] + mean
            rest = (residuals**2).sum() / ((seeds - 1) * (images - 1) * seeds * images)
            share = max(0.0, 1 - 3 / (seeds + 1) * rest / from_images)
        beyond = max(0.0, of_seeds.var(ddof=1) / seeds - (seeds - 2) / (seeds + 1) * rest)
        from_seeds = stdtrit(seeds - 1, [quantile, POWER]) ** 2 * beyond
    squares = np.array([[mean - low], [high - mean]]) ** 2 * [1, (ndtri(POWER) / ndtri(quantile)) ** 2]
    (below, power), (above, _) = np.sqrt(np.maximum(squares, share * squares + from_seeds))
    if below + above == 0:
        below = above = power = math.inf
    low, high = mean - below, mean + above
    if ends is not None:
        low, high = max(low, ends[0]), min(high, ends[1])
    return Interval(mean, float(low), float(high), float((below + above) / 2 + power))


def _over_images(values: NDArray[np.float64], ends: tuple[float, float] | None, quantile: float) -> tuple[float, float]:
    """Return the interval of the mean of independent values."""
    from scipy.special import ndtri, stdtrit

    if ends is None:
        if len(values) < 2:
            return -math.inf, math.inf
        mean, deviation, most = float(values.mean()), float(values.std()), len(values) - 1
        if deviation == 0:
            return mean, mean
        kurtosis = float((((values - mean) / deviation) ** 4).mean())
        freedom = most / max(1.0, (kurtosis - 1) / 2)
        half = float(stdtrit(freedom, quantile)) * deviation / math.sqrt(most)
        return mean - half, mean + half
    if ends == POINTS and np.count_nonzero(values) >= ENOUGH:
        reach = float(np.abs(values).max())
        ends = -reach, reach
    unique, counts = np.unique((values - ends[0]) / (ends[1] - ends[0]), return_counts=True)
    below, above = _score_bounds(np.stack([1 - unique, unique]), counts, float(ndtri(quantile)))
    return ends[0] + (ends[1] - ends[0]) * (1 - below), ends[0] + (ends[1] - ends[0]) * above


def _score_bounds(values: NDArray[np.float64], counts: NDArray[np.int_], z: float) -> NDArray[np.float64]:
    """Return the upper ends (k,) of the score intervals for the means of values (k, n) in [0, 1].

    Among distributions on the values and 1, the likeliest one of a larger mean has probabilities ∝ counts / (1 − s·v),
    0 < s < 1. If 1 is not in the sample, means beyond s = 1 mix that of s = 1 with the value 1.
    """
    total, means = counts.sum(), values @ counts / counts.sum()
    least, most = np.zeros(len(values)), np.where(values.max(1) < 1, 2.0, 1.0)
    for _ in range(25):
        s = (least + most) / 2
        added = np.maximum(0, s - 1)
        weights = counts / (1 - np.minimum(s, 1)[:, None] * values)
        weights *= ((1 - added) / weights.sum(1))[:, None]
        centres = (weights * values).sum(1) + added
        variances = (weights * (values - centres[:, None]) ** 2).sum(1) + added * (1 - centres) ** 2
        is_inside = total * (centres - means) ** 2 <= z**2 * variances
        least, most = np.where(is_inside, s, least), np.where(is_inside, most, s)
    return centres
