"""Values, intervals and paired differences of per-image scores. NumPy only.

The value of a metric is f(m), m = 1/n Σᵢ sᵢ the mean of the scores (n, k) over images. The 95 % interval is the
percentile bootstrap over images (Efron & Tibshirani 1993, ch. 13): f of means of n images drawn with replacement, 2.5 %
to 97.5 %. All metrics and models share the draws: f(mᵃ) − f(mᵇ) gives the interval of a paired difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from recast.lab.records import Difference, Row
from recast.lab.suites import base

Statistic = Callable[[np.ndarray], np.ndarray]
"""(..., k) means → (...) values."""

COMPARED = (("recast", "finetuned"), ("recast", "parent"), ("finetuned", "parent"))
"""Pairs of arms: the second is subtracted from the first."""
RESAMPLES = 1000
LEVEL = 0.95
_CHUNK = 2**24
"""Number of counts in memory at a time."""
POOLED = 50
"""Number of draws that are pooled at a time."""

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


def draws(n: int, seed: int = 0, most: int = RESAMPLES) -> Iterator[np.ndarray]:
    """Yield the RESAMPLES draws in parts (draws, n): counts of n images drawn with replacement, by (seed, n) alone."""
    random = np.random.default_rng((seed, n))
    rows = max(1, min(most, _CHUNK // n))
    for begin in range(0, RESAMPLES, rows):
        size = min(rows, RESAMPLES - begin)
        images = random.integers(n, size=(size, n)) + n * np.arange(size)[:, None]
        counts = np.bincount(images.ravel(), minlength=size * n).reshape(size, n)  # faster than a multinomial draw
        yield counts.astype(np.float64)


def resampled_means(scores: np.ndarray, seed: int = 0) -> np.ndarray:
    """Return (RESAMPLES, columns): means of `scores` (n, columns) over n images drawn with replacement."""
    return np.concatenate([counts @ scores / len(scores) for counts in draws(len(scores), seed)])


def percentile_interval(values: np.ndarray) -> tuple[float, float]:
    """Return the middle 95 % of resampled values."""
    low, high = np.nanquantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


class Resampled:
    """Values of metrics of several models on the same images, and their resamples.

    scores: {(model, metric): (n, k)}, the same n; statistics: {metric: f}, for `iou/dog` that of `iou`; pool: for
    metrics that are not functions of a mean (average precision). NaN values (the IoU of an absent class) are dropped.
    """

    def __init__(
        self, scores: Mapping[tuple[str, str], np.ndarray], statistics: Mapping[str, Statistic], seed: int,
        pool: Pool | None = None,
    ) -> None:  # fmt: skip
        (self.n,) = {len(values) for values in scores.values()}
        self.values: dict[tuple[str, str], float] = {}
        self.resamples: dict[tuple[str, str], np.ndarray] = {}
        if pool is not None:
            for (model, metric), values in scores.items():
                centres = pool(metric, values, np.ones((1, self.n)))
                parts = [pool(metric, values, counts) for counts in draws(self.n, seed, POOLED)]
                for name, (value,) in centres.items():
                    if not np.isnan(value):
                        self.values[model, name] = float(value)
                        self.resamples[model, name] = np.concatenate([part[name] for part in parts])
            return
        columns = np.concatenate(list(scores.values()), axis=1).astype(np.float64)
        centre, means = columns.mean(axis=0), resampled_means(columns, seed)
        begin = 0
        for key, values in scores.items():
            end, statistic = begin + values.shape[1], statistics.get(base(key[1]), percentage)
            value = float(statistic(centre[begin:end]))
            if not np.isnan(value):
                self.values[key], self.resamples[key] = value, statistic(means[:, begin:end])
            begin = end

    def interval(self, model: str, metric: str) -> tuple[float, float] | tuple[None, None]:
        """Return the interval; None if all images have the same score: 0 of 300 does not exclude 1 of 300."""
        values = self.resamples[model, metric]
        return percentile_interval(values) if np.nanmax(values) > np.nanmin(values) else (None, None)

    def difference(self, model: str, against: str, metric: str) -> tuple[float, float, float]:
        """Return (value, low, high) of `model` − `against`."""
        a, b = (model, metric), (against, metric)
        return self.values[a] - self.values[b], *percentile_interval(self.resamples[a] - self.resamples[b])

    def rows(self, run: str, suite: str, dataset: str) -> list[Row]:
        """Return the values as rows."""
        return [
            Row(run, model, suite, dataset, metric, value, self.n, *self.interval(model, metric))
            for (model, metric), value in self.values.items()
        ]

    def differences(self, run: str, suite: str, dataset: str) -> list[Difference]:
        """Return the differences between arms."""
        return [
            Difference(run, model, other, suite, dataset, metric, *self.difference(model, other, metric), self.n)
            for model, other in COMPARED
            for metric in dict.fromkeys(metric for _, metric in self.values)
            if {(model, metric), (other, metric)} <= self.values.keys()
        ]
