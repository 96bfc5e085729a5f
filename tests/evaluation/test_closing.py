import copy
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

import recast
from recast.errors import RecastError
from recast.lab.config.evaluation import Options
from recast.lab.data import Data
from recast.lab.evaluation import closing, frontier
from recast.lab.evaluation.closing import close_, closing_, heads_left
from recast.lab.evaluation.runner import open_context
from recast.layers.cmhsa import gated_layers
from recast.layers.config import PAPERS_LAYER
from recast.surgery.scales import recalibrate_batch_norm_

X = torch.randn(24, 3, 16, 16, generator=torch.Generator().manual_seed(1))
Y = torch.arange(24) % 10


def network(gate: str) -> nn.Module:
    """Two recast layers, every head open by its own amount."""
    torch.manual_seed(0)
    parent = timm.create_model("digits_resnet", num_classes=10).eval()
    config = recast.RecastConfig(gate=gate, query_key="random", **PAPERS_LAYER)
    model = recast.recast_(parent, recast.plan(parent, X[:1], config, where=["layer3.1.conv1", "layer3.1.conv2"]))
    with torch.no_grad():
        for layer in gated_layers(model).values():
            for parameter in (layer.lam,) if gate == "sigmoid" else (layer.gamma, layer.spread):
                parameter.copy_(torch.randn(9))
            layer.key.normal_()
    return model.eval()


def loss_of(model: nn.Module) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(model(X[::2]), Y[::2]))


@pytest.mark.parametrize("gate", ["linear", "sigmoid"])
def test_the_head_that_is_missed_least_goes_first(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "TRIED", 18)
    model = network(gate)
    alone = {}
    for name, head in heads_left(model):
        without: Any = copy.deepcopy(model)
        layer = without.get_submodule(name)
        heads = [h for h in range(9) if h != head]
        layer.prune_(heads if gate == "linear" else range(9), heads)
        alone[name, head] = loss_of(without)
    first = next(closing_(model, X, Y))
    assert (first.layer, first.head) == min(alone, key=alone.__getitem__)
    assert len(heads_left(model)) == 17
    assert first.loss == pytest.approx(loss_of(model), rel=1e-5)


def test_beside_a_convolution_the_gates_of_all_channels_close_together() -> None:
    torch.manual_seed(0)
    parent = timm.create_model("digits_resnet", num_classes=10).eval()
    model: Any = recast.recast_(copy.deepcopy(parent), recast.plan(parent, X[:1])).double()
    with torch.no_grad():
        for layer in gated_layers(model).values():
            layer.gamma.copy_(torch.randn(layer.out_channels))
            layer.key.normal_()
    batches, step = [(X[::2].double(), Y[::2])], 1e-3
    before, added = closing._loss(model, batches), closing._added(model, batches)
    for name, head in heads_left(model):
        without, moved = copy.deepcopy(model), copy.deepcopy(model)
        without.get_submodule(name).prune_((), ())
        with closing._without(model.get_submodule(name), head):
            assert closing._loss(model, batches) == closing._loss(without, batches) != before
        with torch.no_grad():
            moved.get_submodule(name).gamma.mul_(1 - step)
        assert added[name, head] == pytest.approx((closing._loss(moved, batches) - before) / step, rel=0.02, abs=5e-4)


@pytest.mark.parametrize("gate", ["linear", "sigmoid"])
def test_the_first_order_is_the_slope_of_the_loss(gate: str) -> None:
    """Shares moved a little towards closed change the loss by as little of what closing adds."""
    model, step = network(gate).double(), 1e-3
    batches = [(X[::2].double(), Y[::2])]
    before = closing._loss(model, batches)
    measured = {}
    for name, head in heads_left(model):
        moved: Any = copy.deepcopy(model)
        layer = moved.get_submodule(name)
        with torch.no_grad():
            if gate == "linear":
                layer.gamma[head] *= 1 - step
                layer.spread[head] *= 1 - step
            else:
                layer.lam[head] = torch.logit(1 - (1 - layer.lam[head].sigmoid()) * (1 - step))
        measured[name, head] = (closing._loss(moved, batches) - before) / step
    assert closing._added(model, batches) == pytest.approx(measured, rel=0.02, abs=5e-4)


def test_to_the_last_head_it_is_the_network_without_attention(error_of: Any) -> None:
    model = network("linear")
    expected = copy.deepcopy(model)
    steps = list(closing_(model, X, Y))
    heads = [(step.layer, step.head) for step in steps]
    assert len(set(heads)) == len(heads) == 18
    recast.fold_(expected, tol=float("inf"))
    recalibrate_batch_norm_(expected, [X])
    with torch.no_grad():
        assert error_of(model(X), expected(X)) < 1e-5
    model = network("linear")
    close_(model, heads[:7], X)
    assert len(heads_left(model)) == 11
    assert steps[6].loss == pytest.approx(loss_of(model), rel=1e-4)


def test_the_frontier_counts_the_open_heads_of_every_network(digits: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontier, "SECONDS", 0.0)
    models = {"finetuned": network("linear"), "recast": network("linear")}
    for model in models.values():
        close_(model, heads_left(model)[2:], X)
    table = frontier.tabulate_frontier(open_context(models, digits, options=Options(num_images=20)))
    assert [row[:2] for row in table.rows] == [("finetuned", 2), ("recast", 2), ("recast", 1), ("recast", 0)]


def test_what_cannot_be_closed() -> None:
    with pytest.raises(RecastError, match="no open head"):
        next(closing_(timm.create_model("digits_resnet", num_classes=10), X, Y))
    model = network("linear")
    with pytest.raises(RecastError, match=r"CifarResNet has no open head 9 in layer3\.1\.conv1"):
        close_(model, [("layer3.1.conv1", 9)], X)
    assert len(heads_left(model)) == 18
