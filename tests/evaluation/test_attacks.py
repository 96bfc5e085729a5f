from typing import Any

import pytest
import torch
from torch import nn

from recast.errors import RecastError
from recast.lab.data import Data
from recast.lab.evaluation import PixelModel
from recast.lab.evaluation.attacks import pgd


@pytest.fixture
def victim(trained: nn.Module, digits: Data) -> PixelModel:
    return PixelModel(trained, digits.mean, digits.std)


@pytest.mark.parametrize(("steps", "size"), [(1, 2.0), (3, 0.9)])
def test_steps_are_the_formula_of_fgsm_and_pgd(steps: int, size: float, victim: PixelModel, digits: Data) -> None:
    images, labels = digits.val.batch(range(50))
    unchanged = images.clone()
    before = {key: value.clone() for key, value in victim.state_dict().items()}
    expected = images
    for _ in range(steps):
        pixels = expected.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(victim(pixels), labels), pixels)
        expected = images + (expected + size / 255 * gradient.sign() - images).clamp(-2 / 255, 2 / 255)
        expected = expected.clamp(0, 1)
    attacked = pgd(victim, images, labels, 2.0, steps=steps, step_size=size)
    torch.testing.assert_close(attacked, expected)
    assert images.equal(unchanged)
    assert not attacked.requires_grad
    assert all(parameter.grad is None for parameter in victim.parameters())
    assert all(value.equal(before[key]) for key, value in victim.state_dict().items())
    with pytest.raises(RecastError, match="at least 1 step"):
        pgd(victim, images, labels, 1.0, steps=0)


def test_rows_of_the_suites(trained: nn.Module, digits: Data, values: Any) -> None:
    top1 = values(trained, ["clean", "fgsm", "pgd"], digits, eps=(0, 1.0, 16))
    assert top1["fgsm top1@0"] == top1["pgd top1@0"] == top1["clean top1"] > 80
    assert top1["pgd top1@16"] <= top1["fgsm top1@16"] < top1["clean top1"]


def test_the_suite_takes_the_very_attack(victim: PixelModel, trained: nn.Module, digits: Data, values: Any) -> None:
    """With the shared gradient of the first step."""
    images, labels = digits.val.batch(range(50))
    with torch.no_grad():
        right = victim(pgd(victim, images, labels, 10.0, steps=2)).argmax(1) == labels
    top1 = values(trained, "pgd", digits, 7, eps=(10.0,), steps=2)["top1@10"]
    assert top1 == pytest.approx(100 * right.float().mean().item())
