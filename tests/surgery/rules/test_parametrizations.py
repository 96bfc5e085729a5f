"""What makes a kernel is dropped for its result."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_helpers import recast_copy
from timm.layers import ScaledStdConv2d, ScaledStdConv2dSame, StdConv2dSame
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import recast


class Symmetric(nn.Module):
    """A parametrisation that nobody wrote a rule for: no parameters, no inverse."""

    def forward(self, weight: Tensor) -> Tensor:
        return (weight + weight.flip(-1)) / 2


class Gain(nn.Module):
    """A parameter and a buffer of its own, and an inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.7))
        self.register_buffer("offset", torch.tensor(0.1))

    def forward(self, weight: Tensor) -> Tensor:
        return self.gain * weight + self.offset

    def right_inverse(self, weight: Tensor) -> Tensor:
        return (weight - self.offset) / self.gain


def conv() -> nn.Conv2d:
    return nn.Conv2d(4, 6, 3, padding=1)


def parametrized(*makers: nn.Module) -> nn.Module:
    module = conv()
    nn.init.uniform_(module.weight, 0.5, 1)
    for maker in makers:
        parametrize.register_parametrization(module, "weight", maker, unsafe=True)
    return module


def with_gain(module: Any) -> nn.Module:
    nn.init.uniform_(module.gain, 0.5, 1.5)
    return module


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "StdConv2dSame": lambda: StdConv2dSame(4, 6, 3, 2, groups=2),
    "ScaledStdConv2d": lambda: with_gain(ScaledStdConv2d(4, 6, (2, 3), 2)),
    "ScaledStdConv2dSame": lambda: with_gain(ScaledStdConv2dSame(4, 4, 3, 2, groups=4)),
    "weight norm": lambda: parametrizations.weight_norm(conv()),
    "spectral norm": lambda: parametrizations.spectral_norm(conv(), n_power_iterations=2),
    "no inverse": lambda: parametrized(Symmetric()),
    "chain": lambda: parametrized(Gain(), Symmetric(), Gain()),
    "chain of norms": lambda: parametrizations.spectral_norm(parametrizations.weight_norm(conv())),
    "weight norm before standardisation": lambda: parametrizations.weight_norm(with_gain(ScaledStdConv2d(4, 6, 3))),
    "orthogonal": lambda: parametrizations.orthogonal(conv()),
    "transposed, weight norm": lambda: parametrizations.weight_norm(nn.ConvTranspose2d(4, 6, 3, 2)),
    "transposed, spectral norm": lambda: parametrizations.spectral_norm(nn.ConvTranspose2d(4, 6, 3, 2)),
}
X = torch.randn(2, 4, 9, 8, generator=torch.Generator().manual_seed(0))


def pair(module: nn.Module) -> tuple[nn.Sequential, nn.Sequential]:
    parent = nn.Sequential(module)
    return parent, recast_copy(parent, X, where="all")


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("training", [True, False])
def test_the_kernel_is_plain_and_computes_the_same(name: str, training: bool) -> None:
    parent, child = pair(BUILDERS[name]().train(training))
    state, layer = copy.deepcopy(parent.state_dict()), child[0]
    assert not parametrize.is_parametrized(layer)
    assert isinstance(layer.weight, nn.Parameter)
    assert (layer.weight.requires_grad, parent[0].training, layer.training) == (True, training, training)
    assert all(torch.equal(value, state[n]) for n, value in parent.state_dict().items())  # rules only read
    assert torch.equal(child.eval()(X), parent.eval()(X))


@pytest.mark.parametrize("name", BUILDERS)
def test_a_kernel_is_frozen_if_all_that_makes_it_is(name: str) -> None:
    parent = nn.Sequential(BUILDERS[name]())
    makers = [parameter for key, parameter in parent[0].named_parameters() if key != "bias"]
    for frozen in (makers[1:], makers):
        parent.requires_grad_(True)
        for parameter in frozen:
            parameter.requires_grad_(False)
        _, child = pair(parent[0])
        assert child[0].weight.requires_grad == (len(frozen) < len(makers))


@pytest.mark.parametrize(("gate", "kind"), [("linear", nn.Conv2d), ("sigmoid", recast.GPSA)])
def test_a_recast_layer_that_was_parametrised_since_folds_and_trains_on(gate: str, kind: type[nn.Module]) -> None:
    images = torch.randn(2, 4, 6, 6)
    model = nn.Sequential(conv()).eval()
    recast.recast_(model, recast.plan(model, images, recast.RecastConfig(gate=gate)))
    parametrizations.weight_norm(model[0], "weight")
    before = model(images)
    recast.fold_(model)
    assert isinstance(model[0], kind)
    torch.testing.assert_close(model(images), before)
    assert all(parameter.requires_grad for parameter in model.parameters())
