"""torch's older `weight_norm` and `spectral_norm`, which compute the weight in a hook before every forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers import Conv2dSame, ScaledStdConv2d
from torch import nn
from torch.nn.utils import spectral_norm, weight_norm

import recast
from recast.errors import RecastError
from recast.layers.gpsa import GPSA
from recast.run.config import RecastConfig

pytestmark = pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated:FutureWarning")

BUILDERS: dict[str, Callable[[], Any]] = {
    "weight norm": lambda: weight_norm(nn.Conv2d(4, 6, 3)),
    "weight norm of columns": lambda: weight_norm(nn.Conv2d(4, 6, 3), dim=1),
    "weight norm of all": lambda: weight_norm(nn.Conv2d(4, 6, 3), dim=None),
    "weight norm, SAME": lambda: weight_norm(Conv2dSame(4, 6, 3, 2)),
    "weight norm before standardisation": lambda: weight_norm(ScaledStdConv2d(4, 6, 3)),
    "weight norm, transposed": lambda: weight_norm(nn.ConvTranspose2d(4, 6, 3, 2)),
    "spectral norm": lambda: spectral_norm(nn.Conv2d(4, 6, 3)),
    "spectral norm, two steps": lambda: spectral_norm(nn.Conv2d(4, 6, 3), n_power_iterations=2, dim=1),
    "spectral norm, transposed": lambda: spectral_norm(nn.ConvTranspose2d(4, 6, 3, 2)),
}
SPECTRAL = [name for name in BUILDERS if name.startswith("spectral")]
X = torch.randn(2, 3, 8, 7, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("ran", [False, True])
def test_the_hooks_result_becomes_the_kernel(
    name: str, training: bool, ran: bool, around: Any, recast_and_verify: Any
) -> None:
    """Planned, recast, bitwise equal; the hook and the tensors that it computed from are gone."""
    model = around(BUILDERS[name]()).train(training)
    if ran:
        model(X).sum().backward()
    module, state = model.conv, {n: value.detach().clone() for n, value in model.conv.state_dict().items()}
    child, names, plan = recast_and_verify(model, X, where=["conv"])
    assert names == ["conv"]
    assert plan.note == ""
    assert all(torch.equal(value, state[n]) for n, value in module.state_dict().items())  # no power iteration either
    layer = child.conv
    assert isinstance(layer, GPSA)
    assert not layer._forward_pre_hooks
    assert not layer._load_state_dict_pre_hooks
    assert {n for n in layer.state_dict() if n.startswith("weight")} == {"weight"}
    assert layer.weight.is_leaf
    assert layer.weight.requires_grad
    assert layer.training == training
    copy.deepcopy(layer)


@pytest.mark.parametrize("name", BUILDERS)
def test_the_kernel_is_computed_anew(name: str, around: Any, layer_of: Any) -> None:
    """`conv.weight` is what the last forward left there: weights loaded since then must count."""
    module = BUILDERS[name]().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))
    x = torch.randn(1, 4, 8, 8)
    layer = layer_of(module)
    assert torch.equal(layer(x), module(x))


@pytest.mark.parametrize("name", SPECTRAL)
def test_a_copy_of_the_parent_before_any_forward(
    name: str, around: Any, recast_and_verify: Any, tmp_path: Path
) -> None:
    parent = around(BUILDERS[name]()).eval()
    child, _, _ = recast_and_verify(copy.deepcopy(parent), X, where=["conv"])
    loaded = recast.load(recast.save(child, tmp_path / "child.safetensors"), parent=parent)
    assert torch.equal(loaded(X), child(X))
    assert torch.equal(child(X), parent(X))


@pytest.mark.parametrize("name", BUILDERS)
def test_a_hook_cannot_be_kept(name: str, around: Any) -> None:
    keep = RecastConfig(keep_parametrization=True)
    with pytest.raises(RecastError, match=r"conv cannot be recast: .*keep_parametrization"):
        recast.plan(around(BUILDERS[name]()), X, keep, where=["conv"])
