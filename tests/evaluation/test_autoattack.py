from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recast.data import Data
from recast.errors import RecastError
from recast.evaluation.autoattack import auto_attack, score_autoattack, sources_autoattack
from recast.evaluation.bench import Bench, NotMeasured, Options, PixelModel, Suite
from recast.evaluation.measuring import score_suites

SUITE = Suite(score_autoattack, sources=sources_autoattack)


def make_bench(model: nn.Module, data: Data, count: int, *eps: float, batch_size: int = 4) -> Bench:
    from dataclasses import replace

    small = replace(data, val=data.val.subset(torch.arange(count)))
    models = {"m": PixelModel(model, data.mean, data.std)}
    return Bench(models, small, batch_size, torch.device("cpu"), Options(eps=eps))


class FakeAttack:
    """Turns images black, as far as ε allows."""

    calls: list[tuple[int, float, dict[str, Any]]] = []  # noqa: RUF012

    def __init__(self, model: nn.Module, eps: float, **options: Any) -> None:
        self.model, self.eps, self.options = model, eps, options
        self.fab = SimpleNamespace(n_target_classes=9)
        self.apgd_targeted = SimpleNamespace(n_target_classes=9)

    def run_standard_evaluation(self, images: Tensor, labels: Tensor, *, batch_size: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(self.options["seed"])
        targets = self.fab.n_target_classes, self.apgd_targeted.n_target_classes
        self.calls.append((len(images), self.eps, self.options | {"targets": targets}))
        pixels = images.clone().requires_grad_()
        self.model(pixels).sum().backward()  # as FAB does
        return (images - self.eps).clamp(min=0), labels


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeAttack]:
    FakeAttack.calls = []
    monkeypatch.setitem(sys.modules, "pyautoattack", SimpleNamespace(AutoAttack=FakeAttack))  # type: ignore[arg-type]
    return FakeAttack


def test_only_images_that_are_right_are_attacked(fake: type[FakeAttack], trained: nn.Module, digits: Data) -> None:
    bench = make_bench(trained, digits, 10, 0, 40, 255)
    found, _ = score_suites(bench, {"autoattack": SUITE})
    scores = found["autoattack"].scores["m"]
    assert list(scores) == ["top1@0", "top1@40", "top1@255"]
    images, labels = bench.data.val.batch(range(10))
    right = bench.logits("m", images).argmax(1) == labels
    assert 0 < right.sum() < 10 or right.all()
    assert scores["top1@0"][:, 0].tolist() == right.float().tolist()
    darker = (bench.logits("m", (images - 40 / 255).clamp(min=0)).argmax(1) == labels) & right
    assert scores["top1@40"][:, 0].tolist() == darker.float().tolist()
    assert sum(count for count, eps, _ in fake.calls if eps == 1.0) == int(right.sum())
    assert {eps for _, eps, _ in fake.calls} == {40 / 255, 1.0}
    assert fake.calls[0][2]["version"] == "standard"
    assert fake.calls[0][2]["norm"] == "Linf"
    assert len({options["seed"] for _, _, options in fake.calls}) == 3  # one for each batch


def test_nothing_is_left_behind(fake: type[FakeAttack], trained: nn.Module, digits: Data) -> None:
    images, labels = digits.val.batch([0, 1])
    frozen = next(trained.parameters()).requires_grad_(False)
    before = torch.get_rng_state()
    auto_attack(trained, images, labels, 4, seed=3)
    assert before.equal(torch.get_rng_state())
    assert all(parameter.grad is None for parameter in trained.parameters())
    assert [p.requires_grad for p in trained.parameters()] == [p is not frozen for p in trained.parameters()]
    frozen.requires_grad_(True)


def test_few_classes(fake: type[FakeAttack], digits: Data) -> None:
    images, labels = digits.val.batch([0, 1])
    auto_attack(nn.Sequential(nn.Flatten(), nn.Linear(768, 5)), images, labels % 5, 4)
    assert fake.calls[0][2]["targets"] == (4, 4)
    auto_attack(nn.Sequential(nn.Flatten(), nn.Linear(768, 30)), images, labels, 4)
    assert fake.calls[1][2]["targets"] == (9, 9)
    three = nn.Sequential(nn.Flatten(), nn.Linear(768, 3))
    with pytest.raises(RecastError, match="at least 4 classes, the model has 3"):
        auto_attack(three, images, labels % 3, 4)
    from dataclasses import replace

    with pytest.raises(RecastError, match="at least 4 classes, digits has 3: use pgd"):
        sources_autoattack(make_bench(three, replace(digits, classes=["a", "b", "c"]), 2, 1))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, trained: nn.Module, digits: Data) -> None:
    monkeypatch.setitem(sys.modules, "pyautoattack", None)  # type: ignore[arg-type]
    with pytest.raises(NotMeasured, match=r'pip install "recast-vision\[autoattack\]"'):
        sources_autoattack(make_bench(trained, digits, 2, 1))


def test_the_real_one(trained: nn.Module, digits: Data) -> None:
    """Weaker than nothing it is not: within ε, in [0, 1], the same again, and it finds what PGD finds."""
    pytest.importorskip("pyautoattack")
    from recast.evaluation.adversarial import pgd

    model = PixelModel(trained, digits.mean, digits.std)
    images, labels = digits.val.batch(range(6))
    right = model(images).argmax(1) == labels
    images, labels = images[right][:3], labels[right][:3]
    attacked = auto_attack(model, images, labels, 24, seed=1)
    assert (attacked - images).abs().max() <= 24 / 255 + 1e-6
    assert attacked.min() >= 0
    assert attacked.max() <= 1
    assert attacked.equal(auto_attack(model, images, labels, 24, seed=1))
    survived = model(attacked).argmax(1) == labels
    by_pgd = model(pgd(model, images, labels, 24, steps=20)).argmax(1) == labels
    assert not (survived & ~by_pgd).any()
    assert not survived.all()
    assert auto_attack(model, images, labels, 0) is images
