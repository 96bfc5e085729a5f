"""Convolutions that share a tensor with another module are left: a layer's copy would stop following the other one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import recast

X = torch.zeros(2, 3, 8, 8)
pytestmark = pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated:FutureWarning")


def conv() -> nn.Conv2d:
    return nn.Conv2d(4, 4, 3, padding=1)


TIES = {
    "weight": lambda a, b: setattr(b, "weight", a.weight),
    "bias": lambda a, b: setattr(b, "bias", a.bias),
    "normed weight": lambda a, b: setattr(
        parametrizations.weight_norm(b).parametrizations.weight, "original1",
        parametrizations.weight_norm(a).parametrizations.weight.original1,
    ),
    "older normed weight": lambda a, b: setattr(
        torch.nn.utils.weight_norm(b), "weight_v", torch.nn.utils.weight_norm(a).weight_v
    ),
    "parametrisation": lambda a, b: [parametrize.register_parametrization(m, "weight", SHARED) for m in (a, b)],
}  # fmt: skip


class Gain(nn.Module):
    """A parametrisation with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, weight: Tensor) -> Tensor:
        return self.gain * weight


SHARED = Gain()


@pytest.mark.parametrize("name", TIES)
def test_what_is_shared_with_another_module_is_left(name: str) -> None:
    """A copy in the new layer would stop following the other one in training."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), conv(), conv())
    TIES[name](model[1], model[2])
    planned = recast.plan(model, X, where="all")
    assert [step.name for step in planned.steps] == ["0"]
    assert [left.name for left in planned.left] == ["1", "2"]
    for left, other in zip(planned.left, "21", strict=True):
        assert "shares" in left.reason
        assert f"with {other}" in left.reason


def test_a_kernel_that_the_model_holds_as_well_is_left() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), conv())
    model.register_parameter("kernel", model[1].weight)
    assert [step.name for step in recast.plan(model, X, where="all").steps] == ["0"]
