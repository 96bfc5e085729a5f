"""Grafit's suites on frozen features of the training images: `linear` (Table 2.2) and `separability` (Table 2.1).

linear        top-1 on validation images of a multinomial logistic regression; its weight decay λ is that of DECAYS
              which is best on a held-out tenth
separability  halves: training accuracy of a linear classifier of random halves of every class, mean over ten draws,
              little above 50 % if the images of a class have collapsed to a point. halves/conditioned: its
              probabilities times those of a linear classifier of the classes. energy@K: share of the variance in the
              first K components

Features have length 1 and are scaled to √D, so that λ means the same for every width.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from recast.errors import RecastError
from recast.lab.data.seeding import hold_out, shuffled_classes
from recast.lab.evaluation.context import Batch, Context, NotMeasured, Score
from recast.lab.evaluation.evaluators import evaluates
from recast.lab.evaluation.knn import banks, sources_knn, unit_features
from recast.lab.evaluation.stats import plain_mean
from recast.lab.plugins import optional_package
from recast.modes import in_eval

if TYPE_CHECKING:
    from sklearn.linear_model import LogisticRegression

DECAYS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
HALVES_DECAY = 1e-4
DRAWS = 10
STEPS = 200
"""Of L-BFGS at most."""


def fit_linear(x: np.ndarray, labels: np.ndarray, decay: float) -> LogisticRegression:
    """Fit min mean cross-entropy + λ/2·‖W‖² to rows x (N, D)."""
    sklearn = optional_package("sklearn.linear_model", "scikit-learn", "linear classifiers require it", NotMeasured)
    with warnings.catch_warnings(action="ignore"):  # of separable classes and a small λ the minimum lies far out
        return sklearn.LogisticRegression(C=1 / (decay * len(x)), max_iter=STEPS).fit(x, labels)


def choose_classifier(x: np.ndarray, labels: Tensor) -> tuple[LogisticRegression, float]:
    """Fit a classifier to all rows with the λ that is best on a held-out tenth; the largest of equals."""
    if int(labels.bincount().max()) < 2:
        raise RecastError("linear needs a class with two training images to choose its weight decay; add images")
    y, (fitted, held_out) = labels.numpy(), (part.numpy() for part in hold_out(labels, 0.1))
    scores = [fit_linear(x[fitted], y[fitted], decay).score(x[held_out], y[held_out]) for decay in DECAYS]
    best = DECAYS[int(np.argmax(scores))]
    return fit_linear(x, y, best), best


def scaled(features: Tensor) -> np.ndarray:
    """Return unit features (N, D) at length √D."""
    return (features.cpu().double() * math.sqrt(features.shape[1])).numpy()


@evaluates("linear", sources=sources_knn, statistics={"weight_decay": plain_mean}, takes_other_labels=True)
def score_linear(batch: Batch) -> Iterator[Score]:
    """Yield top1 of the linear classifier, and log10 of its weight decay."""
    classifiers, bank_of = batch.context.store.setdefault("linear", {}), banks(batch)
    for name, model in batch.models.items():
        if name not in classifiers:
            bank, labels = bank_of[name]
            classifiers[name] = choose_classifier(scaled(bank), labels.cpu())
        classifier, decay = classifiers[name]
        predicted = classifier.predict(scaled(unit_features(batch.context, model, batch.images)))
        yield Score(name, "top1", (torch.from_numpy(predicted) == batch.labels.cpu()).float())
        yield Score(name, "weight_decay", torch.full((len(batch),), math.log10(decay)))


@evaluates("separability", "measure", uses=("seed",), takes_other_labels=True)
def measure_separability(context: Context) -> Iterator[tuple[str, str, float, int]]:
    """Yield halves, halves/conditioned and energy@K in percent, K a power of two."""
    (source,) = sources_knn(context)
    with in_eval(*context.models.values()):
        bank_of = banks(Batch(context, source, 0, torch.empty(0), torch.empty(0)))
    for name, (bank, labels) in bank_of.items():
        draws = [halves_accuracy(scaled(bank), labels.cpu(), context.options.seed + draw) for draw in range(DRAWS)]
        for metric, value in zip(("halves", "halves/conditioned"), np.mean(draws, 0), strict=True):
            yield name, metric, 100 * float(value), len(bank)
        energies = energy(bank)
        for power in range(len(energies).bit_length()):
            yield name, f"energy@{2**power}", 100 * float(energies[2**power - 1]), len(bank)


def energy(x: Tensor) -> Tensor:
    """Return (D,) cumulative shares of the variance of x (N, D) in its principal components, largest first."""
    variances = torch.linalg.eigvalsh(x.double().T.cov()).flip(0).clamp(min=0)
    return variances.cumsum(0) / variances.sum()


def halves_accuracy(x: np.ndarray, labels: Tensor, seed: int) -> tuple[float, float]:
    """Return the share of rows (N, D) whose half is classified correctly: alone, and given the class."""
    halves = torch.zeros_like(labels)
    for members in shuffled_classes(labels, seed)[1]:
        halves[members[(len(members) + 1) // 2 :]] = 1
    targets, classes = (2 * labels + halves).numpy(), labels.numpy()
    of_half, of_class = fit_linear(x, targets, HALVES_DECAY), fit_linear(x, classes, HALVES_DECAY)
    alone = of_half.predict_log_proba(x)
    place = np.searchsorted(of_class.classes_, of_half.classes_ // 2)
    conditioned = alone + of_class.predict_log_proba(x)[:, place]
    right = [float((of_half.classes_[scores.argmax(1)] == targets).mean()) for scores in (alone, conditioned)]
    return right[0], right[1]
