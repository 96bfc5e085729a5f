from typing import Any

import pytest
import timm
import timm.optim
import torch
from small import small_child, small_parent
from timm.scheduler import CosineLRScheduler
from torch import nn

from recast import RecastError, plan, recast_
from recast.lab.config import OptimConfig
from recast.lab.training.optim import WarmupDecay, learning_rates, make_optimizer, shrink_gates_
from recast.layers.cmhsa import gated_layers
from recast.layers.config import PAPERS_LAYER


def rates(model: nn.Module, **fields: Any) -> tuple[float, float | None]:
    """Peak rates of weights and gates, for batches of 8."""
    return learning_rates(make_optimizer(model, OptimConfig(**fields), 8))


def test_schedule_warms_up_linearly_and_falls_as_a_cosine() -> None:
    schedule = WarmupDecay(OptimConfig(lr=1e-3, warmup_lr=1e-5, min_lr=1e-4, warmup_epochs=2), 10, 5, 8)
    factors = [schedule.factor(step) for step in range(50)]
    assert [factors[step] for step in (0, 5, 10, 49)] == pytest.approx([1e-2, (1e-2 + 1) / 2, 1, 0.1])
    assert (factors[29] + factors[30]) / 2 == pytest.approx(0.55)  # halfway down, halfway between 1 and 0.1
    assert factors[:11] == sorted(factors[:11])
    assert factors[10:] == sorted(factors[10:], reverse=True)


@pytest.mark.parametrize(("decay", "power"), [("poly", 0.9), ("linear", 1.0)])
def test_polynomial_decay(decay: Any, power: float) -> None:
    schedule = WarmupDecay(OptimConfig(lr=1.0, decay=decay, warmup_epochs=1, warmup_lr=0, min_lr=0), 5, 10, 8)
    factors = [schedule.factor(step) for step in (10, 30, 49)]
    assert factors == pytest.approx([1, (1 - 20 / 39) ** power, 0])


# DeiT III: 400 epochs, lr 3e-3, 5 of warm-up; values of the published schedule at the start of an epoch
DEIT3 = {0: 1e-6, 1: 6.008e-4, 4: 2.4002e-3, 5: 2.99885e-3, 100: 2.56212e-3, 200: 1.505e-3, 399: 1.005e-5, 400: 1e-5}


def test_schedule_without_prefix_has_the_published_values_and_is_timms() -> None:
    deit3 = OptimConfig(lr=3e-3, warmup_epochs=5, warmup_lr=1e-6, min_lr=1e-5, warmup_prefix=False)
    schedule = WarmupDecay(deit3, 400, 7, 2048)
    for epoch, expected in DEIT3.items():
        assert 3e-3 * schedule.factor(epoch * 7) == pytest.approx(expected, rel=1e-5, abs=5e-9)
    config = OptimConfig(lr=0.1, warmup_epochs=3, warmup_lr=1e-3, min_lr=1e-2, warmup_prefix=False)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    theirs = CosineLRScheduler(optimizer, t_initial=20, lr_min=1e-2, warmup_t=3, warmup_lr_init=1e-3)
    ours = WarmupDecay(config, 20, 1, 8)
    for epoch in range(20):
        theirs.step(epoch)
        assert 0.1 * ours.factor(epoch) == pytest.approx(optimizer.param_groups[0]["lr"])


def test_rates_scale_with_the_batch_but_absolute_ones_do_not() -> None:
    config = OptimConfig(lr=5e-4, base_batch=512, warmup_lr=1e-6, min_lr=1e-5, warmup_epochs=1)
    schedule = WarmupDecay(config, 3, 4, 1024)
    assert [1e-3 * schedule.factor(step) for step in (0, 11)] == pytest.approx([1e-6, 1e-5])
    scaled = {"lr": 1e-3, "base_batch": 4}
    assert rates(small_child(), **scaled) == (pytest.approx(2e-3), pytest.approx(0.1))
    assert rates(small_child(), gate_lr=0.5, **scaled) == (pytest.approx(2e-3), 0.5)
    assert rates(small_child(gate="sigmoid")) == (1e-4, 0.1), "the rate of the paper"
    assert rates(small_parent(), lr=1e-3) == (1e-3, None)


def test_layer_decay_reaches_the_optimiser_and_the_gates() -> None:
    model = timm.create_model("test_resnet", num_classes=3)
    recast_(model, plan(model, torch.zeros(1, 3, 64, 64), where=["layer4.0.conv2"]))
    optimizer = make_optimizer(model, OptimConfig(lr=1e-2, layer_decay=0.5), 8)
    names = {str(group["name"]): float(group["peak_lr"]) for group in optimizer.param_groups}
    head = max(int(name.partition("/")[2]) for name in names)
    for name, rate in names.items():
        kind, _, number = name.partition("/")
        peak = {"gates": 0.5, "queries_keys": 1e-2 * 64 / 96}.get(kind, 1e-2)  # the layer reads 96 channels
        assert rate == pytest.approx(peak * 0.5 ** (head - int(number))), name
    (gates,) = (rate for name, rate in names.items() if name.startswith("gates/"))
    assert learning_rates(optimizer) == (pytest.approx(1e-2), pytest.approx(gates))
    (layer,) = gated_layers(model).values()
    with torch.no_grad():
        layer.gamma.fill_(0.3)
    shrink_gates_(optimizer, gate_l1=1.0)
    assert torch.allclose(layer.gamma, torch.full_like(layer.gamma, 0.3 - gates))
    with pytest.raises(RecastError, match="drop layer_decay"):
        make_optimizer(small_parent(), OptimConfig(layer_decay=0.75), 8)


def test_lamb_leaves_clipping_to_us() -> None:
    def step(scale: float) -> list[torch.Tensor]:
        network = small_parent()
        optimizer = make_optimizer(network, OptimConfig(opt="lamb", lr=1e-2, eps=1.0, weight_decay=0.0), 8)
        assert all(group["max_grad_norm"] is None for group in optimizer.param_groups)
        for index, parameter in enumerate(network.parameters()):
            parameter.grad = torch.full_like(parameter, scale * (index + 1))
        optimizer.step()
        return [p.detach() for p in network.parameters()]

    # with its own clipping at norm 1, gradients of any larger length would give the same step
    assert any(not torch.allclose(a, b) for a, b in zip(step(1.0), step(100.0), strict=True))


def test_options_reach_the_optimiser_that_takes_them() -> None:
    for fields, held in (
        ({"opt": "adamw", "betas": (0.8, 0.95), "eps": 1e-4}, {"betas": (0.8, 0.95), "eps": 1e-4}),
        ({"opt": "sgd", "momentum": 0.7}, {"momentum": 0.7}),
        ({"opt": "lamb"}, {"betas": (0.9, 0.999), "eps": 1e-6}),  # LAMB's own
    ):
        (group, *_) = make_optimizer(small_parent(), OptimConfig(**fields), 8).param_groups
        assert held.items() <= group.items()


def test_shrinking_moves_gates_towards_zero_and_stops_there() -> None:
    layer = gated_layers(small_child(gate="linear", **PAPERS_LAYER))["4"]
    optimizer = make_optimizer(nn.Sequential(layer), OptimConfig(gate_lr=0.1), 8)
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
