import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from recast.lab.evaluation.class_metrics import ranked
from recast.lab.evaluation.image_values import ImageValues, over_seeds, read_images, write_images
from recast.lab.evaluation.intervals import PERCENT, POINTS, interval
from recast.lab.evaluation.stats import GROUPS, Compared, left_out, plain_mean
from recast.lab.folder.records import is_at_chance
from recast.papers.dense.segment.evaluation import STATISTICS

RANDOM = np.random.default_rng(3)


def columns(*values: np.ndarray) -> dict[tuple[str, str], np.ndarray]:
    return {(f"m{number}", "x"): value.reshape(len(value), -1) for number, value in enumerate(values)}


@pytest.mark.parametrize(("images", "right"), [(20, 0), (20, 20), (60, 3), (1000, 999)])
def test_the_interval_of_an_accuracy_is_wilsons(images: int, right: int) -> None:
    line = interval([[100.0] * right + [0.0] * (images - right)], PERCENT)
    expected = stats.binomtest(right, images).proportion_ci(method="wilson")
    assert (line.low, line.high) == pytest.approx((100 * expected.low, 100 * expected.high), abs=1e-4)


@pytest.mark.parametrize(("images", "won", "lost"), [(44, 0, 1), (30, 0, 7), (300, 20, 5), (20, 19, 1), (50, 0, 0)])
def test_the_interval_of_a_difference_of_accuracies_is_tangos(images: int, won: int, lost: int) -> None:
    """Tango 1998, eq. 6: at both ends the score is 1.96; q solves the quadratic equation of the likeliest table."""
    line = interval([[100.0] * won + [-100.0] * lost + [0.0] * (images - won - lost)], POINTS)
    for end in (line.low / 100, line.high / 100):
        b = -won - lost + (2 * images - won + lost) * end
        q = (math.sqrt(b * b + 8 * images * lost * end * (1 - end)) - b) / (4 * images)
        score = (won - lost - images * end) / math.sqrt(images * (2 * q + end * (1 - end)))
        assert abs(score) == pytest.approx(1.96, abs=1e-3)


@pytest.mark.parametrize(
    ("right", "classes", "images", "guesses"),
    [(128, 10, 1000, True), (129, 10, 1000, False), (5, 2, 8, True), (6, 2, 8, False), (0, 1, 8, False)],
)
def test_a_guess(right: int, classes: int, images: int, guesses: bool) -> None:
    assert is_at_chance(right / images, classes, images) == guesses


@pytest.mark.parametrize("seeds", [1, 2, 5])
def test_if_nothing_changed_the_interval_is_that_of_0_of_n(seeds: int) -> None:
    line = interval(np.zeros((seeds, 60)), POINTS)
    assert -line.low == line.high == pytest.approx(100 * 1.96**2 / (60 + 1.96**2), rel=1e-3)
    assert line.detectable > line.high


@pytest.mark.parametrize("values", [[[1.0]], [[2.0, 2.0]], [[2.0], [2.0]], [[0.0, math.nan]]])
def test_what_no_value_determines_is_infinite(values: list[list[float]]) -> None:
    assert interval(values).low == -math.inf
    assert interval(values).high == math.inf


@pytest.mark.parametrize(("count", "quantile"), [(2, 12.706), (3, 4.303), (31, 2.042), (61, 2.000)])
def test_a_mean_over_seeds(count: int, quantile: float) -> None:
    values = np.arange(count, dtype=float)
    line = interval(values[:, None])
    assert line.mean == values.mean()
    assert line.high - line.mean == pytest.approx(quantile * values.std(ddof=1) / math.sqrt(count), rel=1e-3)


def test_an_interval_over_seeds_and_images_adds_both() -> None:
    images, seeds = RANDOM.normal(0, 3, 400), np.array([[-1.0], [0.0], [1.5]])
    line = interval(images + seeds)  # no rest: the sources are apart
    of_images, of_seeds = (interval(each).high - interval(each).mean for each in ([images], seeds))
    assert line.high - line.mean == pytest.approx(math.hypot(of_images, of_seeds))
    assert interval([[100.0] * 10, [-100.0] * 10], POINTS).high == 100  # two seeds that disagree


def simulated(random: np.random.Generator, seeds: int, images: int, top1: float, moved: float) -> np.ndarray:
    """Differences in points of two equally good arms, which seeds move by a part of the images' difficulty."""
    difficulty, threshold = random.standard_normal(images), stats.norm.ppf(top1) * math.hypot(1, 0.5, moved)
    arms = [difficulty + random.normal(0, moved, (seeds, 1)) + random.normal(0, 0.5, (seeds, images)) for _ in range(2)]
    return 100.0 * ((arms[0] > -threshold).astype(int) - (arms[1] > -threshold))


@pytest.mark.parametrize(
    ("seeds", "images", "top1", "moved"),
    [
        *[(2, 1000, 0.5, 0.1), (2, 60, 0.98, 0.03), (3, 300, 0.9, 0.03), (3, 1000, 0.5, 0.1), (5, 60, 0.9, 0.03)],
        *[(5, 300, 0.9, 0.0), (10, 300, 0.5, 0.03), (1, 20, 0.96, 0.0), (1, 300, 0.9, 0.0)],
    ],
)
def test_intervals_contain_the_truth(seeds: int, images: int, top1: float, moved: float) -> None:
    """The settings in which earlier intervals claimed a difference in up to 20 % (studies/interval_coverage.py)."""
    random = np.random.default_rng([seeds, images])
    lines = [interval(simulated(random, seeds, images, top1, moved), POINTS) for _ in range(400)]
    assert np.mean([line.low <= 0 <= line.high for line in lines]) >= 0.925
    assert np.mean([line.low > 0 for line in lines]) <= 0.045  # 0.03, and 0.008 is its standard error
    assert min(line.high - line.low for line in lines) > 0


def test_the_interval_is_not_merely_wide() -> None:
    random = np.random.default_rng(0)
    lines = [interval(simulated(random, 5, 1000, 0.5, 0.0) + 3.0) for _ in range(100)]
    assert np.mean([line.low > 0 for line in lines]) > 0.7
    few = [interval(simulated(random, 10, 300, 0.9, 0.0), POINTS) for _ in range(50)]
    wide = [interval(simulated(random, 1, 300, 0.9, 0.0), POINTS) for _ in range(50)]
    assert np.mean([line.high - line.low for line in few]) < 0.6 * np.mean([line.high - line.low for line in wide])


def test_the_jackknife_of_a_metric_of_all_images_contains_the_truth() -> None:
    """AUROC and mean average precision of 60 images: percentiles of the bootstrap contained it in 0.82 to 0.92."""
    random, hits, differences = np.random.default_rng(1), [], []

    def pool(metric: str, values: np.ndarray, counts: np.ndarray) -> dict[str, np.ndarray]:
        ap, auroc = ranked(values[:, :2], values[:, 2:], counts)
        return {"map": 100 * ap.mean(1), "auroc": 100 * auroc.mean(1)}

    threshold = np.linspace(9, -9, 4001)
    true, false = stats.norm.sf(threshold - 1.5), stats.norm.sf(threshold)
    truth = {
        "auroc": 100 * stats.norm.cdf(1.5 / math.sqrt(2)),
        "map": 50 * sum(np.trapezoid(p * true / (p * true + (1 - p) * false), true) for p in (0.4, 0.2)),
    }
    for _ in range(100):
        positive = random.random((60, 2)) < [0.4, 0.2]
        arms = {
            (arm, "x"): np.concatenate([random.standard_normal((60, 2)) + 1.5 * positive, positive], 1) for arm in "ab"
        }
        compared = Compared(arms, pool=pool)
        for metric, value in truth.items():
            low, high = compared.interval("a", metric)
            assert low is not None
            assert high is not None
            hits.append(0 <= low <= value <= high <= 100)
            line = compared.difference("a", "b", metric)
            differences.append(line.low <= 0 <= line.high)
    assert np.mean(hits) > 0.91
    assert np.mean(differences) > 0.92


def test_the_jackknife_of_a_mean_is_that_mean_s_interval() -> None:
    values = RANDOM.gamma(2.0, size=300)
    mean = Compared(columns(values), {"x": plain_mean})
    same = Compared(columns(values), {"x": lambda means: means[..., 0] * 1.0})
    assert same.interval("m0", "x") == pytest.approx(mean.interval("m0", "x"))
    freedom = 2 * 299 / (stats.kurtosis(values) + 2)
    expected = stats.t.interval(0.95, freedom, values.mean(), stats.sem(values))
    assert mean.interval("m0", "x") == pytest.approx(expected, rel=1e-6)


def test_images_are_left_out_once_alone_or_in_groups() -> None:
    assert np.array_equal(np.sort(left_out(20).argmin(1)), np.arange(20))
    groups = 1 - left_out(1300)
    assert groups.shape == (GROUPS, 1300)
    assert (groups.sum(0) == 1).all()
    assert set(groups.sum(1)) == {2, 3}


def test_a_class_of_two_images_has_a_wide_interval_of_one_image_none() -> None:
    counts = np.zeros((12, 3))  # labelled, predicted, both
    counts[:2] = [[0.5, 0.4, 0.3], [0.5, 0.5, 0.2]]
    low, high = Compared({("m0", "iou/dog"): counts}, STATISTICS).interval("m0", "iou/dog")
    assert low is not None
    assert high is not None
    assert low < 25
    assert high > 50  # of either image alone
    counts[1] = 0
    assert Compared({("m0", "iou/dog"): counts}, STATISTICS).interval("m0", "iou/dog") == (None, None)


def test_seeds_share_their_images(tmp_path: Path) -> None:
    right = 100.0 * (RANDOM.random((3, 200)) < 0.9)
    runs = [ImageValues(values, True) for values in right]
    line = over_seeds(runs, [ImageValues(np.full(200, 100.0), True)] * 3)
    assert line == interval(right - 100, POINTS)
    assert over_seeds([*runs, ImageValues(right[0, :99], True)]) is None  # other images

    path = tmp_path / "scores" / "images.npz"
    keys = [("clean", "top1", "recast"), ("basic", "top1/mean", "recast")]
    assert read_images(path) == {}
    write_images(path, dict.fromkeys(keys, runs[0]), {"clean", "basic"})
    write_images(path, {keys[0]: runs[1], keys[1]: runs[1]}, {"clean"})
    read = read_images(path)
    assert [np.array_equal(read[key].values, right[place]) for key, place in zip(keys, (1, 0), strict=True)] == [
        True
    ] * 2
    assert read[keys[0]].is_percentage
    path.write_bytes(b"no zip")
    with pytest.warns(UserWarning, match="damaged"):
        assert read_images(path) == {}
