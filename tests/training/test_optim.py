from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import timm
import timm.optim
import torch
from timm.scheduler import CosineLRScheduler
from torch import nn

from recast.errors import RecastError
from recast.run.config import OptimConfig, RecastConfig, Recipe
from recast.surgery.apply import gpsa_layers, recast_
from recast.surgery.planning import plan
from recast.training.optim import (
    WarmupCosine,
    check_trainable,
    close_averaged_gates_,
    learning_rates,
    make_optimizer,
    optimizer_options,
    peak_lr,
    set_learning_rate,
    shrink_gates_,
)


def test_schedule_warms_up_linearly_and_falls_as_a_cosine() -> None:
    schedule = WarmupCosine.of(OptimConfig(lr=1e-3, warmup_lr=1e-5, min_lr=1e-4, warmup_epochs=2), 10, 5, 8)
    factors = [schedule.factor(step) for step in range(50)]
    assert factors[0] == pytest.approx(1e-2)
    assert factors[5] == pytest.approx((1e-2 + 1) / 2)
    assert factors[10] == 1
    assert factors[-1] == pytest.approx(0.1)
    assert (factors[29] + factors[30]) / 2 == pytest.approx(0.55)  # halfway down, halfway between 1 and 0.1
    assert factors[:11] == sorted(factors[:11])
    assert factors[10:] == sorted(factors[10:], reverse=True)


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize(("epochs", "warmup"), [(1, 5.0), (2, 0.0), (1, 1.0), (0, 1.0)])
def test_schedule_of_short_runs_stays_between_its_ends(epochs: int, warmup: float, prefix: bool) -> None:
    schedule = WarmupCosine.of(OptimConfig(warmup_epochs=warmup, warmup_prefix=prefix), epochs, 3, 8)
    assert all(0 < schedule.factor(step) <= 1 for step in range(3 * epochs))
    if warmup == 0:
        assert schedule.factor(0) == 1


# DeiT III: 400 epochs, lr 3e-3, 5 of warm-up; values of the published schedule at the start of an epoch
DEIT3 = {0: 1e-6, 1: 6.008e-4, 4: 2.4002e-3, 5: 2.99885e-3, 100: 2.56212e-3, 200: 1.505e-3, 399: 1.005e-5, 400: 1e-5}


@pytest.mark.parametrize("steps_per_epoch", [1, 7])
def test_schedule_without_prefix_has_the_published_values(steps_per_epoch: int) -> None:
    config = OptimConfig(lr=3e-3, warmup_epochs=5, warmup_lr=1e-6, min_lr=1e-5, warmup_prefix=False)
    schedule = WarmupCosine.of(config, 400, steps_per_epoch, 2048)
    for epoch, expected in DEIT3.items():
        assert 3e-3 * schedule.factor(epoch * steps_per_epoch) == pytest.approx(expected, rel=1e-5, abs=5e-9)
    shifted = WarmupCosine.of(OptimConfig(lr=3e-3, warmup_epochs=5, min_lr=1e-5), 400, steps_per_epoch, 2048)
    assert 3e-3 * shifted.factor(100 * steps_per_epoch) > 2.59e-3  # the cosine begins five epochs later


def test_schedule_without_prefix_is_timms() -> None:
    config = OptimConfig(lr=0.1, warmup_epochs=3, warmup_lr=1e-3, min_lr=1e-2, warmup_prefix=False)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    theirs = CosineLRScheduler(optimizer, t_initial=20, lr_min=1e-2, warmup_t=3, warmup_lr_init=1e-3)
    ours = WarmupCosine.of(config, 20, 1, 8)
    for epoch in range(20):
        theirs.step(epoch)
        assert 0.1 * ours.factor(epoch) == pytest.approx(optimizer.param_groups[0]["lr"])


def test_rates_scale_with_the_batch_but_absolute_ones_do_not() -> None:
    config = OptimConfig(lr=5e-4, base_batch=512, warmup_lr=1e-6, min_lr=1e-5, warmup_epochs=1)
    assert peak_lr(config, 1024) == pytest.approx(1e-3)
    assert peak_lr(config, 128) == pytest.approx(1.25e-4)
    assert peak_lr(OptimConfig(lr=5e-4), 1024) == 5e-4
    schedule = WarmupCosine.of(config, 3, 4, 1024)
    assert 1e-3 * schedule.factor(0) == pytest.approx(1e-6)
    assert 1e-3 * schedule.factor(11) == pytest.approx(1e-5)


def test_gates_follow_the_scaled_rate_unless_they_have_their_own(make_child: Callable[..., nn.Module]) -> None:
    child = make_child()
    rates = learning_rates(make_optimizer(child, OptimConfig(lr=1e-3, base_batch=4), 8))
    assert rates == (pytest.approx(2e-3), pytest.approx(2e-2))
    rates = learning_rates(make_optimizer(child, OptimConfig(lr=1e-3, base_batch=4, gate_lr=0.5), 8))
    assert rates == (pytest.approx(2e-3), 0.5)


def test_every_group_keeps_its_ratio_through_warm_up_and_cosine(make_child: Callable[..., nn.Module]) -> None:
    config = OptimConfig(lr=1e-3, gate_lr=0.05, warmup_epochs=1)
    optimizer = make_optimizer(make_child(), config, 8)
    schedule = WarmupCosine.of(config, 4, 3, 8)
    for step in range(12):
        set_learning_rate(optimizer, schedule.factor(step))
        lr, gate_lr = learning_rates(optimizer)
        assert lr == pytest.approx(1e-3 * schedule.factor(step))
        assert gate_lr == pytest.approx(50 * lr)


def test_gates_have_the_default_rates_and_never_decay(make_child: Callable[..., nn.Module]) -> None:
    model = make_child()
    optimizer = make_optimizer(model, OptimConfig(lr=1e-3, weight_decay=0.1), 8)
    groups = {group["name"]: group for group in optimizer.param_groups}
    assert isinstance(optimizer, torch.optim.AdamW)
    assert (groups["decay"]["weight_decay"], groups["gates"]["weight_decay"]) == (0.1, 0)
    assert groups["gates"]["lr"] == pytest.approx(1e-2)
    assert {id(p) for p in groups["gates"]["params"]} == {id(model[4].gamma), id(model[4].spread)}


def test_sigmoid_gates_learn_at_the_rate_of_the_paper(make_child: Callable[..., nn.Module]) -> None:
    assert learning_rates(make_optimizer(make_child(gate="sigmoid"), OptimConfig(), 8)) == (1e-4, 0.1)


def test_a_parent_has_no_gate_rate(parent: nn.Module) -> None:
    assert learning_rates(make_optimizer(parent, OptimConfig(lr=1e-3), 8)) == (1e-3, None)


def test_gates_can_be_trained_alone(make_child: Callable[..., nn.Module]) -> None:
    config = OptimConfig(lr=0.0, gate_lr=0.1)
    optimizer = make_optimizer(make_child(), config, 8)
    set_learning_rate(optimizer, WarmupCosine.of(config, 2, 4, 8).factor(4))
    assert learning_rates(optimizer) == (0.0, 0.1)


# --- layers with rates of their own -----------------------------------------------------------------------------------


def layered_child() -> nn.Module:
    model = timm.create_model("test_resnet", num_classes=3)
    return recast_(model, plan(model, torch.zeros(1, 3, 64, 64), where=["layer4.0.conv2"]))


def test_layer_decay_reaches_the_optimiser_and_the_rates_are_those_of_the_last_layers() -> None:
    optimizer = make_optimizer(layered_child(), OptimConfig(lr=1e-2, layer_decay=0.5), 8)
    names = {str(group["name"]): float(group["peak_lr"]) for group in optimizer.param_groups}
    layers = sorted({int(name.partition("/")[2]) for name in names})
    head = layers[-1]
    for name, rate in names.items():
        kind, _, layer = name.partition("/")
        assert rate == pytest.approx((1e-1 if kind == "gates" else 1e-2) * 0.5 ** (head - int(layer))), name
    (gates,) = (rate for name, rate in names.items() if name.startswith("gates/"))
    assert learning_rates(optimizer) == (pytest.approx(1e-2), pytest.approx(gates))


def test_gates_of_layers_shrink_too() -> None:
    model = layered_child()
    optimizer = make_optimizer(model, OptimConfig(lr=1e-2, layer_decay=0.5, gate_lr=0.1), 8)
    (layer,) = gpsa_layers(model).values()
    with torch.no_grad():
        layer.gamma.fill_(0.3)
    rate = learning_rates(optimizer)[1]
    assert rate is not None
    assert rate < 0.1  # the layer is below the head
    shrink_gates_(optimizer, gate_l1=1.0)
    assert torch.allclose(layer.gamma, torch.full_like(layer.gamma, 0.3 - rate))


def test_layer_decay_needs_a_network_with_layers(parent: nn.Module) -> None:
    with pytest.raises(RecastError, match="Sequential does not: leave layer_decay out"):
        make_optimizer(parent, OptimConfig(layer_decay=0.75), 8)


# --- optimisers -------------------------------------------------------------------------------------------------------


def test_lamb_leaves_clipping_to_us(parent: nn.Module) -> None:
    def step(scale: float) -> list[torch.Tensor]:
        network = copy.deepcopy(parent)
        optimizer = make_optimizer(network, OptimConfig(opt="lamb", lr=1e-2, eps=1.0, weight_decay=0.0), 8)
        assert all(group["max_grad_norm"] is None for group in optimizer.param_groups)
        for index, parameter in enumerate(network.parameters()):
            parameter.grad = torch.full_like(parameter, scale * (index + 1))
        optimizer.step()
        return [p.detach() for p in network.parameters()]

    # with its own clipping at norm 1, gradients of any larger length would give the same step
    assert any(not torch.allclose(a, b) for a, b in zip(step(1.0), step(100.0), strict=True))


@pytest.mark.parametrize("name", [n for n in timm.optim.list_optimizers() if "lamb" in n])
def test_every_lamb_is_told(name: str) -> None:
    limit = optimizer_options(OptimConfig(opt=name))["max_grad_norm"]
    assert limit is None or (name == "fusedlamb" and limit == math.inf)


def test_options_reach_the_optimiser_that_takes_them(parent: nn.Module) -> None:
    config = OptimConfig(opt="adamw", betas=(0.8, 0.95), eps=1e-4)
    (group, *_) = make_optimizer(parent, config, 8).param_groups
    assert (group["betas"], group["eps"]) == ((0.8, 0.95), 1e-4)
    (group, *_) = make_optimizer(parent, OptimConfig(opt="sgd", momentum=0.7), 8).param_groups
    assert group["momentum"] == 0.7
    (group, *_) = make_optimizer(parent, OptimConfig(opt="lamb"), 8).param_groups
    assert (group["betas"], group["eps"]) == ((0.9, 0.999), 1e-6)  # LAMB's own


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"opt": "adamw", "momentum": 0.8}, "optim.momentum is 0.8, but optimiser adamw has no momentum"),
        ({"opt": "sgd", "betas": (0.9, 0.99)}, "optim.betas .* optimiser sgd has no betas"),
        ({"opt": "lion", "eps": 1e-6}, "optim.eps .* lion has no eps"),
        ({"opt": "adan", "betas": (0.9, 0.99)}, "adan has 3 betas"),
        ({"opt": "adamww"}, r"no optimiser 'adamww'.*adamw"),
    ],
)
def test_options_that_an_optimiser_does_not_take_are_named(
    make_recipe: Callable[..., Recipe], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecastError, match=message):
        check_trainable(make_recipe(fields))


def test_what_timm_says_of_its_optimisers_is_so() -> None:
    """`optimizer_options` believes it."""
    for name in timm.optim.list_optimizers():
        if name.startswith(("bnb", "fused")):  # cannot be looked at without a GPU
            continue
        info = timm.optim.get_optimizer_info(name)
        taken = inspect.signature(timm.optim.get_optimizer_class(name, bind_defaults=False)).parameters
        assert (info.has_momentum, info.has_betas, info.has_eps) == tuple(
            option in taken for option in ("momentum", "betas", "eps")
        ), name
        assert ("max_grad_norm" in taken) == ("lamb" in name)


def test_an_optimiser_that_cannot_be_had_is_one_line(parent: nn.Module) -> None:
    with pytest.raises(RecastError, match=r"optimiser sgd cannot be used here .*omentum.*: choose another") as error:
        make_optimizer(parent, OptimConfig(opt="sgd", momentum=0.0), 8)  # timm's sgd is Nesterov's
    assert "\n" not in str(error.value)


def test_numbers_out_of_range_are_refused(make_recipe: Callable[..., Recipe]) -> None:
    check_trainable(make_recipe())
    with pytest.raises(RecastError, match=r"optim.lr must be 0 or a positive number, got -1.0"):
        check_trainable(make_recipe({"lr": -1.0}))


def test_gate_l1_is_refused_for_the_sigmoid_gate(make_recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(RecastError, match="gate_l1"):
        check_trainable(make_recipe({"gate_l1": 0.1}, recast=RecastConfig(gate="sigmoid")))


def test_a_frozen_network_is_refused(parent: nn.Module) -> None:
    with pytest.raises(RecastError, match="nothing to train"):
        make_optimizer(parent.requires_grad_(False), OptimConfig(), 8)


# --- gates ------------------------------------------------------------------------------------------------------------


def test_shrinking_moves_gates_towards_zero_and_stops_there(make_child: Callable[..., nn.Module]) -> None:
    layer = gpsa_layers(make_child())["4"]
    model = nn.Sequential(layer)
    optimizer = make_optimizer(model, OptimConfig(gate_lr=0.1), 8)
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
