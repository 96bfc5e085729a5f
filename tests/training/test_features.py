from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recast import param_groups
from recast.errors import RecastError
from recast.lab.networks import CifarResNet
from recast.lab.training.features import FeatureDistillation, keep_recast_gradients_
from recast.layers.config import RecastConfig
from recast.layers.gpsa import gpsa_layers
from recast.surgery.apply import recast_
from recast.surgery.planning import plan
from recast.tracing.hooks import in_eval

RECAST = ["4", "6"]


def stripes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Waves that run down, across or along the diagonal: a blurred convolution cannot tell them."""
    generator = torch.Generator().manual_seed(seed)
    labels, steps = torch.arange(count) % 3, torch.arange(12.0)
    down = steps[:, None].expand(12, 12)
    waves = torch.stack([down, down.T, down + down.T])[labels][:, None]
    phase = 6.3 * torch.rand(count, 1, 1, 1, generator=generator)
    colour = torch.tensor([1.0, 0.5, -1.0]).view(3, 1, 1)
    return torch.sin(1.6 * waves + phase) * colour + 0.3 * torch.randn(count, 3, 12, 12, generator=generator), labels


def network() -> nn.Sequential:
    """Convolutions before BatchNorm and before an in-place ReLU, and dropout ahead of the layers that are recast."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.2),
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


@pytest.fixture(scope="module")
def parent() -> nn.Sequential:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(100):
        images, labels = stripes(32, step)
        if step < 40:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        else:  # the running statistics settle
            model(images)
    model.zero_grad()
    return model


def recast_copy(parent: nn.Module, **config: Any) -> nn.Module:
    torch.manual_seed(1)
    planned = plan(parent, torch.zeros(1, 3, 12, 12), RecastConfig(**{"gate": "sigmoid", **config}), where=RECAST)
    return recast_(copy.deepcopy(parent), planned).train()


@pytest.fixture
def student(parent: nn.Module) -> nn.Module:
    return recast_copy(parent)


def relative_error(given: Tensor, wanted: Tensor) -> float:
    return ((given - wanted) ** 2).sum().item() / (wanted**2).sum().item()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def test_warm_up_brings_a_soft_start_to_its_parent(parent: nn.Module, student: nn.Module) -> None:
    """30 updates: all errors, the logits' too, to less than a third; nothing but the recast layers moves or decays."""
    test, _ = stripes(96, seed=999)
    with torch.no_grad(), in_eval(parent):
        wanted = parent(test)

    def logits_error() -> float:
        with torch.no_grad(), in_eval(student):
            return float((student(test) - wanted).norm() / (wanted - wanted.mean(0)).norm())

    before, start = copy.deepcopy(student.state_dict()), logits_error()
    recast = tuple(f"{layer}." for layer in gpsa_layers(student))
    optimizer = torch.optim.AdamW(param_groups(student, lr=2e-2, weight_decay=0.1))
    errors: list[dict[str, float]] = []
    with FeatureDistillation(student, parent) as features:
        for step in range(30):
            images, labels = stripes(16, 100 + step)
            optimizer.zero_grad()
            features(student(images), images, labels).backward()
            keep_recast_gradients_(student)
            optimizer.step()
            errors.append({name: float(error) for name, error in features.errors.items()})
    assert list(errors[0]) == RECAST
    assert min(errors[0].values()) > 0.4
    assert all(errors[-1][name] < errors[0][name] / 3 for name in RECAST)
    assert start > 0.6
    assert logits_error() < start / 3
    for name, value in student.state_dict().items():
        moves = name.startswith(recast) or "running" in name or "num_" in name
        assert torch.equal(value, before[name]) != moves, name
    assert not any(module._forward_hooks for module in student.modules())


def test_the_linear_gate_starts_at_zero_also_while_batch_norm_and_dropout_train(parent: nn.Module) -> None:
    student, (images, labels) = recast_copy(parent, gate="linear"), stripes(8, 1)
    with FeatureDistillation(student, parent) as features:
        assert features(student.eval()(images), images, labels).item() < 1e-12
        for module in student.modules():
            module.training = not isinstance(module, nn.BatchNorm2d)  # frozen: for both
        assert features(student(images), images, labels).item() < 1e-12
        assert features(student.train()(images), images, labels).item() < 1e-12


def test_the_loss_is_the_mean_of_the_layers_relative_errors(parent: nn.Module, student: nn.Module) -> None:
    """In eval mode, layer by layer, by hand: before the in-place ReLU that follows layer 4."""
    images, labels = stripes(8, 1)
    assert isinstance(student, nn.Sequential)
    assert isinstance(parent, nn.Sequential)
    with FeatureDistillation(student.eval(), parent) as features:
        loss = features(student(images), images, labels)
    with in_eval(parent):
        expected = [relative_error(student[:end](images), parent[:end](images)) for end in (5, 7)]
    assert [float(e) for e in features.errors.values()] == pytest.approx(expected, rel=1e-5)
    assert loss.item() == pytest.approx(sum(expected) / 2, rel=1e-5)


def test_watching_changes_neither_the_student_nor_the_parent(parent: nn.Module, student: nn.Module) -> None:
    images, labels = stripes(8, 1)
    unwatched, before = copy.deepcopy(student), copy.deepcopy(parent.state_dict())
    mode = parent.training
    torch.manual_seed(7)
    outputs, next_draw = unwatched(images), torch.rand(3)
    features = FeatureDistillation(student, parent)
    own = copy.deepcopy(features.parent.state_dict())
    with features:
        torch.manual_seed(7)
        assert torch.equal(student(images), outputs)  # the same dropout
        assert torch.equal(torch.rand(3), next_draw)
        features(outputs, images, labels).backward()
    for now, then in ((parent.state_dict(), before), (features.parent.state_dict(), own)):
        assert all(torch.equal(value, then[name]) for name, value in now.items())
    assert parent.training == mode
    assert all(p.requires_grad and p.grad is None for p in parent.parameters())


def test_gradients_of_parts_add_up_and_others_are_forgotten(parent: nn.Module, student: nn.Module) -> None:
    recast = {id(p) for layer in gpsa_layers(student).values() for p in layer.parameters()}
    student.eval()  # BatchNorm would see another batch
    with FeatureDistillation(student, parent) as features:
        alone = []
        for seed in (1, 2):
            images, labels = stripes(8, seed)
            student.zero_grad()
            features(student(images), images, labels).backward()
            alone.append(gradients(student))
        student.zero_grad()
        for seed in (1, 2):
            images, labels = stripes(8, seed)
            features(student(images), images, labels).backward()
    together = gradients(student)
    assert all(p.grad is not None for p in student.parameters()), "DistributedDataParallel waits for every one"
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, alone[0][name] + alone[1][name])
    assert bool(student.get_parameter("0.weight").grad.any())  # the errors reach it: it has to be forgotten
    keep_recast_gradients_(student)
    for name, parameter in student.named_parameters():
        assert (parameter.grad is not None) == (id(parameter) in recast), name


def test_layers_that_cannot_be_compared_are_refused(parent: nn.Module, student: nn.Module) -> None:
    images, labels = stripes(8, 1)
    with mock.patch.object(torch, "compile", lambda function, **_: function):  # the real one takes seconds to import
        (compiled := copy.deepcopy(student)).compile()
    strided = CifarResNet((1, 1, 1), widths=(2, 2, 4), num_classes=3)
    removed = plan(strided, torch.zeros(1, 3, 16, 16), RecastConfig(stride="remove"), where="last_stage")
    for network, source, message in (
        (parent, parent, "Sequential has no recast layers"),
        (student, student, "the parent has no convolution at '4'"),
        (compiled, parent, r"torch\.compile leaves out"),
        (recast_(copy.deepcopy(strided), removed), strided, "stride='remove' changes it"),
    ):
        with pytest.raises(RecastError, match=message):
            FeatureDistillation(network, source)
    halved = copy.deepcopy(parent)
    halved.get_submodule("6").stride = (2, 2)  # type: ignore[assignment]
    with FeatureDistillation(student, halved) as features:
        outputs = student(images)
        with pytest.raises(RecastError, match=r"6 gives \(8, 8, 6, 6\), its convolution in the parent \(8, 8, 3, 3\)"):
            features(outputs, images, labels)
