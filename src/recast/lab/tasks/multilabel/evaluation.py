"""How well labels are predicted (suite `multilabel`): mAP, F1 at a probability of 0.5, and AUROC."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from recast.lab.evaluation.class_metrics import ranked, recall_and_f1
from recast.lab.evaluation.context import Batch, Context, Score
from recast.lab.evaluation.evaluators import evaluates
from recast.lab.evaluation.stats import known_mean


def pool_labels(context: Context, metric: str, scores: np.ndarray, counts: np.ndarray) -> dict[str, np.ndarray]:
    """Return the metrics of `label_metrics` of the images of a suite."""
    return label_metrics(scores, counts, context.data.classes)


@evaluates("multilabel", pool=pool_labels)
def score_labels(batch: Batch) -> Iterator[Score]:
    """Keep the logits and the labels of every image."""
    for name in batch.models:
        yield Score(name, "labels", torch.cat([batch.logits(name), batch.labels], 1))


def label_metrics(scores: np.ndarray, counts: np.ndarray, classes: Sequence[str]) -> dict[str, np.ndarray]:
    """Return map, f1 and auroc, means over the classes that have images, then f1 and auroc of every class (draws,).

    scores: (n, 2C), logits and labels; counts: (draws, n).
    """
    logits, labels = np.split(scores, 2, axis=1)
    ap, auroc = ranked(logits, labels > 0, counts)
    _, f1 = recall_and_f1(labels > 0, logits >= 0, counts)
    metrics = {"map": 100 * known_mean(ap), "f1": 100 * known_mean(f1), "auroc": 100 * known_mean(auroc)}
    for name, values in (("f1", f1), ("auroc", auroc)):
        metrics |= {f"{name}/{label}": 100 * values[:, place] for place, label in enumerate(classes)}
    return metrics
