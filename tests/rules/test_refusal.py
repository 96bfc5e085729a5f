"""Rules: which convolutions are taken, which are refused and why, and what the new layer carries over."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from recast.config import RecastConfig
from recast.errors import RecastError
from recast.geometry import Geometry
from recast.gpsa import GPSA
from recast.rules import check_finite, find_rule, is_convolution, recasts, refusal, registry


def recast_layer(conv: nn.Module, config: RecastConfig | None = None) -> GPSA:
    found = find_rule(conv)
    assert found is not None
    return found[1](conv, config or RecastConfig())


class Symmetric(nn.Module):
    """A parametrisation that nobody wrote a rule for."""

    def forward(self, weight: Tensor) -> Tensor:
        return (weight + weight.flip(-1)) / 2


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "symmetric"])
@pytest.mark.parametrize("training", [True, False])
def test_parametrised_weights_are_materialised(kind: str, training: bool) -> None:
    conv = nn.Conv2d(4, 6, 3, padding=1)
    if kind == "symmetric":
        parametrize.register_parametrization(conv, "weight", Symmetric())
    else:
        getattr(parametrizations, kind)(conv)
    conv.train(training)
    x = torch.randn(2, 4, 6, 6)
    state = copy.deepcopy(conv.state_dict())
    layer = recast_layer(conv)
    assert all(torch.equal(value, state[name]) for name, value in conv.state_dict().items())  # rules only read
    assert conv.training == training
    assert not parametrize.is_parametrized(layer)
    assert layer.weight.is_leaf
    assert layer.weight.requires_grad
    assert torch.equal(layer.eval()(x), conv.eval()(x))


def test_frozen_parametrised_weight_stays_frozen() -> None:
    conv = parametrizations.weight_norm(nn.Conv2d(4, 6, 3))
    for name, parameter in conv.named_parameters():
        parameter.requires_grad_(name == "bias")
    layer = recast_layer(conv)
    assert not layer.weight.requires_grad
    assert layer.bias is not None
    assert layer.bias.requires_grad


class Scaled(nn.Conv2d):
    """Computes something of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_subclasses_that_compute_something_else_are_refused() -> None:
    conv = Scaled(3, 4, 3)
    assert find_rule(conv) is None
    assert is_convolution(conv)
    assert (refusal(conv) or "").startswith("no rule for Scaled (rules exist for Conv2d, Conv2dSame, ConvTranspose2d")


def test_subclasses_that_compute_the_same_are_taken() -> None:
    class Named(nn.Conv2d):
        """A convolution with another constructor."""

        def __init__(self, channels: int) -> None:
            super().__init__(channels, channels, 3, padding=1)

    class Padded(nn.Conv2d):
        """Overrides the inner call only."""

        def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return super()._conv_forward(2 * input, weight, bias)

    conv, x = Named(4), torch.randn(1, 4, 5, 5)
    assert refusal(conv) is None
    assert torch.equal(recast_layer(conv)(x), conv(x))
    assert refusal(Padded(3, 3, 3)) is not None


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv3d, nn.ConvTranspose3d])
def test_other_convolutions_have_no_rule(kind: Callable[..., nn.Module]) -> None:
    module = kind(3, 4, 3)
    assert is_convolution(module)
    assert "no rule for" in (refusal(module) or "")


def test_what_is_no_convolution() -> None:
    assert not any(map(is_convolution, (nn.Linear(3, 3), nn.BatchNorm2d(3), nn.Sequential(nn.Conv2d(3, 3, 1)))))


@pytest.mark.parametrize(
    "register",
    [
        lambda conv: conv.register_forward_hook(lambda *_: None),
        lambda conv: conv.register_forward_pre_hook(lambda *_: None),
        lambda conv: conv.register_full_backward_hook(lambda *_: None),
        lambda conv: conv.register_full_backward_pre_hook(lambda *_: None),
        lambda conv: prune.random_unstructured(conv, "weight", 0.5),
    ],
)
def test_hooks_are_refused(register: Callable[[nn.Conv2d], Any]) -> None:
    conv = nn.Conv2d(3, 4, 3)
    register(conv)
    assert "hooks" in (refusal(conv) or "")


def test_a_patched_instance_is_refused() -> None:
    conv = nn.Conv2d(3, 4, 3)
    original = conv.forward
    conv.forward = lambda x: 2 * original(x)  # type: ignore[method-assign]
    assert "set on the instance" in (refusal(conv) or "")


def test_a_layer_is_not_recast_again() -> None:
    assert refusal(GPSA(3, 4, Geometry((3, 3)))) == "is already GPSA"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("frozen", ["", "weight", "bias", "weight bias"])
def test_what_is_carried_over(dtype: torch.dtype, training: bool, frozen: str) -> None:
    conv = nn.Conv2d(4, 6, 3, dtype=dtype).train(training)
    for name in frozen.split():
        conv.get_parameter(name).requires_grad_(False)
    before = copy.deepcopy(conv.state_dict())
    layer = recast_layer(conv)
    assert layer.training == training
    assert {p.dtype for p in layer.parameters()} == {dtype}
    assert layer.weight.requires_grad == ("weight" not in frozen)
    assert layer.bias is not None
    assert layer.bias.requires_grad == ("bias" not in frozen)
    assert layer.gamma.requires_grad
    assert torch.equal(layer.weight, conv.weight)
    assert torch.equal(layer.bias, conv.bias)
    with torch.no_grad():  # nothing is shared: training the child leaves the parent alone
        for parameter in layer.parameters():
            parameter.add_(1)
    assert all(torch.equal(value, before[name]) for name, value in conv.state_dict().items())


def test_device_is_carried_over() -> None:
    layer = recast_layer(nn.Conv2d(4, 6, 3, device="meta"))
    assert {p.device.type for p in layer.parameters()} == {"meta"}


def test_memory_format_is_carried_over() -> None:
    conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    assert recast_layer(conv).weight.is_contiguous(memory_format=torch.channels_last)


def test_nan_is_named() -> None:
    conv = nn.Conv2d(3, 4, 3)
    check_finite("layer", conv)
    with torch.no_grad():
        conv.bias[2] = float("nan")  # type: ignore[index]
    with pytest.raises(RecastError, match=r"layer\.bias holds NaN"):
        check_finite("layer", conv)


def test_a_rule_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact type wins over its bases: a convolution with a forward of its own can be given a rule."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))

    @recasts(Scaled)
    def _(conv: Scaled, config: RecastConfig) -> GPSA:
        plain = nn.Conv2d(conv.in_channels, conv.out_channels, conv.kernel_size, bias=conv.bias is not None)
        return recast_layer(plain, config)

    found = find_rule(Scaled(3, 4, 3))
    assert found is not None
    assert found[0] is Scaled
    assert find_rule(nn.Conv2d(3, 4, 3))[0] is nn.Conv2d  # type: ignore[index]
