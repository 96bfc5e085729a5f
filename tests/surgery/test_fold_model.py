"""`fold_`: a whole model, its report, its BatchNorms, and the file that brings the folded model back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import recast
from recast.layers.config import PAPERS_LAYER, RecastConfig
from recast.layers.gpsa import gpsa_layers

PAPERS = RecastConfig(**PAPERS_LAYER)


X = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def parent() -> nn.Module:
    """A small ResNet whose BatchNorms do something."""
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=10).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.2)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
    return model


@pytest.fixture
def child(parent: nn.Module) -> nn.Module:
    """All four stages recast; the last stage's two layers half open."""
    model = recast.recast_(copy.deepcopy(parent), recast.plan(parent, X, PAPERS, where=["stage:2", "stage:3"])).eval()
    *_, first, second = gpsa_layers(model).values()
    with torch.no_grad():
        first.spread[2:5], first.gamma[1] = 0.4, 0.01
        second.gamma[:3], second.spread[0] = 0.3, 0.2
        second.key.normal_()
        for layer in (first, second):
            layer.value.add_(0.01 * torch.randn_like(layer.value))
    return model


@torch.no_grad()
def test_the_report_says_what_each_layer_became_and_what_it_changed(child: nn.Module, error_of: Any) -> None:
    expected = child(X)
    report = recast.fold_(child, data=X)
    *closed, first, second = report
    assert all(done.convolution and done.closed == 9 for done in closed)
    assert (first.convolution, first.gaussian, first.content, first.closed) == (False, 3, 1, 5)
    assert (second.convolution, second.gaussian, second.content, second.closed) == (False, 1, 3, 6)
    for done in report:
        assert done.change == 0
        assert done.output_error < 1e-5
    assert error_of(child(X), expected) < 1e-5
    assert [done.name for done in recast.fold_(child)] == [first.name, second.name]  # convolutions are left alone


@torch.no_grad()
def test_a_tolerance_changes_what_it_says(child: nn.Module, error_of: Any) -> None:
    expected = child(X)
    for module in child.modules():
        module.training = True  # as in a training loop; folding measures in eval mode
    report = recast.fold_(child, tol=0.02, data=X)
    assert all(module.training for module in child.modules())
    child.eval()
    *_, first, second = report
    assert (first.convolution, first.content, second.convolution) == (False, 0, False)
    assert first.change == pytest.approx(0.01)
    assert second.output_error == pytest.approx(error_of(child(X), expected), rel=1e-3)
    assert error_of(child(X), expected) > 1e-4


@torch.no_grad()
def test_a_sigmoid_models_content_is_pruned(parent: nn.Module, tmp_path: Path, error_of: Any) -> None:
    config = recast.RecastConfig(gate="sigmoid")
    child = recast.recast_(copy.deepcopy(parent), recast.plan(parent, X, config)).eval()
    for layer in gpsa_layers(child).values():
        layer.key.normal_()
        layer.lam[:4] = 6.0
    expected = child(X)
    report = recast.fold_(child, tol=0.01, data=X)
    assert {(done.gaussian, done.content, done.closed) for done in report} == {(9, 5, 0)}
    assert report[-1].output_error == pytest.approx(error_of(child(X), expected), rel=1e-3)
    loaded = recast.load(recast.save(child, tmp_path / "folded.safetensors"), parent=parent)
    assert torch.allclose(loaded(X), child(X), atol=1e-5)


@torch.no_grad()
def test_a_model_that_was_folded_twice_comes_back(child: nn.Module, parent: nn.Module, tmp_path: Path) -> None:
    recast.fold_(child)
    recast.fold_(child, tol=0.1)
    loaded = recast.load(recast.save(child, tmp_path / "folded.safetensors"), parent=parent)
    assert torch.equal(loaded(X), child(X))


def test_what_was_folded_away_leaves_nothing_to_train(child: nn.Module) -> None:
    """A parameter without elements: optimisers divide by their number, DistributedDataParallel waits for a gradient."""
    *_, first, _second = gpsa_layers(child).values()
    nn.init.zeros_(first.gamma)
    recast.fold_(child)
    empty = [p for p in child.train().parameters() if not p.numel()]
    assert len(empty) == 3
    assert not any(p.requires_grad for p in empty)
    optimizer = torch.optim.Adafactor([p for p in child.parameters() if p.requires_grad])
    child(X).sum().backward()
    optimizer.step()
    assert first.spread.grad is not None


def test_a_network_with_autocast_in_its_code_is_woken_and_folded() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.net(x).float().mean((2, 3))

    model, x = Half().eval(), torch.randn(64, 3, 8, 8)
    planned = recast.plan(model, x, PAPERS, where=["net.2"])
    recast.recast_(model, planned)
    assert len(recast.wake_(model, x)) == 1
    (folded,) = recast.fold_(model, data=x)
    assert folded.output_error == 0


@pytest.mark.parametrize("name", ["repvgg_a0", "repvit_m0_9"])
@torch.no_grad()
def test_blocks_that_merge_their_branches_keep_attention(name: str, error_of: Any) -> None:
    """timm's blocks read a convolution's kernel where W_out is: they wait until their layers are convolutions again."""
    torch.manual_seed(0)
    parent, x = timm.create_model(name, num_classes=5).eval(), X[:2, :, :32, :32]
    child = recast.recast_(copy.deepcopy(parent), recast.plan(parent, x, PAPERS)).eval()
    recast.wake_(child, x)
    for layer in gpsa_layers(child).values():
        nn.init.constant_(layer.gamma, 0.5)
    expected = child(x)
    merged = timm.utils.reparameterize_model(child)
    assert error_of(merged(x), expected) < 1e-5
    assert error_of(expected, parent(x)) > 1e-3
    assert len(list(merged.modules())) < len(list(child.modules()))  # the blocks without attention were merged
    assert len(gpsa_layers(merged)) == len(gpsa_layers(child)) > 0
    for layer in gpsa_layers(child).values():
        nn.init.zeros_(layer.gamma)
    merged = timm.utils.reparameterize_model(copy.deepcopy(child.eval()))
    assert error_of(merged(x), parent(x)) < 1e-5
    assert not gpsa_layers(merged)
    kinds = [type(module) for module in merged.modules()]
    assert kinds == [type(module) for module in timm.utils.reparameterize_model(parent).modules()]
