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


def net_interval(won: int, lost: int, images: int) -> tuple[float, float]:
    """95 % interval of 100·(won − lost)/images in points: Wald's for paired shares, with a pseudo-image on either side.

    The half image added to each of won, lost (and the rest) is Agresti and Min's adjustment (2005): it keeps the
    interval honest where hardly any image changed.
    """
    more, b, c = images + 2, won + 0.5, lost + 0.5
    centre = (b - c) / more
    half = 1.959964 * math.sqrt(max(b + c - (b - c) ** 2 / more, 0)) / more
    return 100 * (centre - half), 100 * (centre + half)


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
