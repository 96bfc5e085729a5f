"""Scores of images as they are: suite `clean` with loss and calibration, and what released sets and sizes share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from recast.evaluation.context import Batch, Score

BINS = 15


def score_top(batch: Batch) -> Iterator[Score]:
    """top1, and from six classes on top5, among the classes that count."""
    for name in batch.models:
        yield Score(name, "top1", batch.is_correct(name))
        if batch.logits(name).shape[1] >= 6:
            yield Score(name, "top5", batch.is_correct(name, k=5))


def score_part(batch: Batch) -> Iterator[Score]:
    """top1/PART: top1/gaussian_noise/1 and so on."""
    for name in batch.models:
        yield Score(name, f"top1/{batch.source.part}", batch.is_correct(name))


def score_clean(batch: Batch) -> Iterator[Score]:
    """top1, top5, loss = cross-entropy, ece."""
    yield from score_top(batch)
    for name in batch.models:
        logits = batch.logits(name)
        yield Score(name, "loss", F.cross_entropy(logits.double(), batch.labels, reduction="none"))
        yield Score(name, "ece", calibration_gaps(logits, batch.labels))


def calibration_gaps(logits: Tensor, labels: Tensor) -> Tensor:
    """(B, 15): correct − confidence in the column of the confidence's bin, 0 elsewhere.

    The bins are ((b − 1)/15, b/15] (Guo et al. 2017, arXiv:1706.04599).
    """
    confidence, prediction = logits.double().softmax(1).max(1)
    gap = (prediction == labels).double() - confidence
    bins = (confidence * BINS).ceil().long().sub(1).clamp(0, BINS - 1)
    return torch.zeros(len(labels), BINS, dtype=torch.float64, device=logits.device).scatter_(
        1, bins[:, None], gap[:, None]
    )


def expected_calibration_error(means: np.ndarray) -> np.ndarray:
    """ECE in percent: 100 Σ_b |Σ_{i in b} (correctᵢ − confidenceᵢ)| / n (Guo et al. 2017, Eq. 3)."""
    return 100 * np.abs(means).sum(axis=-1)
