from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from recast.config import OptimConfig, RecastConfig, Recipe
from recast.errors import RecastError
from recast.surgery import gpsa_layers
from recast.training.optim import (
    WarmupCosine,
    check_trainable,
    close_averaged_gates_,
    learning_rates,
    make_optimizer,
    set_learning_rate,
    shrink_gates_,
)


def test_schedule_warms_up_linearly_and_falls_as_a_cosine() -> None:
    schedule = WarmupCosine.of(OptimConfig(lr=1e-3, warmup_lr=1e-5, min_lr=1e-4, warmup_epochs=2), 10, 5)
    factors = [schedule.factor(step) for step in range(50)]
    assert factors[0] == pytest.approx(1e-2)
    assert factors[5] == pytest.approx((1e-2 + 1) / 2)
    assert factors[10] == 1
    assert factors[-1] == pytest.approx(0.1)
    assert (factors[29] + factors[30]) / 2 == pytest.approx(0.55)  # halfway down, halfway between 1 and 0.1
    assert factors[:11] == sorted(factors[:11])
    assert factors[10:] == sorted(factors[10:], reverse=True)


@pytest.mark.parametrize(("epochs", "warmup"), [(1, 5.0), (2, 0.0), (1, 1.0), (0, 1.0)])
def test_schedule_of_short_runs_stays_between_its_ends(epochs: int, warmup: float) -> None:
    schedule = WarmupCosine.of(OptimConfig(warmup_epochs=warmup), epochs, 3)
    assert all(0 < schedule.factor(step) <= 1 for step in range(3 * epochs))
    if warmup == 0:
        assert schedule.factor(0) == 1


def test_every_group_keeps_its_ratio_through_warm_up_and_cosine(make_child: Callable[..., nn.Module]) -> None:
    config = OptimConfig(lr=1e-3, gate_lr=0.05, warmup_epochs=1)
    optimizer = make_optimizer(make_child(), config)
    schedule = WarmupCosine.of(config, 4, 3)
    for step in range(12):
        set_learning_rate(optimizer, schedule.factor(step))
        lr, gate_lr = learning_rates(optimizer)
        assert lr == pytest.approx(1e-3 * schedule.factor(step))
        assert gate_lr == pytest.approx(50 * lr)


def test_gates_have_the_default_rates_and_never_decay(make_child: Callable[..., nn.Module]) -> None:
    model = make_child()
    optimizer = make_optimizer(model, OptimConfig(lr=1e-3, weight_decay=0.1))
    groups = {group["name"]: group for group in optimizer.param_groups}
    assert isinstance(optimizer, torch.optim.AdamW)
    assert (groups["decay"]["weight_decay"], groups["gates"]["weight_decay"]) == (0.1, 0)
    assert groups["gates"]["lr"] == pytest.approx(1e-2)
    assert {id(p) for p in groups["gates"]["params"]} == {id(model[4].gamma), id(model[4].spread)}


def test_sigmoid_gates_learn_at_the_rate_of_the_paper(make_child: Callable[..., nn.Module]) -> None:
    assert learning_rates(make_optimizer(make_child(gate="sigmoid"), OptimConfig())) == (1e-4, 0.1)


def test_a_parent_has_no_gate_rate(parent: nn.Module) -> None:
    assert learning_rates(make_optimizer(parent, OptimConfig(lr=1e-3))) == (1e-3, None)


def test_gates_can_be_trained_alone(make_child: Callable[..., nn.Module]) -> None:
    config = OptimConfig(lr=0.0, gate_lr=0.1)
    optimizer = make_optimizer(make_child(), config)
    set_learning_rate(optimizer, WarmupCosine.of(config, 2, 4).factor(4))
    assert learning_rates(optimizer) == (0.0, 0.1)


def test_shrinking_moves_gates_towards_zero_and_stops_there(make_child: Callable[..., nn.Module]) -> None:
    layer = gpsa_layers(make_child())["4"]
    model = nn.Sequential(layer)
    optimizer = make_optimizer(model, OptimConfig(gate_lr=0.1))
    with torch.no_grad():
        layer.gamma.copy_(torch.tensor([0.5, -0.5, 0.01, -0.01, 0, 0.02, 0.3, 0.1, 0.2]))
        layer.spread.fill_(0.019)
    before = {name: p.clone() for name, p in layer.named_parameters()}
    shrink_gates_(optimizer, gate_l1=0.2)  # threshold 0.1 · 0.2
    expected = torch.tensor([0.48, -0.48, 0, 0, 0, 0, 0.28, 0.08, 0.18])
    assert torch.allclose(layer.gamma, expected, atol=1e-7)
    assert torch.equal(layer.gamma[2:6], torch.zeros(4))
    assert torch.equal(layer.spread, torch.zeros(9))
    assert all(torch.equal(p, before[n]) for n, p in layer.named_parameters() if n not in ("gamma", "spread"))


def test_averaged_gates_close_with_the_model(make_child: Callable[..., nn.Module]) -> None:
    model = make_child()
    averaged = copy.deepcopy(model)
    with torch.no_grad():
        model[4].gamma[3:] = 0.5
        averaged[4].gamma.fill_(0.25)
    close_averaged_gates_(averaged, model)
    assert averaged[4].gamma.tolist() == [0.0] * 3 + [0.25] * 6


def test_unknown_optimizer_names_the_nearest(make_recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(RecastError, match=r"no optimiser 'adamww'.*adamw"):
        check_trainable(make_recipe({"opt": "adamww"}))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"optim": {"lr": -1.0}}, "optim.lr"),
        ({"optim": {"lr": float("nan")}}, "optim.lr"),
        ({"optim": {"clip_grad": 0.0}}, "optim.clip_grad"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"ema_decay": 1.5}, "ema_decay"),
    ],
)
def test_numbers_that_cannot_train_are_named(
    make_recipe: Callable[..., Recipe], fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(RecastError, match=named):
        check_trainable(make_recipe(**fields))


def test_gate_l1_is_refused_for_the_sigmoid_gate(make_recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(RecastError, match="gate_l1"):
        check_trainable(make_recipe({"gate_l1": 0.1}, recast=RecastConfig(gate="sigmoid")))


def test_a_frozen_network_is_refused(parent: nn.Module) -> None:
    with pytest.raises(RecastError, match="nothing to train"):
        make_optimizer(parent.requires_grad_(False), OptimConfig())
