import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.data.mixup import mixup_target
from torch import Tensor

from recast.lab.config import ClassifyConfig
from recast.lab.tasks.classify.training import label_loss

LOGITS = torch.tensor([[2.0, 0.0, -1.0, 0.5], [0.0, 1.0, 3.0, -2.0]])
LABELS = torch.tensor([0, 2])
MIXED = torch.tensor([[0.7, 0.3, 0.0, 0.0], [0.0, 0.0, 0.4, 0.6]])


def make(loss: str = "ce", label_smoothing: float = 0.0, **fields: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return label_loss(ClassifyConfig(label_smoothing=label_smoothing, loss={"kind": loss, **fields}), 4)


def by_hand(targets: list[list[float]], binary: bool) -> float:
    """The formulas of the docstring in Python's own numbers."""
    total = 0.0
    for z, t in zip(LOGITS.tolist(), targets, strict=True):
        if binary:
            p = [1 / (1 + math.exp(-v)) for v in z]
            total -= sum(a * math.log(b) + (1 - a) * math.log(1 - b) for a, b in zip(t, p, strict=True)) / len(z)
        else:
            norm = math.log(sum(map(math.exp, z)))
            total -= sum(a * (v - norm) for a, v in zip(t, z, strict=True))
    return total / len(LOGITS)


def smoothed(share: float) -> list[list[float]]:
    return [[1 - share + share / 4 if c == int(label) else share / 4 for c in range(4)] for label in LABELS]


def test_published_numbers() -> None:
    assert make()(LOGITS, LABELS).item() == pytest.approx(0.2589324713, rel=1e-6)
    # DeiT III: every class of a mixed label counts fully, whatever its share
    assert make(loss="bce", bce_threshold=0.0)(LOGITS, MIXED).item() == pytest.approx(0.7861672640, rel=1e-6)


@pytest.mark.parametrize("binary", [False, True])
def test_labels_follow_the_formula_and_mixed_targets_are_not_smoothed_again(binary: bool) -> None:
    for share in (0.0, 0.1):
        loss = make(loss="bce" if binary else "ce", label_smoothing=share)
        assert loss(LOGITS, LABELS).item() == pytest.approx(by_hand(smoothed(share), binary), rel=1e-6)
        assert loss(LOGITS, MIXED).item() == pytest.approx(by_hand(MIXED.tolist(), binary), rel=1e-6)
    # a label that timm's Mixup has smoothed, mixed with nothing, is the label that we smooth
    targets = mixup_target(LABELS, 4, lam=1.0, smoothing=0.1)
    torch.testing.assert_close(loss(LOGITS, targets), loss(LOGITS, LABELS))


def test_a_threshold_between_the_shares_keeps_the_larger_class_alone() -> None:
    loss = make(loss="bce", bce_threshold=0.5)
    assert loss(LOGITS, MIXED) == loss(LOGITS, torch.tensor([0, 3]))
    assert make(loss="bce", bce_threshold=0.5, label_smoothing=0.1)(LOGITS, LABELS) == make(loss="bce")(LOGITS, LABELS)
