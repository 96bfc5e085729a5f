from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recast.data import Data
from recast.errors import RecastError
from recast.evaluation import PixelModel, evaluate
from recast.evaluation.context import is_correct


class Constant(nn.Module):
    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits.expand(len(x), -1)


def test_top1_top5_and_loss_by_hand(gray: Data) -> None:
    data = replace(gray, val=replace(gray.val, labels=torch.tensor([9, 5, 2])))  # type: ignore[type-var]
    rows = evaluate({"m": Constant(torch.arange(10.0))}, ["clean"], data, run="r", batch_size=2, progress=False)
    values = {row.metric: row.value for row in rows}
    assert values["top1"] == pytest.approx(100 / 3)
    assert values["top5"] == pytest.approx(200 / 3)
    expected = F.cross_entropy(torch.arange(10.0).expand(3, -1), data.val.labels)
    assert values["loss"] == pytest.approx(expected.item())
    assert {(row.run, row.model, row.suite, row.dataset, row.n) for row in rows} == {("r", "m", "clean", "digits", 3)}


def test_top5_needs_six_classes(gray: Data) -> None:
    data = replace(gray, classes=list("abcde"), val=replace(gray.val, labels=torch.tensor([0, 1, 4])))  # type: ignore[type-var]
    rows = evaluate({"m": Constant(torch.arange(5.0))}, ["clean"], data, progress=False)
    assert [row.metric for row in rows] == ["top1", "loss", "ece"]


def test_is_correct() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    assert is_correct(logits, torch.tensor([1, 1])).tolist() == [1, 0]
    assert is_correct(logits, torch.tensor([1, 1]), k=2).tolist() == [1, 1]


def test_pixel_model_normalises() -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    pixels = torch.rand(2, 3, 5, 4)
    by_hand = (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    model = PixelModel(nn.Identity(), mean, std)
    assert model(pixels).equal(by_hand)
    assert model.state_dict() == {}
    double = PixelModel(nn.Conv2d(3, 1, 1).double(), (0.0,) * 3, (1.0,) * 3)
    assert double(torch.ones(1, 3, 2, 2)).dtype == torch.float64


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(7), r"logits of shape \(3, 10\).* got \(3, 7\).*num_classes"),
        (torch.full((10,), torch.nan), "model 'm' gives NaN or infinite"),
        (torch.tensor([torch.inf, *[0.0] * 9]), "model 'm' gives NaN or infinite"),
    ],
)
def test_outputs_that_mean_nothing_are_refused(gray: Data, logits: Tensor, message: str) -> None:
    with pytest.raises(RecastError, match=message):
        evaluate({"m": Constant(logits)}, ["clean"], gray, progress=False)


def test_calibration_error_is_the_formula(trained: nn.Module, digits: Data) -> None:
    rows = evaluate(trained, "clean", digits, batch_size=20, progress=False)
    (found,) = (row.value for row in rows if row.metric == "ece")
    images, labels = digits.val.batch(range(len(digits.val)))
    with torch.no_grad():
        confidence, prediction = PixelModel(trained, digits.mean, digits.std)(images).softmax(1).max(1)
    expected = 0.0
    for number in range(15):
        inside = (confidence > number / 15) & (confidence <= (number + 1) / 15)
        if inside.any():
            gap = (prediction == labels)[inside].float().mean() - confidence[inside].mean()
            expected += 100 * inside.float().mean().item() * abs(gap.item())
    assert found == pytest.approx(expected, rel=1e-4)
    assert found > 0


def test_scores_are_of_each_image(trained: nn.Module, digits: Data, score: Callable[..., dict[str, Any]]) -> None:
    found = score("clean", trained, digits)
    assert {metric: values.shape for metric, values in found.items()} == {
        "top1": (50, 1), "top5": (50, 1), "loss": (50, 1), "ece": (50, 15)
    }  # fmt: skip
