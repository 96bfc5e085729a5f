"""Intervals and tests, against values of tables and of hand."""

from __future__ import annotations

import math

import pytest

from recast.lab.statistics import Agreement, mean_interval


@pytest.mark.parametrize(("count", "quantile"), [(2, 12.706), (3, 4.303), (31, 2.042), (61, 2.000)])
def test_a_mean_over_seeds(count: int, quantile: float) -> None:
    values = [float(value) for value in range(count)]
    mean, low, high = mean_interval(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    assert (low + high) / 2 == pytest.approx(mean)
    assert high - mean == pytest.approx(quantile * deviation / math.sqrt(count), rel=1e-3)
    assert mean_interval([1.0]) == (1.0, -math.inf, math.inf)


@pytest.mark.parametrize(
    ("won", "lost", "p"),
    [(0, 0, 1.0), (5, 5, 1.0), (1, 0, 1.0), (6, 0, 2 / 64), (1, 8, 2 * (1 + 9) / 512), (700, 600, 0.00599)],
)
def test_mcnemar(won: int, lost: int, p: float) -> None:
    assert Agreement(0, 0, 0, 0, tuple(range(won)), tuple(range(lost))).p_value == pytest.approx(p, rel=1e-2)
