"""Folding: a layer keeps its function, and `fold_` reports what it made of a model, which a file brings back."""

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from layer_helpers import PAD_1, PAPERS, InCode, outputs_and_gradients, recast_copy
from torch import Tensor, nn

import recast
from recast.layers.cmhsa import gated_layers
from recast.layers.config import PAPERS_LAYER, RecastConfig
from recast.layers.gpsa import GPSA
from recast.surgery.rules import convert
from recast.surgery.scales import randomize_scales_

X = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def parent() -> nn.Module:
    """A small ResNet whose BatchNorms do something."""
    return randomize_scales_(timm.create_model("resnet10t", num_classes=10).eval(), X)


@pytest.fixture
def child(parent: nn.Module) -> nn.Module:
    """All four stages recast; the last stage's two layers half open."""
    model = recast_copy(parent, X, where=["stage:2", "stage:3"]).eval()
    *_, first, second = gated_layers(model).values()
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


def test_a_folded_network_is_not_recast_again(parent: nn.Module) -> None:
    child = recast_copy(parent, X)
    recast.fold_(child)
    with pytest.raises(recast.RecastError, match="was recast and folded"):
        recast.recast_(child, recast.plan(child, X))


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
    child = recast_copy(parent, X, RecastConfig(gate="sigmoid")).eval()
    for layer in gated_layers(child).values():
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
    """No parameter without elements: optimisers divide by their number, norms and histograms fail on them."""
    *_, first, _second = gated_layers(child).values()
    nn.init.zeros_(first.gamma)
    recast.fold_(child)
    assert first.gamma is first.query is first.key is None
    assert all(p.numel() for p in child.train().parameters())
    optimizer = torch.optim.Adafactor(child.parameters())
    child(X).sum().backward()
    optimizer.step()
    assert first.spread.grad is not None


def test_a_network_with_autocast_in_its_code_is_woken_and_folded() -> None:
    def half(m: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return m.net(x).float().mean((2, 3))

    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
    model, x = InCode(half, net=net).eval(), torch.randn(64, 3, 8, 8)
    recast.recast_(model, recast.plan(model, x, PAPERS, where=["net.2"]))
    assert len(recast.wake_(model, x)) == 1
    (folded,) = recast.fold_(model, data=x)
    assert folded.output_error == 0


@pytest.mark.parametrize("name", ["repvgg_a0", "repvit_m0_9"])
@torch.no_grad()
def test_blocks_that_merge_their_branches_keep_attention(name: str, error_of: Any) -> None:
    """timm's blocks read a convolution's kernel where W_out is: they wait until their layers are convolutions again."""
    parent, x = timm.create_model(name, num_classes=5).eval(), X[:2, :, :32, :32]
    child = recast_copy(parent, x).eval()
    recast.wake_(child, x)
    for layer in gated_layers(child).values():
        nn.init.constant_(layer.gamma, 0.5)
    expected = child(x)
    merged = timm.utils.reparameterize_model(child)
    assert error_of(merged(x), expected) < 1e-5
    assert error_of(expected, parent(x)) > 1e-3
    assert len(list(merged.modules())) < len(list(child.modules()))  # the blocks without attention were merged
    assert len(gated_layers(merged)) == len(gated_layers(child)) > 0
    for layer in gated_layers(child).values():
        nn.init.zeros_(layer.gamma)
    merged = timm.utils.reparameterize_model(copy.deepcopy(child.eval()))
    assert error_of(merged(x), parent(x)) < 1e-5
    assert not gated_layers(merged)
    kinds = [type(module) for module in merged.modules()]
    assert kinds == [type(module) for module in timm.utils.reparameterize_model(parent).modules()]


def partly_closed(layer: GPSA, seed: int) -> GPSA:
    """Every third Gaussian and every second content map closed."""
    with torch.no_grad():
        if layer.config.gate == "linear":
            layer.spread[seed % 3 :: 3] = 0
            layer.gamma[seed % 2 :: 2] = 0
        else:
            layer.lam[seed % 2 :: 2] = 800  # 1 − σ(800) is 0 in fp64
    return layer


@pytest.mark.parametrize("gate", ["linear", "sigmoid"])
@pytest.mark.parametrize("start", range(0, 40, 20))
def test_what_is_closed_goes_and_the_function_stays(
    gate: Any, start: int, random_case: Any, open_gates: Any, error_of: Any
) -> None:
    """Random geometries, all four forms, outputs and the gradients of what is left."""
    for seed in range(start, start + 20):
        conv, x, text = random_case(seed)
        layer = partly_closed(open_gates(convert(conv, RecastConfig(gate=gate, **PAPERS_LAYER)), seed), seed)
        expected = outputs_and_gradients(layer, x)
        largest = max(float(value.abs().max()) for name, value in expected.items() if name != "output")
        folded = copy.deepcopy(layer).fold()
        if not isinstance(folded, GPSA):
            assert layer.num_heads <= 2, text
            continue
        assert folded.value is None, text
        content = [h for h in range(layer.num_heads) if h % 2 != seed % 2]
        assert folded.content_heads == tuple(content), text
        if content:
            assert folded.query.shape == (len(content) * layer.head_dim, layer.in_channels), text
        for form in ("reference", "dense", "split", "merged"):
            measured = outputs_and_gradients(folded, x, form)
            assert error_of(measured["output"], expected["output"]) <= 1e-10, f"{form}, {text}"
            # W_val was multiplied into W_out, and a rule of the chain between them is not the point here
            for name in measured.keys() & {"input", "bias", "raw_alpha", "center"}:
                value = expected[name]
                if name in ("raw_alpha", "center"):
                    value = value[list(folded.gaussian_heads)]
                scale = max(float(value.abs().max()), 1e-5 * largest)
                assert float((measured[name] - value).abs().max()) <= 1e-9 * scale, f"{form} {name}, {text}"


def test_pruned_maps_keep_their_heads_and_stay_closed_in_training(open_gates: Any) -> None:
    layer = open_gates(GPSA(4, 4, PAD_1, config=PAPERS))
    with torch.no_grad():
        layer.gamma[[0, 8]], layer.spread[4] = 0, 0
    before, x = {name: value.detach().clone() for name, value in layer.gates().items()}, torch.randn(2, 4, 6, 6)
    shapes = [maps.shape for maps in layer.attention(x)]
    assert layer.fold() is layer
    assert (layer.content_heads, len(layer.gaussian_heads)) == (tuple(range(1, 8)), 8)
    assert all(torch.equal(value, before[name]) for name, value in layer.gates().items())
    assert [maps.shape for maps in layer.attention(x)] == shapes
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        assert all(p.grad is not None for p in layer.parameters())  # nothing unused, as DDP asks
        optimizer.step()
    for name, value in layer.gates().items():
        assert torch.equal(value == 0, before[name] == 0)
