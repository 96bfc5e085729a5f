"""Intervals and tests for means over seeds and for paired predictions. Imports no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) of a 95 % interval over independent values: mean ± t·s/√n; infinite for a single one.

    t is the 97.5 % quantile of Student's distribution of n − 1 degrees of freedom, s the sample's standard deviation.
    """
    from scipy.special import stdtrit

    mean = statistics.mean(values)
    if len(values) < 2:
        return mean, -math.inf, math.inf
    half = float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def paired_interval(differences: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """(mean, low, high) of a 95 % interval over seeds and images: mean ± t·SE of paired differences (seeds, images).

    An image's difference is −100, 0 or 100 points.

        SE² = s²_seeds / S + s²_images / N      s²_seeds: variance over seeds of the means over images
                                                s²_images: variance over images of the means over seeds

    The second term holds part of the first: the interval errs on the wide side. It is never narrower than one image.
    t is of Student's distribution with the degrees of freedom of Welch and Satterthwaite. One seed gives an interval
    over images alone.
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


@dataclass(frozen=True)
class Agreement:
    """A model against another, image by image. `won` and `lost` are positions of images."""

    n: int
    same: int
    """Images that both put into one class, rightly or not."""
    both_right: int
    both_wrong: int
    won: tuple[int, ...]
    """Right now, wrong in the other."""
    lost: tuple[int, ...]
    """Wrong now, right in the other."""

    @classmethod
    def of(cls, labels: Sequence[Hashable], ours: Sequence[Hashable], theirs: Sequence[Hashable]) -> Agreement:
        """From the classes of the images and what either model says."""
        right = [(our == label, their == label) for label, our, their in zip(labels, ours, theirs, strict=True)]
        return cls(
            n=len(right),
            same=sum(our == their for our, their in zip(ours, theirs, strict=True)),
            both_right=right.count((True, True)),
            both_wrong=right.count((False, False)),
            won=tuple(place for place, found in enumerate(right) if found == (True, False)),
            lost=tuple(place for place, found in enumerate(right) if found == (False, True)),
        )

    @property
    def p_value(self) -> float:
        """McNemar's exact two-sided test: P(as uneven a split of won + lost fair coin tosses), at most 1."""
        from scipy.special import bdtr

        won, lost = len(self.won), len(self.lost)
        return min(1.0, 2 * float(bdtr(min(won, lost), won + lost, 0.5)))
