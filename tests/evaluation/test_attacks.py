from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recast.errors import RecastError
from recast.lab.data import Data
from recast.lab.data.seeding import mix_seed
from recast.lab.evaluation import PixelModel, attacks
from recast.lab.evaluation.attacks import auto_attack, pgd

Score = Callable[..., dict[str, Any]]
Values = Callable[..., dict[str, float]]


@pytest.fixture
def victim(trained: nn.Module, digits: Data) -> PixelModel:
    return PixelModel(trained, digits.mean, digits.std)


@pytest.fixture
def batch(digits: Data) -> tuple[Tensor, Tensor]:
    return digits.val.batch(range(len(digits.val)))


def noise_like(images: Tensor, seeds: list[int]) -> Tensor:
    drawn = [torch.rand(images.shape[1:], generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return 2 * torch.stack(drawn) - 1


@pytest.mark.parametrize(("steps", "size"), [(1, 2.0), (3, 0.9)])
def test_steps_are_the_formula_of_fgsm_and_pgd(
    steps: int, size: float, victim: PixelModel, batch: tuple[Tensor, Tensor]
) -> None:
    images, labels = batch[0].clone(), batch[1]
    before = {key: value.clone() for key, value in victim.state_dict().items()}
    expected = images
    for _ in range(steps):
        pixels = expected.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(victim(pixels), labels), pixels)
        expected = images + (expected + size / 255 * gradient.sign() - images).clamp(-2 / 255, 2 / 255)
        expected = expected.clamp(0, 1)
    attacked = pgd(victim, images, labels, 2.0, steps=steps, step_size=size)
    torch.testing.assert_close(attacked, expected)
    assert images.equal(batch[0])
    assert not attacked.requires_grad
    assert all(parameter.grad is None for parameter in victim.parameters())
    assert all(value.equal(before[key]) for key, value in victim.state_dict().items())
    with pytest.raises(RecastError, match="at least 1 step"):
        pgd(victim, images, labels, 1.0, steps=0)


def test_rows_of_the_suites(trained: nn.Module, digits: Data, values: Values) -> None:
    found = values(trained, ["clean", "fgsm", "pgd"], digits, eps=(0, 1.0, 16))
    assert found["fgsm top1@0"] == found["pgd top1@0"] == found["clean top1"] > 80
    assert found["pgd top1@16"] <= found["fgsm top1@16"] < found["clean top1"]


def test_the_suite_takes_the_very_attack_and_all_restarts_must_fail(
    victim: PixelModel, trained: nn.Module, digits: Data, batch: tuple[Tensor, Tensor], values: Values
) -> None:
    """With the shared gradient of the first step, and random starts that follow from the image's index."""
    images, labels = batch

    def right(start: int | None) -> Tensor:
        seeds = [mix_seed("pgd", 0, start, index) for index in range(len(labels))]
        noise = None if start is None else noise_like(images, seeds)
        with torch.no_grad():
            return victim(pgd(victim, images, labels, 10.0, steps=2, noise=noise)).argmax(1) == labels

    def top1(restarts: int, random_start: bool = False) -> float:
        told = {"eps": (10.0,), "steps": 2, "restarts": restarts, "random_start": random_start}
        return values(trained, "pgd", digits, 7, **told)["top1@10"]

    survived = right(None)
    assert top1(1) == pytest.approx(100 * survived.float().mean().item())
    assert top1(1, random_start=True) == pytest.approx(100 * right(0).float().mean().item())
    for start in (1, 2, 3):
        survived &= right(start)
    assert top1(4) == pytest.approx(100 * survived.float().mean().item())


def test_the_suite_attacks_the_images_that_are_right(
    victim: PixelModel, digits: Data, score: Score, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an attack that turns images black, as far as ε allows."""
    pytest.importorskip("pyautoattack")
    seeds: list[int] = []

    def darken(_: nn.Module, images: Tensor, labels: Tensor, eps: float, classes: int, *, seed: int) -> Tensor:
        seeds.extend([seed] * len(images))
        return (images - eps / 255).clamp(min=0)

    monkeypatch.setattr(attacks, "auto_attack", darken)
    data = replace(digits, val=digits.val.subset(torch.arange(10)))
    scores = score("autoattack", victim.model, data, 4, eps=(0, 40))
    images, labels = data.val.batch(range(10))
    right = victim(images).argmax(1) == labels
    assert scores["top1@0"][:, 0].tolist() == right.float().tolist()
    darker = (victim((images - 40 / 255).clamp(min=0)).argmax(1) == labels) & right
    assert scores["top1@40"][:, 0].tolist() == darker.float().tolist()
    assert (len(seeds), len(set(seeds))) == (int(right.sum()), 3)  # one for each batch


def test_the_real_autoattack(victim: PixelModel, digits: Data) -> None:
    """Within ε, in [0, 1], the same again, it finds what PGD finds, and leaves nothing behind."""
    pytest.importorskip("pyautoattack")
    images, labels = digits.val.batch(range(6))
    right = victim(images).argmax(1) == labels
    images, labels = images[right][:3], labels[right][:3]
    frozen, before = next(victim.parameters()).requires_grad_(False), torch.get_rng_state()
    attacked = auto_attack(victim, images, labels, 24, 10, seed=1)
    assert before.equal(torch.get_rng_state())
    assert all(parameter.grad is None for parameter in victim.parameters())
    assert [p.requires_grad for p in victim.parameters()] == [p is not frozen for p in victim.parameters()]
    frozen.requires_grad_(True)
    assert (attacked - images).abs().max() <= 24 / 255 + 1e-6
    assert 0 <= attacked.min() <= attacked.max() <= 1
    assert attacked.equal(auto_attack(victim, images, labels, 24, 10, seed=1))
    survived = victim(attacked).argmax(1) == labels
    by_pgd = victim(pgd(victim, images, labels, 24, steps=20)).argmax(1) == labels
    assert not (survived & ~by_pgd).any()
    assert not survived.all()
