"""Values, intervals and paired differences of per-image scores. NumPy only.

The value of a metric is θ = f(m), m = 1/n Σᵢ sᵢ the mean of the scores (n, k) over images, or a function of all images
together. Its 95 % interval is `lab.evaluation.intervals.interval` of what each image contributes: its score if f is a
percentage or a mean, else θ + (n − 1)(θ̄ − θ₍₋ᵢ₎), where θ₍₋ᵢ₎ leaves image i out and θ̄ is their mean (the jackknife:
Efron & Tibshirani 1993, ch. 11). Differences subtract the contributions to two arms image by image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from recast.lab.evaluation.image_values import ImageValues, over_seeds
from recast.lab.evaluation.intervals import Interval
from recast.lab.evaluation.suites import METRICS, base
from recast.lab.folder.records import Difference, Row

Statistic = Callable[[np.ndarray], np.ndarray]
"""(..., k) means → (...) values."""

COMPARED = (("recast", "finetuned"), ("recast", "parent"), ("finetuned", "parent"))
"""Pairs of arms: the second is subtracted from the first."""
GROUPS = 500
"""Images left out together, at random, are as many groups at most; only for metrics of all images together."""
POOLED = 50
"""Number of groups that are left out in turn at a time."""

Pool = Callable[[str, np.ndarray, np.ndarray], dict[str, np.ndarray]]
"""(metric, scores (n, k), counts of each image (draws, n)) → values (draws,) of further metrics."""


def percentage(means: np.ndarray) -> np.ndarray:
    """Return 100 m."""
    return 100 * means[..., 0]


def plain_mean(means: np.ndarray) -> np.ndarray:
    """Return m."""
    return means[..., 0]


def ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Return part / whole; NaN where the whole is 0."""
    return np.divide(part, whole, out=np.full(whole.shape, np.nan), where=whole > 0)


def known_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean over the last axis without NaN; NaN if all are."""
    return ratio(np.nansum(values, -1), (~np.isnan(values)).sum(-1))


def left_out(n: int) -> np.ndarray:
    """Return (groups, n): 0 for the images of a group, else 1. At most `GROUPS` random groups, by n alone."""
    groups = min(n, GROUPS)
    return (np.random.default_rng(n).permutation(n) % groups != np.arange(groups)[:, None]).astype(np.float64)


class Compared:
    """Values of metrics of several models on the same images, and what every image contributes to them.

    scores: {(model, metric): (n, k)}, the same n; statistics: {metric: f}, for `iou/dog` that of `iou`; pool: for
    metrics that are not functions of a mean (average precision). NaN values (the IoU of an absent class) are dropped.
    """

    def __init__(
        self,
        scores: Mapping[tuple[str, str], np.ndarray],
        statistics: Mapping[str, Statistic] = {},
        pool: Pool | None = None,
    ) -> None:
        (self.n,) = {len(values) for values in scores.values()}
        self.values: dict[tuple[str, str], float] = {}
        self.images: dict[tuple[str, str], ImageValues] = {}
        self.biases: dict[tuple[str, str], float] = {}
        """The jackknife's estimates for metrics that are no means."""
        for (model, metric), array in scores.items():
            if pool is None:
                self._add(model, metric, array.astype(np.float64), statistics.get(base(metric), percentage))
                continue
            counts = left_out(self.n)
            parts = [pool(metric, array, counts[at : at + POOLED]) for at in range(0, len(counts), POOLED)]
            for name, (value,) in pool(metric, array, np.ones((1, self.n))).items():
                if not math.isnan(value):
                    self._leave_out((model, name), float(value), np.concatenate([part[name] for part in parts]))

    def _add(self, model: str, metric: str, scores: np.ndarray, statistic: Statistic) -> None:
        value, key = float(statistic(scores.mean(0))), (model, metric)
        if math.isnan(value):
            return
        if statistic in (percentage, plain_mean):
            is_percentage = statistic is percentage and bool(0 <= scores.min() and scores.max() <= 1)
            self.values[key], self.images[key] = value, ImageValues(statistic(scores), is_percentage)
        else:
            left = statistic((self.n * scores.mean(0) - scores) / max(1, self.n - 1))
            self._leave_out(key, value, left)

    def _leave_out(self, key: tuple[str, str], value: float, left: np.ndarray) -> None:
        """Store a value and the contributions of images (n,), from the values without each."""
        self.values[key], self.biases[key] = value, (len(left) - 1) * (left.mean() - value)
        self.images[key] = ImageValues(value + (len(left) - 1) * (left.mean() - left), False)

    def interval(self, model: str, metric: str) -> tuple[float, float] | tuple[None, None]:
        """Return the interval over the images; None if the values do not determine one.

        That of a percentage that is no mean over images is symmetrical in its logit, around the value and around the
        value less its bias: average precision of few images is too high by an amount that is itself uncertain.
        """
        from scipy.special import expit, logit

        key = model, metric
        value, name = self.values[key], base(metric)
        line = over_seeds([self.images[key]])
        assert line is not None
        if not (math.isfinite(line.low) and math.isfinite(line.high)):
            return None, None
        if key not in self.biases or name not in METRICS or METRICS[name].unit != "%" or not 0 < value < 100:
            return line.low, line.high
        centres = np.array([value, min(max(value - self.biases[key], 50 / self.n), 100 - 50 / self.n)]) / 100
        half = (line.high - line.low) / 200 / (centres * (1 - centres))
        return 100 * float(expit(logit(centres) - half).min()), 100 * float(expit(logit(centres) + half).max())

    def difference(self, model: str, against: str, metric: str) -> Interval:
        """Return `model` − `against`, with its interval over the images."""
        a, b = (model, metric), (against, metric)
        line = over_seeds([self.images[a]], [self.images[b]])
        assert line is not None  # the same images
        return replace(line, mean=self.values[a] - self.values[b])

    def rows(self, run: str, suite: str, dataset: str) -> list[Row]:
        """Return the values as rows."""
        return [
            Row(run, model, suite, dataset, metric, value, self.n, *self.interval(model, metric))
            for (model, metric), value in self.values.items()
        ]

    def differences(self, run: str, suite: str, dataset: str) -> list[Difference]:
        """Return the differences between arms."""
        lines = [
            (model, other, metric, self.difference(model, other, metric))
            for model, other in COMPARED
            for metric in dict.fromkeys(metric for _, metric in self.values)
            if {(model, metric), (other, metric)} <= self.values.keys()
        ]
        return [
            Difference(run, model, other, suite, dataset, metric, line.mean, line.low, line.high, self.n)
            for model, other, metric, line in lines
        ]
