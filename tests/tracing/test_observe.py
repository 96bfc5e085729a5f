"""What a shape-only pass sees, and what a layer costs: against real passes."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from recast import RecastConfig
from recast.surgery.rules import convert
from recast.tracing.cost import Cost, layer_cost, saved_sizes
from recast.tracing.observe import Call, observe


class Twice(nn.Module):
    """One convolution used at two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.shared = nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.shared(x).mean((2, 3)) + self.shared(input=nn.functional.avg_pool2d(x, 2)).mean((2, 3))


class Choosing(nn.Module):
    """Control flow that depends on values: no shape-only pass can follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        return y.mean((2, 3)) if float(y.sum()) > 0 else y.amax((2, 3))


def saved_bytes(module: nn.Module, x: Tensor) -> int:
    """Bytes that a real forward keeps for backward, parameters excluded: counted here without the package."""
    own = {p.untyped_storage().data_ptr() for p in (*module.parameters(), *module.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = module(x)
    total = sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in own)
    del y
    return total


def test_calls_in_the_order_of_their_first_use() -> None:
    seen = observe(Twice(), torch.zeros(2, 3, 8, 8), {"stem", "shared"})
    assert not seen.failure
    assert list(seen.calls) == ["stem", "shared"]
    assert seen.calls["stem"] == [Call((2, 3, 8, 8), (2, 4, 8, 8))]
    assert seen.calls["shared"] == [Call((2, 4, 8, 8), (2, 4, 6, 6)), Call((2, 4, 4, 4), (2, 4, 2, 2))]


@pytest.mark.parametrize("model", [Twice(), Choosing()])
def test_an_edit_changes_a_copy_only(model: nn.Module) -> None:
    name = "shared" if isinstance(model, Twice) else "conv"

    def edit(subject: nn.Module) -> None:
        assert subject is not model
        subject.get_submodule(name).stride = (2, 2)

    after = observe(model, torch.zeros(1, 3, 8, 8), {name}, edit)
    assert after.calls[name][0].output[2:] == (3, 3)
    assert model.get_submodule(name).stride == (1, 1)


@pytest.mark.parametrize("start", range(0, 30, 15))
def test_a_layer_costs_what_a_real_forward_costs(start: int, random_case: Callable[..., Any]) -> None:
    """Parameters, MACs and the growth of saved bytes per image: measured on meta tensors, checked on CPU tensors."""
    for seed in range(start, start + 15):
        conv, x, text = random_case(seed, torch.float32)
        gate, backend = ("linear", "sigmoid")[seed % 2], ("auto", "dense", "split", "merged")[seed % 4]
        config = RecastConfig(gate=gate, backend=backend)
        shape = x.shape[1:]
        for real in (conv, convert(conv, config)):
            one, two = torch.randn(1, *shape, requires_grad=True), torch.randn(2, *shape, requires_grad=True)
            with FlopCounterMode(display=False) as flops:
                real(one)
            each = saved_bytes(real, two) - saved_bytes(real, one)
            parameters = sum(p.numel() for p in real.parameters())
            fixed = max(0, saved_bytes(real, one) - each)
            expected = Cost(parameters, flops.get_total_flops() // 2, each, fixed)
            assert layer_cost(copy.deepcopy(real).to("meta"), *shape) == expected, text


def test_counting_keeps_no_tensor_alive() -> None:
    with saved_sizes(nn.Identity()) as sizes:
        y = torch.randn(4, requires_grad=True).exp()
        alive = weakref.ref(y)
    del y
    assert sizes == [16]
    assert alive() is None
