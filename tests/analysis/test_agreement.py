"""Images won and lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from recast.errors import RecastError
from recast.lab.evaluation.agreement import predict
from recast.lab.statistics import Agreement


class Says(nn.Module):
    """Predicts what the images' first pixel is, plus a number."""

    def __init__(self, plus: int) -> None:
        super().__init__()
        self.plus = plus

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.one_hot((x[:, 0, 0, 0].long() + self.plus) % 3, 3).float()


def batches() -> list[tuple[Tensor, Tensor]]:
    pixels = torch.tensor([0, 1, 2, 0, 1]).view(-1, 1, 1, 1).expand(-1, 3, 2, 2).float()
    labels = torch.tensor([0, 2, 2, 1, 0])
    return [(pixels[:2], labels[:2]), (pixels[2:], labels[2:])]


def test_predictions_and_who_wins() -> None:
    found = predict({"parent": Says(0), "recast": Says(1)}, batches)
    assert found == {"label": [0, 2, 2, 1, 0], "parent": [0, 1, 2, 0, 1], "recast": [1, 2, 0, 1, 2]}
    against = Agreement.of(found["label"], found["recast"], found["parent"])
    assert against == Agreement(n=5, same=0, both_right=0, both_wrong=1, won=(1, 3), lost=(0, 2))
    alike = Agreement.of([0, 0, 0], [1, 1, 0], [1, 2, 0])
    assert (alike.same, alike.both_wrong, alike.both_right) == (2, 2, 1)  # alike and wrong is the same prediction
    itself = Agreement.of(found["label"], found["recast"], found["recast"])
    assert (itself.same, itself.both_right, itself.won, itself.lost, itself.p_value) == (5, 2, (), (), 1.0)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: predict({"a": Says(0)}, list), "no images"),
        (lambda: predict({"a": nn.Identity()}, batches), r"logits \(2, classes\), got \(2, 3, 2, 2\)"),
        (lambda: predict({"a": nn.Sequential(nn.Flatten(), nn.LayerNorm(12, eps=0.0))}, batches), "NaN"),
    ],
)
def test_mistakes_are_named(call: Callable[[], object], match: str) -> None:
    with pytest.raises(RecastError, match=match):
        call()
