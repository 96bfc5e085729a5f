import math

import numpy as np
import pytest
from scipy import stats

from recast.lab.evaluation.stats import Resampled, plain_mean
from recast.lab.statistics import mean_interval, paired_interval
from recast.papers.dense.segment.evaluation import STATISTICS

RANDOM = np.random.default_rng(3)


def columns(*values: np.ndarray) -> dict[tuple[str, str], np.ndarray]:
    return {(f"m{number}", "x"): value.reshape(len(value), -1) for number, value in enumerate(values)}


def bootstrap(values: np.ndarray) -> tuple[float, float]:
    return stats.bootstrap((values,), np.mean, method="percentile", n_resamples=4000, rng=5).confidence_interval


def test_the_interval_is_scipys() -> None:
    values = RANDOM.gamma(2.0, size=300)
    first, same, second = (
        Resampled(columns(values), {"x": plain_mean}, seed).interval("m0", "x") for seed in (1, 1, 2)
    )
    assert first == same != second
    assert first == pytest.approx(tuple(bootstrap(values)), abs=0.02)


def test_the_paired_difference_is_scipys_and_narrower_than_the_unpaired_one() -> None:
    a = (RANDOM.random(500) < 0.7).astype(float)
    b = np.where(RANDOM.random(500) < 0.05, 1 - a, a)  # differs on 5 % of the images
    resampled = Resampled(columns(a, b), {}, seed=0)
    value, low, high = resampled.difference("m0", "m1", "x")
    assert value == pytest.approx(100 * (a - b).mean())
    assert (low, high) == pytest.approx([100 * end for end in bootstrap(a - b)], abs=0.5)
    first, second = resampled.interval("m0", "x"), resampled.interval("m1", "x")
    assert high - low < 0.6 * np.hypot(first[1] - first[0], second[1] - second[0])


def test_draws_without_a_class_leave_the_interval_of_the_others() -> None:
    counts = np.zeros((12, 3))  # labelled, predicted, both: two images hold the class
    counts[:2] = [[0.5, 0.4, 0.3], [0.5, 0.5, 0.2]]
    resampled = Resampled({("m0", "iou/dog"): counts}, STATISTICS, seed=0)
    assert np.isnan(resampled.resamples["m0", "iou/dog"]).sum() > 50
    assert resampled.interval("m0", "iou/dog") == pytest.approx((25.0, 50.0))  # of either image alone


def test_there_is_no_interval_where_all_images_agree() -> None:
    resampled = Resampled(columns(np.zeros(300), np.ones(300)), {}, seed=0)
    assert resampled.interval("m0", "x") == resampled.interval("m1", "x") == (None, None)
    assert resampled.difference("m1", "m0", "x") == (100.0, 100.0, 100.0)


@pytest.mark.parametrize(("count", "quantile"), [(2, 12.706), (3, 4.303), (31, 2.042), (61, 2.000)])
def test_a_mean_over_seeds(count: int, quantile: float) -> None:
    values = [float(value) for value in range(count)]
    mean, low, high = mean_interval(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    assert (low + high) / 2 == pytest.approx(mean)
    assert high - mean == pytest.approx(quantile * deviation / math.sqrt(count), rel=1e-3)
    assert mean_interval([1.0]) == (1.0, -math.inf, math.inf)


def test_an_interval_over_seeds_and_images() -> None:
    values = [[100.0, 0.0, 0.0, 0.0], [100.0, 0.0, -100.0, 100.0]]
    # images: means 100, 0, −50, 50, variance 12500/3; seeds: 25, 25, variance 0
    mean, low, high = paired_interval(values)
    assert mean == 25
    assert high - 25 == pytest.approx(3.182446 * (4166.667 / 4) ** 0.5, rel=1e-5) == 25 - low
    assert paired_interval([[0.0] * 50])[2] > 0  # no image changed: one might have
    assert paired_interval([[100.0] * 10, [-100.0] * 10])[2] > 500  # two seeds that disagree
