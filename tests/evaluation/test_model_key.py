import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recast.lab.evaluation.model_key import model_key

SIGN = 1.0


def helper(x: Tensor) -> Tensor:
    return x * SIGN


class Net(nn.Module):
    factor = 2

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.scale, self.act = nn.Linear(2, 2), torch.ones(1), F.relu
        self.register_buffer("shift", torch.ones(1), persistent=False)
        self.parts = {"one": [torch.ones(1)]}

    def forward(self, x: Tensor) -> Tensor:
        return self.act(helper(self.fc(x)) * self.scale * self.factor)


def _hook(module: nn.Module, inputs: Any, output: Any) -> Any:
    return -output


CHANGES: dict[str, Callable[[Net], object]] = {
    "weight": lambda net: net.fc.weight.data.neg_(),
    "buffer that is not saved": lambda net: net.shift.neg_(),
    "tensor attribute": lambda net: net.scale.neg_(),
    "tensor in a container": lambda net: net.parts["one"][0].neg_(),
    "function attribute": lambda net: setattr(net, "act", torch.tanh),
    "method of the object": lambda net: setattr(net, "forward", lambda x: -net.fc(x)),
    "hook": lambda net: net.fc.register_forward_hook(_hook),
    "setting": lambda net: setattr(net.fc, "eps", 1e-3),
    "type": lambda net: setattr(net, "dtype", torch.half),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_the_outputs_changes_the_key(change: str) -> None:
    net, same = Net(), Net().train()
    before = model_key(net)
    assert model_key(same) == before
    same(torch.ones(1, 2))
    assert model_key(same.eval()) == before
    CHANGES[change](net)
    assert model_key(net) != before


@pytest.mark.parametrize("name", ["forward", "helper", "SIGN", "factor", "base"])
def test_mended_code_changes_the_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net: nn.Module = Net()
    before = model_key(net)
    if name == "forward":
        monkeypatch.setattr(Net, "forward", lambda self, x: -self.fc(x))
    elif name == "helper":
        monkeypatch.setattr(sys.modules[__name__], "helper", lambda x: -x)
    elif name == "SIGN":
        monkeypatch.setattr(sys.modules[__name__], "SIGN", -1.0)
    elif name == "factor":
        monkeypatch.setattr(Net, "factor", 3)
    else:
        net = type("Net", (Net,), {"__module__": __name__, "extra": lambda self: 1})()
    assert model_key(net) != before
