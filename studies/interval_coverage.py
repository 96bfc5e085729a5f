"""Do the 95 % intervals contain the truth? Simulated arms whose true difference is known.

    nice -n 19 python studies/interval_coverage.py           # writes results/coverage.csv; a quarter of an hour
    python studies/interval_coverage.py --draws 30 --quick   # prints a few settings
    python studies/interval_coverage.py --trials             # writes results/coverage_trials.csv; two minutes

An image has a difficulty, an arm solves some images always (`always`, the spread of what is the same in every seed of
an arm), seeds move an arm (`spread`) and decide images at the border. An image is right where the sum is above a
threshold.
A row of the table is a method in a setting:

metric          top1, or one of all images together: auroc (one class against the others), map (of labels), miou, and
                of detections, up to 60 images, ap50 and ap (three classes, a detector that also errs)
seeds, images, top1, effect, spread, always: the setting; the effect in points, top1 that of the weaker arm in percent
method          interval: `lab.evaluation.intervals.interval`. Before it: bootstrap (percentiles, of `evaluate`), over
                seeds (t of the seeds' means, of `report`), Satterthwaite (both sources, of `try`)
truth           of the mean over `seeds and images`, or of these networks over the `images`; `one arm`: no difference
coverage        share of draws whose interval contains the truth: 0.95
yes             share of draws whose interval is above 0: 0.025 without an effect, the power with one
no_width        share of draws with an interval of width 0
width           its mean, in points

The rows of the metric `normal` are computed, for normal values of infinitely many images and every share of the seeds:
the lowest and the highest coverage.

coverage_trials.csv: the same arms as trials of `recast try`, which stop as soon as an interval decides:

yes, no, unclear   share of trials with this verdict
wrong              share with a yes without a gain, or a no with one of `HIDDEN` points or more
trained            mean number of seeds
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from multiprocessing import Pool
from typing import Any

import numpy as np
from evidence.csv_files import RESULTS, write
from scipy.special import gammaincinv, ndtr, ndtri, stdtrit

from recast.lab.evaluation.class_metrics import ranked
from recast.lab.evaluation.intervals import POINTS, interval
from recast.lab.evaluation.stats import Compared, known_mean
from recast.lab.trial.answer import HIDDEN, confidence, verdict
from recast.papers.dense.detect.evaluation import AREAS, IOUS, WIDTH, average_precisions, summarised
from recast.papers.dense.segment.evaluation import STATISTICS

SEEDS, IMAGES, TOP1, EFFECTS = (1, 2, 3, 5, 10), (20, 60, 300, 1000, 5000), (2.0, 50.0, 90.0, 99.0), (0.0, 1.0, 5.0)
MOVED = ((0.0, 0.0), (0.03, 0.4), (0.1, 0.4))
"""`spread` and `always`: nothing lasts and seeds only decide the border; gains vary by about 1 and by 4 points."""
DIFFICULTY, BORDER = 1.0, 0.4
DRAWS, PART = 300, 50
BOTH, OF_IMAGES, ONE_ARM = "seeds and images", "images", "one arm"
Ends = tuple[float, float]


@dataclass(frozen=True)
class Setting:
    """A simulated comparison."""

    seeds: int
    images: int
    top1: float
    effect: float
    spread: float
    always: float


def draw(random: np.random.Generator, setting: Setting, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Return differences in points (draws, seeds, images), and the true difference of the first networks (draws,)."""
    s, sizes = setting, (draws, setting.seeds, setting.images)
    fixed = math.hypot(DIFFICULTY, s.always, BORDER)
    difficulty = random.standard_normal((draws, 1, s.images), dtype=np.float32) * DIFFICULTY
    right, truth = [], []
    for top1 in (s.top1 + s.effect, s.top1):
        mean = float(ndtri(top1 / 100)) * math.hypot(fixed, s.spread)
        moved = mean + s.spread * random.standard_normal((draws, s.seeds, 1), dtype=np.float32)
        image = difficulty + s.always * random.standard_normal((draws, 1, s.images), dtype=np.float32)
        right.append(BORDER * random.standard_normal(sizes, dtype=np.float32) + image + moved > 0)
        truth.append(100 * ndtr(moved[:, 0, 0] / fixed))
    return 100.0 * (right[0].astype(np.int8) - right[1]), truth[0] - truth[1]


def bootstrap(points: np.ndarray, random: np.random.Generator) -> Ends:
    """Return the percentiles of 1,000 means of images drawn with replacement."""
    values, counts = np.unique(points.mean(0), return_counts=True)
    means = random.multinomial(len(points[0]), counts / counts.sum(), 1000) @ values / len(points[0])
    low, high = np.quantile(means, [0.025, 0.975])
    return low, high


def over_seeds(points: np.ndarray, random: np.random.Generator) -> Ends:
    """Return Student's interval of the seeds' means."""
    seeds = points.mean(1)
    half = float(stdtrit(len(seeds) - 1, 0.975)) * seeds.std(ddof=1) / math.sqrt(len(seeds))
    return seeds.mean() - half, seeds.mean() + half


def satterthwaite(points: np.ndarray, random: np.random.Generator) -> Ends:
    """Return mean ± t·√(variance over seeds + variance over images), by Satterthwaite's degrees of freedom."""
    seeds, images = points.shape
    from_images = max(points.mean(0).var(ddof=1) / images, (100 / images) ** 2)
    from_seeds = points.mean(1).var(ddof=1) / seeds if seeds > 1 else 0.0
    error = from_images + from_seeds
    freedom = error**2 / (from_images**2 / (images - 1) + from_seeds**2 / max(1, seeds - 1))
    half = float(stdtrit(freedom, 0.975)) * math.sqrt(error)
    return points.mean() - half, points.mean() + half


def present(points: np.ndarray, random: np.random.Generator) -> Ends:
    """Return the project's interval."""
    line = interval(points, POINTS)
    return line.low, line.high


Method = Callable[[np.ndarray, np.random.Generator], Ends]


def methods(seeds: int) -> list[tuple[str, Method, str]]:
    """Return name, method and what its interval is to cover."""
    if seeds == 1:
        rows = [("interval", present, OF_IMAGES), ("bootstrap", bootstrap, OF_IMAGES)]
        rows += [("Satterthwaite", satterthwaite, BOTH)]
        return rows
    return [("interval", present, BOTH), ("over seeds", over_seeds, BOTH), ("Satterthwaite", satterthwaite, BOTH)]


def summary(ends: np.ndarray, truth: np.ndarray) -> dict[str, str]:
    """Return the columns of a method from its intervals (draws, 2)."""
    low, high = ends.T
    values = {"coverage": ((low <= truth + 1e-9) & (truth - 1e-9 <= high)).mean(), "yes": (low > 1e-9).mean()}
    values |= {"no_width": (high - low < 1e-9).mean()}
    return {name: f"{value:.3f}" for name, value in values.items()} | {"width": f"{(high - low).mean():.2f}"}


def rows_of(setting: Setting, draws: int, only: str = "") -> list[dict[str, Any]]:
    """Return a row for every method in a setting; the draws depend on the setting alone."""
    random = np.random.default_rng([round(100 * value) for value in vars(setting).values()])
    chosen = [method for method in methods(setting.seeds) if only in ("", method[0])]
    ends: list[list[Ends]] = [[] for _ in chosen]
    truths = []
    for begin in range(0, draws, PART):
        points, truth = draw(random, setting, min(PART, draws - begin))
        truths.append(truth)
        for intervals, (_, method, _) in zip(ends, chosen, strict=True):
            intervals += [method(each, random) for each in points]
    of_networks = np.concatenate(truths)
    return [
        {
            "metric": "top1",
            **vars(setting),
            "method": name,
            "truth": truth,
            "draws": draws,
            **summary(np.array(intervals), of_networks if truth == OF_IMAGES else np.full(draws, setting.effect)),
        }
        for intervals, (name, _, truth) in zip(ends, chosen, strict=True)
    ]


def settings() -> Iterator[Setting]:
    """Yield the grid."""
    for *values, moved in product(SEEDS, IMAGES, TOP1, EFFECTS, MOVED):
        if values[2] + values[3] < 100:
            yield Setting(*values, *moved)


PREVALENCE = np.array([0.5, 0.4, 0.3, 0.2, 0.1])
CLASSES, SHARED = 4, 0.7


def class_truth(separation: float) -> dict[str, float]:
    """Return AUROC and mean average precision of normal scores, N(separation, 1) of positives and N(0, 1) of others."""
    threshold = np.linspace(8 + separation, -8, 4001)
    true, false = ndtr(separation - threshold), ndtr(-threshold)
    precision = [p * true / (p * true + (1 - p) * false) for p in PREVALENCE]
    ap = [np.trapezoid(each, true) for each in precision]
    return {"auroc": 100 * float(ndtr(separation / math.sqrt(2))), "map": 100 * float(np.mean(ap))}


def class_arms(random: np.random.Generator, images: int, separations: tuple[float, float]) -> Compared:
    """Return AUROC and mAP of two arms on the same images."""
    size = images, len(PREVALENCE)
    positive = random.random(size) < PREVALENCE
    shared, scores = SHARED * random.standard_normal(size), {}
    for arm, separation in zip("ab", separations, strict=True):
        logits = shared + math.sqrt(1 - SHARED**2) * random.standard_normal(size) + separation * positive
        scores[arm, "scores"] = np.concatenate([logits, positive], 1)

    def pool(metric: str, values: np.ndarray, counts: np.ndarray) -> dict[str, np.ndarray]:
        logits, positive = np.split(values, 2, axis=1)
        ap, auroc = ranked(logits, positive, counts)
        return {"auroc": 100 * known_mean(auroc), "map": 100 * known_mean(ap)}

    return Compared(scores, pool=pool)


def pixel_truth(ability: float) -> dict[str, float]:
    """Return the mIoU of `pixel_arms`."""
    share = float(ndtr(ability / math.sqrt(2)))
    return {"miou": 100 * share / (1 + (1 - share) / 2)}


def pixel_arms(random: np.random.Generator, images: int, abilities: tuple[float, float]) -> Compared:
    """Return the mIoU of two arms: of every class labelled, predicted and common pixels."""
    size = images, CLASSES
    labelled = random.gamma(1.0, 100.0, size) * (random.random(size) < 0.5)
    difficulty, scores = random.standard_normal(size) * SHARED, {}
    for arm, ability in zip("ab", abilities, strict=True):
        share = ndtr(ability + difficulty + math.sqrt(1 - SHARED**2) * random.standard_normal(size))
        both, wrong = labelled * share, labelled * (1 - share) * random.uniform(0, 1, size)
        scores[arm, "miou"] = np.concatenate([labelled, both + wrong, both], 1).reshape(images, 3, CLASSES)
    flat = {key: each.reshape(images, -1) for key, each in scores.items()}
    return Compared(flat, STATISTICS)


KINDS, MOST_SEEN, MANY = ("a", "b", "c"), 12, 20_000
"""Classes of objects; most detections of an image; images from which the true average precision is computed."""


def aps(stored: np.ndarray, counts: np.ndarray) -> dict[str, np.ndarray]:
    """Return AP at IoU 0.5 and AP of what `image_scores` would store."""
    values = summarised(average_precisions(stored, counts, len(KINDS)), KINDS, {})
    return {name: values[name] for name in ("ap50", "ap")}


def detected(random: np.random.Generator, images: int, abilities: Iterable[float]) -> list[np.ndarray]:
    """Return what `image_scores` would store (images, k) for detectors of the same images.

    An image has 0 to 6 objects; a detector finds all, the harder ones with a low score and a small overlap, and about
    two things that are none.
    """
    size, places = (images, MOST_SEEN), np.arange(MOST_SEEN)
    kind, shared = random.integers(1, 1 + len(KINDS), size), SHARED * random.standard_normal(size)
    is_object = places < random.binomial(6, 0.35, (images, 1))
    is_other = ~is_object & (places >= MOST_SEEN - random.binomial(6, 0.35, (images, 1)))
    objects = np.stack([(is_object & (kind == 1 + number)).sum(1) for number in range(len(KINDS))], 1)
    stored = []
    for ability in abilities:
        seen = shared + math.sqrt(1 - SHARED**2) * random.standard_normal((2, *size)) + ability * is_object
        level = np.floor(len(IOUS) * ndtr(seen[1] - ability / 2)).astype(int) + 1
        matched = np.where(is_object, 2 ** np.minimum(level, len(IOUS)) - 1, 0)
        rows = np.zeros((*size, WIDTH))
        rows[..., 0], rows[..., 1], rows[..., 2] = ndtr(seen[0]), kind * (is_object | is_other), matched
        unused = np.zeros((images, (len(AREAS) - 1) * len(KINDS)))
        stored.append(np.concatenate([objects, unused, rows.reshape(images, -1)], 1))
    return stored


def object_truth(ability: float) -> dict[str, float]:
    """Return AP of very many images."""
    (stored,) = detected(np.random.default_rng(0), MANY, [ability])
    return {name: float(value[0]) for name, value in aps(stored, np.ones((1, MANY))).items()}


def object_arms(random: np.random.Generator, images: int, abilities: tuple[float, float]) -> Compared:
    """Return AP of two detectors on the same images."""
    stored = detected(random, images, abilities)
    scores = {(arm, "boxes"): each for arm, each in zip("ab", stored, strict=True)}
    return Compared(scores, pool=lambda metric, values, counts: aps(values, counts))


POOLED = {"class": (class_arms, class_truth), "pixel": (pixel_arms, pixel_truth), "object": (object_arms, object_truth)}


def pooled_rows(images: int, start: float, effect: float, of: str, draws: int) -> list[dict[str, Any]]:
    """Return the rows of metrics of all images together, of a difference and of one arm."""
    random = np.random.default_rng([images, round(100 * start), round(100 * effect)])
    make, truth_of = POOLED[of]
    truth = [truth_of(each) for each in (start + effect, start)]
    ends: dict[tuple[str, str], list[Ends]] = {}
    for _ in range(draws):
        arms = make(random, images, (start + effect, start))
        for metric in truth[0]:
            line = arms.difference("a", "b", metric)
            ends.setdefault((metric, OF_IMAGES), []).append((line.low, line.high))
            low, high = arms.interval("b", metric)
            ends.setdefault((metric, ONE_ARM), []).append((low or 0.0, high or 100.0))
    rows = []
    for (metric, what), intervals in ends.items():
        difference, one = truth[0][metric] - truth[1][metric], truth[1][metric]
        row: dict[str, Any] = {"metric": metric, "seeds": 1, "images": images, "top1": f"{one:.1f}"}
        row |= {"effect": f"{difference:.1f}", "spread": 0.0, "always": 0.0, "method": "interval", "truth": what}
        row |= {"draws": draws}
        row |= summary(np.array(intervals), np.full(draws, difference if what == OF_IMAGES else one))
        rows.append(row)
    return rows


def normal_rows() -> Iterator[dict[str, Any]]:
    """Yield the lowest and highest coverage for normal values, over the spreads of seeds and of lasting differences."""
    quantiles = (np.arange(20000) + 0.5) / 20000
    for seeds in (*SEEDS[1:], 4, 7, 20):
        t, c = float(stdtrit(seeds - 1, 0.975)), (seeds - 2) / (seeds + 1)
        variances, coverage = 2 * gammaincinv((seeds - 1) / 2, quantiles) / (seeds - 1), []
        for lasting, moved in product((0.0, 0.3, 1.0, 3.0, 10.0, 100.0), (0.0, *np.logspace(-1.5, 3, 40))):
            measured = (moved + 1) * variances  # in units of the rest
            of_both = 1.96**2 * (lasting + c) + t**2 * np.maximum(0, measured - c)
            half = np.sqrt(np.maximum(1.96**2 * (lasting + 1), of_both))
            coverage.append((2 * ndtr(half / math.sqrt(lasting + 1 + moved)) - 1).mean())
        for truth, value in (("lowest", min(coverage)), ("highest", max(coverage))):
            row = {
                "metric": "normal",
                "seeds": seeds,
                "images": "",
                "top1": "",
                "effect": 0.0,
                "spread": "",
                "always": "",
            }
            row |= {"method": "interval", "truth": truth, "draws": "", "coverage": f"{value:.3f}"}
            yield row | {"yes": "", "no_width": "", "width": ""}


def trial_row(setting: Setting, draws: int) -> dict[str, Any]:
    """Return how often trials of at most `setting.seeds` seeds give each verdict on the true effect."""
    random, worth, trained = np.random.default_rng([round(100 * abs(v)) for v in vars(setting).values()]), [], []
    for points in draw(random, setting, draws)[0]:
        for seeds in range(2, setting.seeds + 1):
            line = interval(points[:seeds], POINTS, confidence(seeds, setting.seeds))
            if (answer := verdict(line.low, line.high)) != "unclear":
                break
        worth.append(answer)
        trained.append(seeds)
    shares = {each: worth.count(each) / draws for each in ("yes", "no", "unclear")}
    wrong = shares["yes"] * (setting.effect <= 0) + shares["no"] * (setting.effect >= HIDDEN)
    values = {name: f"{value:.3f}" for name, value in (shares | {"wrong": wrong}).items()}
    return {**vars(setting), "draws": draws, **values, "trained": f"{np.mean(trained):.2f}"}


def trial_settings() -> Iterator[Setting]:
    """Yield the grid of trials."""
    for *values, moved in product((2, 3, 5), (300, 1000, 5000), (50.0, 90.0), (-1.0, 0.0, 1.0, 2.0, 5.0), MOVED):
        yield Setting(*values, *moved)


def main() -> None:
    """Simulate the grid and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--quick", action="store_true", help="print every 50th setting")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--trials", action="store_true", help="simulate trials")
    options = parser.parse_args()
    if options.trials:
        with Pool(options.workers) as workers:
            trials = workers.starmap(trial_row, [(each, options.draws) for each in trial_settings()], 1)
        write(RESULTS / "coverage_trials.csv", trials)
        return
    rows = list(normal_rows())
    pooled = list(product((20, 60, 300), (1.0, 2.0), (0.0, 0.3), POOLED))
    pooled = [each for each in pooled if each[0] < 300 or each[-1] != "object"]  # which would take an hour
    of_top1 = list(settings())
    if options.quick:
        pooled, of_top1 = pooled[::10], of_top1[::50]
    with Pool(options.workers) as workers:
        parts = workers.starmap(pooled_rows, [(*each, options.draws) for each in pooled], 1)
        parts += workers.starmap(rows_of, [(each, options.draws) for each in of_top1], 1)
    rows += [row for part in parts for row in part]
    if options.quick:
        for row in rows:
            print(*row.values())
    else:
        write(RESULTS / "coverage.csv", rows)


if __name__ == "__main__":
    main()
