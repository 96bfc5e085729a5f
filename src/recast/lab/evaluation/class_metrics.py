"""Metrics that weigh classes equally: F1, AUROC, average precision, balanced accuracy (suites `classes`, `multilabel`).

They are functions of the scores of all images together, not means over images: the bootstrap computes them for every
draw, from counts of each image. All agree with scikit-learn's.

Shapes: n images, C classes, counts (draws, n).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from recast.lab.evaluation.context import Batch, Context, NotMeasured, Score, Source
from recast.lab.evaluation.evaluators import evaluates
from recast.lab.evaluation.stats import known_mean, ratio

MOST_CLASSES = 200
"""Upper bound of the suite `classes`: its bootstrap ranks all images once a class and draw."""


def sources_classes(context: Context) -> list[Source]:
    """Return the validation images. Raises NotMeasured for too many classes."""
    if len(context.data.classes) > MOST_CLASSES:
        raise NotMeasured(f"classes measures at most {MOST_CLASSES} classes, got {len(context.data.classes)}")
    return [context.validation]


def pool_classes(context: Context, metric: str, scores: np.ndarray, counts: np.ndarray) -> dict[str, np.ndarray]:
    """Return balanced accuracy, macro F1 and the mean AUROC of one class against the others."""
    probabilities, numbers = scores[:, :-1], np.arange(scores.shape[1] - 1)
    positive, predicted = (labels[:, None] == numbers for labels in (scores[:, -1], probabilities.argmax(1)))
    recall, f1 = recall_and_f1(positive, predicted, counts)
    _, auroc = ranked(probabilities, positive, counts)
    return {name: 100 * known_mean(values) for name, values in (("balanced", recall), ("f1", f1), ("auroc", auroc))}


@evaluates("classes", sources=sources_classes, pool=pool_classes)
def score_classes(batch: Batch) -> Iterator[Score]:
    """Keep the probabilities and the label of every image."""
    for name in batch.models:
        probabilities = batch.logits(name).double().softmax(1)
        yield Score(name, "classes", torch.cat([probabilities, batch.labels[:, None]], 1))


def recall_and_f1(positive: np.ndarray, predicted: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return recall and F1 (draws, C) of decisions (n, C); NaN for classes without images, F1 unless predicted."""
    right, labelled, chosen = (counts @ which.astype(float) for which in (positive & predicted, positive, predicted))
    return ratio(right, labelled), ratio(2 * right, labelled + chosen)


def ranked(scores: np.ndarray, positive: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return average precision and AUROC (draws, C) of scores (n, C), the largest first; NaN where undefined.

    AP = Σ_t (R_t − R_t−1) P_t        over the distinct scores t, precision P and recall R of all images from t on
    AUROC = area under the true over the false positive rate, by trapezoids
    """
    results: Sequence[list[np.ndarray]] = [], []
    for column, labels in zip(scores.T, positive.T, strict=True):
        order = np.argsort(-column, kind="stable")
        ends = np.append(np.diff(column[order]) != 0, True)  # images with equal scores count together
        ordered = counts[:, order]
        true = np.cumsum(ordered * labels[order], 1)[:, ends]
        false = np.cumsum(ordered, 1)[:, ends] - true
        steps, width = np.diff(true, prepend=0), np.diff(false, prepend=0)
        precision = np.divide(true, true + false, out=np.zeros_like(true), where=true + false > 0)
        results[0].append(ratio((steps * precision).sum(1), true[:, -1]))
        results[1].append(ratio((width * (true - steps / 2)).sum(1), true[:, -1] * false[:, -1]))
    ap, auroc = (np.stack(values, 1) for values in results)
    return ap, auroc
