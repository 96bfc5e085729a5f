"""Intervals for means over seeds and for paired predictions. Imports no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return (mean, low, high) of a 95 % interval over independent values: mean ± t·s/√n, infinite for one value.

    t is the 97.5 % quantile of Student's distribution with n − 1 degrees of freedom, s the sample standard deviation.
    """
    from scipy.special import stdtrit

    mean = statistics.mean(values)
    if len(values) < 2:
        return mean, -math.inf, math.inf
    half = float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def paired_interval(differences: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Return (mean, low, high) of a 95 % interval over seeds and images: mean ± t·SE of paired differences.

    Args:
        differences: (seeds, images), each −100, 0 or 100 points.

        SE² = s²_seeds / S + s²_images / N      s²_seeds: variance over seeds of the means over images
                                                s²_images: variance over images of the means over seeds

    The second term contains part of the first, so the interval is rather too wide. SE is at least one image. t is from
    Student's distribution with the degrees of freedom of Welch and Satterthwaite. One seed gives an interval over the
    images.
    """
    from scipy.special import stdtrit

    seeds, images = len(differences), len(differences[0])
    of_images = [statistics.mean(values) for values in zip(*differences, strict=True)]
    of_seeds = [statistics.mean(values) for values in differences]
    from_images = max(statistics.variance(of_images) / images, (100 / images) ** 2)
    from_seeds = statistics.variance(of_seeds) / seeds if seeds > 1 else 0.0
    error = from_images + from_seeds
    freedom = error**2 / (from_images**2 / (images - 1) + from_seeds**2 / max(1, seeds - 1))
    mean, half = statistics.mean(of_seeds), float(stdtrit(freedom, 0.975)) * math.sqrt(error)
    return mean, mean - half, mean + half
