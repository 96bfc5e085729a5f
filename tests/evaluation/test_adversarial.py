from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn

from recast.data import Data
from recast.data.seeding import mix_seed
from recast.errors import RecastError
from recast.evaluation import evaluate
from recast.evaluation.adversarial import fgsm, pgd
from recast.evaluation.bench import Options, PixelModel, loss_gradient

ATTACKS = {"fgsm": fgsm, "pgd": pgd}


@pytest.fixture
def victim(trained: nn.Module, digits: Data) -> PixelModel:
    return PixelModel(trained, digits.mean, digits.std)


@pytest.fixture
def batch(digits: Data) -> tuple[Tensor, Tensor]:
    return digits.val.batch(range(len(digits.val)))


def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        return nn.functional.cross_entropy(model(images), labels, reduction="none")


def test_fgsm_is_the_formula(victim: PixelModel) -> None:
    images, labels = torch.full((2, 3, 16, 16), 0.5), torch.tensor([3, 4])
    pixels = images.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(victim(pixels), labels), pixels)
    torch.testing.assert_close(fgsm(victim, images, labels, 2.0), images + 2 / 255 * gradient.sign())


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("eps", [0.5, 8.0])
def test_attack_stays_in_the_ball_and_in_the_pixel_range(
    name: str, eps: float, victim: PixelModel, batch: tuple[Tensor, Tensor]
) -> None:
    images, labels = batch
    attacked = ATTACKS[name](victim, images, labels, eps)
    assert (attacked - images).abs().max().item() == pytest.approx(eps / 255, rel=1e-4)  # reached, not passed
    assert attacked.min() >= 0
    assert attacked.max() <= 1
    assert not attacked.requires_grad


def test_stronger_attacks_raise_the_loss_further(victim: PixelModel, batch: tuple[Tensor, Tensor]) -> None:
    images, labels = batch
    clean = loss(victim, images, labels).mean()
    one = loss(victim, fgsm(victim, images, labels, 8.0), labels).mean()
    many = loss(victim, pgd(victim, images, labels, 8.0, steps=20), labels).mean()
    assert clean < one < many


def test_pgd_of_one_full_step_is_fgsm(victim: PixelModel, batch: tuple[Tensor, Tensor]) -> None:
    images, labels = batch
    assert pgd(victim, images, labels, 4.0, steps=1, step_size=4.0).equal(fgsm(victim, images, labels, 4.0))


def test_random_start_is_seeded_and_inside(victim: PixelModel, batch: tuple[Tensor, Tensor]) -> None:
    images, labels = batch

    def attack(seed: int) -> Tensor:
        noise = 2 * torch.rand(images.shape, generator=torch.Generator().manual_seed(seed)) - 1
        return pgd(victim, images, labels, 4.0, noise=noise, steps=2, step_size=1.0)

    assert attack(0).equal(attack(0))
    assert not attack(0).equal(attack(1))
    assert (attack(0) - images).abs().max() <= 4 / 255 + 1e-6


def test_nothing_is_left_in_the_model(victim: PixelModel, batch: tuple[Tensor, Tensor]) -> None:
    before = {name: value.clone() for name, value in victim.state_dict().items()}
    images = batch[0].clone()
    pgd(victim, images, batch[1], 4.0)
    assert all(parameter.grad is None for parameter in victim.parameters())
    assert all(value.equal(before[name]) for name, value in victim.state_dict().items())
    assert images.equal(batch[0])
    assert not images.requires_grad


def test_gradient_does_not_depend_on_the_batch(victim: PixelModel, batch: tuple[Tensor, Tensor]) -> None:
    images, labels = batch[0][:8], batch[1][:8]
    alone = torch.cat([fgsm(victim, images[i : i + 1], labels[i : i + 1], 4.0) for i in range(8)])
    assert (alone != fgsm(victim, images, labels, 4.0)).float().mean() < 1e-3  # signs of gradients next to 0


def test_rows_of_the_suites(trained: nn.Module, digits: Data) -> None:
    rows = evaluate(
        {"m": trained},
        ["clean", "fgsm", "pgd"],
        digits,
        options=Options(eps=(0, 1.0, 16)),
        batch_size=32,
        progress=False,
    )
    values = {f"{row.suite}/{row.metric}": row.value for row in rows}
    assert values["fgsm/top1@0"] == values["pgd/top1@0"] == values["clean/top1"] > 80
    assert values["pgd/top1@16"] <= values["fgsm/top1@16"] < values["clean/top1"]
    assert {row.metric for row in rows if row.suite == "pgd"} == {"top1@0", "top1@1", "top1@16"}


def test_the_suite_takes_the_very_attack_and_all_restarts_must_fail(
    victim: PixelModel, trained: nn.Module, digits: Data, batch: tuple[Tensor, Tensor]
) -> None:
    """With the shared gradient of the first step, and random starts that follow from the image's index."""
    images, labels = batch

    def right(attacked: Tensor) -> Tensor:
        with torch.no_grad():
            return victim(attacked).argmax(1) == labels

    def top1(restarts: int, random_start: bool = False) -> float:
        options = Options(eps=(10.0,), steps=2, restarts=restarts, random_start=random_start)
        (row,) = evaluate(trained, "pgd", digits, options=options, batch_size=7, progress=False)
        return row.value

    def noise(start: int) -> Tensor:
        seeds = [mix_seed("pgd", 0, start, index) for index in range(len(labels))]
        return torch.stack(
            [2 * torch.rand(images.shape[1:], generator=torch.Generator().manual_seed(seed)) - 1 for seed in seeds]
        )

    survived = right(pgd(victim, images, labels, 10.0, steps=2))
    assert top1(1) == pytest.approx(100 * survived.float().mean().item())
    first = right(pgd(victim, images, labels, 10.0, steps=2, noise=noise(0)))
    assert top1(1, random_start=True) == pytest.approx(100 * first.float().mean().item())
    for start in (1, 2, 3):
        survived &= right(pgd(victim, images, labels, 10.0, steps=2, noise=noise(start)))
    assert top1(4) == pytest.approx(100 * survived.float().mean().item())
    assert top1(4) < min(top1(1), top1(1, random_start=True))


def test_a_known_gradient_saves_the_first_step_only(victim: PixelModel, batch: tuple[Tensor, Tensor]) -> None:
    images, labels = batch
    gradient = loss_gradient(victim, images, labels)
    assert fgsm(victim, images, labels, 8.0, gradient=gradient).equal(fgsm(victim, images, labels, 8.0))
    expected = pgd(victim, images, labels, 8.0, steps=3)
    assert pgd(victim, images, labels, 8.0, steps=3, gradient=gradient).equal(expected)
    assert not pgd(victim, images, labels, 8.0, steps=1, gradient=gradient).equal(expected)


def test_steps_are_checked(victim: PixelModel, batch: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(RecastError, match="at least 1 step"):
        pgd(victim, *batch, 1.0, steps=0)


@pytest.mark.skipif(not os.environ.get("RECAST_SLOW"), reason="slow: set RECAST_SLOW=1")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("eps", [1.0, 8.0])
def test_attacks_equal_foolbox(eps: float, trained: nn.Module, digits: Data) -> None:
    foolbox = pytest.importorskip("foolbox")
    normalisation = {"mean": list(digits.mean), "std": list(digits.std), "axis": -3}
    reference = foolbox.PyTorchModel(trained, bounds=(0, 1), device="cpu", preprocessing=normalisation)
    victim = PixelModel(trained, digits.mean, digits.std)
    images, labels = digits.val.batch(range(len(digits.val)))
    step = 2.5 * eps / 5 / 255
    theirs = {
        "fgsm": foolbox.attacks.LinfFastGradientAttack(random_start=False),
        "pgd": foolbox.attacks.LinfPGD(abs_stepsize=step, steps=5, random_start=False),
    }
    for name, attack in theirs.items():
        _, expected, _ = attack(reference, images, labels, epsilons=eps / 255)
        attacked = ATTACKS[name](victim, images, labels, eps)
        # A gradient next to 0 may change its sign with rounding; such a pixel is off by up to 2ε, all others agree.
        assert ((attacked - expected).abs() > 1e-6).float().mean() < 1e-3
        assert (victim(attacked).argmax(1) == victim(expected).argmax(1)).all()
