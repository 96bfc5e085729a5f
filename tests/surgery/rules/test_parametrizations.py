"""What makes a kernel moves along with `keep_parametrization`, and is dropped for its result without it."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers import ScaledStdConv2d, ScaledStdConv2dSame, StdConv2dSame
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import recast
from recast import GPSA, RecastConfig, RecastError

KEEP = RecastConfig(keep_parametrization=True)


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


def made(*makers: nn.Module) -> nn.Module:
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
    "no inverse": lambda: made(Symmetric()),
    "chain": lambda: made(Gain(), Symmetric(), Gain()),
    "chain of norms": lambda: parametrizations.spectral_norm(parametrizations.weight_norm(conv())),
    "weight norm before standardisation": lambda: parametrizations.weight_norm(with_gain(ScaledStdConv2d(4, 6, 3))),
    "orthogonal": lambda: parametrizations.orthogonal(conv()),
}
X = torch.randn(2, 4, 9, 8, generator=torch.Generator().manual_seed(0))


def counterpart(name: str, layer: GPSA) -> nn.Parameter:
    """The child's parameter for one of the parent's, by its name."""
    own = dict(layer.named_parameters())
    if name in own:
        return own[name]
    if name == "weight":
        return own["parametrizations.weight.original"]
    (found,) = [parameter for other, parameter in own.items() if other.endswith(f".{name}")]
    return found


def planned(module: nn.Module, config: RecastConfig = KEEP) -> tuple[nn.Sequential, nn.Sequential]:
    """A parent around `module`, and its recast copy."""
    parent = nn.Sequential(module)
    plan = recast.plan(parent, X.to(next(module.parameters()).dtype), config, where="all")
    return parent, recast.recast_(copy.deepcopy(parent), plan)


@pytest.mark.parametrize("name", BUILDERS)
def test_kept_it_computes_the_same_and_trains_the_same(name: str, error_of: Any) -> None:
    """Bitwise in eval; in training the buffers step alike; every original gets the parent's gradient."""
    parent, child = planned(BUILDERS[name]().double())
    layer, x = child[0], X.double()
    assert isinstance(layer, GPSA)
    assert torch.equal(child.eval()(x), parent.eval()(x))
    parent.train(), child.train()
    for _ in range(2):
        y, z = parent(x), child(x)
        assert error_of(z, y) <= 1e-12
    for model, output in ((parent, y), (child, z)):
        model.zero_grad()
        (output * torch.linspace(0, 9, output.numel(), dtype=torch.float64).cos().view_as(output)).sum().backward()
    for parameter_name, parameter in parent[0].named_parameters():
        gradient = counterpart(parameter_name, layer).grad
        assert bool(parameter.grad.any())
        assert error_of(gradient, parameter.grad) <= 1e-10, parameter_name
    buffers = dict(layer.named_buffers())
    assert all(torch.equal(buffers[n], b) for n, b in parent[0].named_buffers())


@pytest.mark.parametrize("name", BUILDERS)
def test_frozen_originals_stay_frozen(name: str) -> None:
    parent = nn.Sequential(BUILDERS[name]())
    plan = recast.plan(parent, X, KEEP, where="all")
    names = [n for n, _ in parent[0].named_parameters()]
    for frozen in [[], *([n] for n in names), names]:
        for n, parameter in parent[0].named_parameters():
            parameter.requires_grad_(n not in frozen)
        layer = recast.recast_(copy.deepcopy(parent), plan)[0]
        assert [n for n in names if not counterpart(n, layer).requires_grad] == frozen


@pytest.mark.parametrize("name", BUILDERS)
def test_what_is_saved_is_loaded(name: str, tmp_path: Path) -> None:
    """The originals, and what a parametrisation holds besides; a copy of the child is whole and independent."""
    parent, child = planned(BUILDERS[name]())
    child.train()(X).sum().backward()  # spectral norm steps
    with torch.no_grad():
        for parameter in child.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    expected = child.eval()(X)
    loaded = recast.load(recast.save(child, tmp_path / "child.safetensors"), parent=parent)
    assert loaded.state_dict().keys() == child.state_dict().keys()
    assert torch.equal(loaded(X), expected)
    clone = copy.deepcopy(child)
    with torch.no_grad():
        for parameter in child.parameters():
            parameter.mul_(1.5)
    assert torch.equal(clone(X), expected)
    assert not torch.equal(child(X), expected)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("training", [True, False])
def test_without_the_option_the_kernel_is_plain(name: str, training: bool) -> None:
    parent, child = planned(BUILDERS[name]().train(training), RecastConfig())
    state, layer = copy.deepcopy(parent.state_dict()), child[0]
    assert not parametrize.is_parametrized(layer)
    assert isinstance(layer.weight, nn.Parameter)
    assert (layer.weight.requires_grad, parent[0].training, layer.training) == (True, training, training)
    assert all(torch.equal(value, state[n]) for n, value in parent.state_dict().items())  # rules only read
    assert torch.equal(child.eval()(X), parent.eval()(X))


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_parametrised_transposed_kernel_cannot_be_kept(norm: Callable[..., nn.Module]) -> None:
    module = norm(nn.ConvTranspose2d(4, 6, 3, 2))
    with pytest.raises(RecastError, match=r"0 cannot be recast: .*keep_parametrization"):
        recast.plan(nn.Sequential(module), X, KEEP, where=["0"])
    parent, child = planned(module, RecastConfig())
    assert torch.equal(child.eval()(X), parent.eval()(X))
