"""What a shape-only pass sees, and what a layer costs: against real passes."""

import copy
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layer_helpers import InCode
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from recast import RecastConfig, RecastError
from recast.surgery.rules import convert
from recast.tracing.cost import Cost, layer_cost, saved_sizes
from recast.tracing.observe import Call, observe


def twice() -> InCode:
    return InCode(
        lambda m, x: m.shared(y := m.stem(x)).mean((2, 3)) + m.shared(input=F.avg_pool2d(y, 2)).mean((2, 3)),
        stem=nn.Conv2d(3, 4, 3, padding=1),
        shared=nn.Conv2d(4, 4, 3),
    )


def choosing() -> InCode:
    """Control flow that depends on values: no shape-only pass can follow it."""

    def choose(m: Any, x: Tensor) -> Tensor:
        y = m.norm(m.shared(x))
        return y.mean((2, 3)) if float(y.sum()) > 0 else y.amax((2, 3))

    return InCode(choose, shared=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4))


def saved_bytes(module: nn.Module, x: Tensor) -> int:
    """Bytes that a real forward keeps for backward, parameters excluded: counted here without the package."""
    ignored = {p.untyped_storage().data_ptr() for p in (*module.parameters(), *module.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = module(x)
    total = sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in ignored)
    del y
    return total


def test_calls_in_the_order_of_their_first_use() -> None:
    observed = observe(twice(), torch.zeros(2, 3, 8, 8), {"stem", "shared"})
    assert not observed.note
    assert list(observed.calls) == ["stem", "shared"]
    assert observed.calls["stem"] == [Call((2, 3, 8, 8), (2, 4, 8, 8))]
    assert observed.calls["shared"] == [Call((2, 4, 8, 8), (2, 4, 6, 6)), Call((2, 4, 4, 4), (2, 4, 2, 2))]


@pytest.mark.parametrize("model", [twice(), choosing()])
def test_an_edit_changes_a_copy_only(model: InCode) -> None:
    def edit(copied: nn.Module) -> None:
        assert copied is not model
        copied.get_submodule("shared").stride = (2, 2)

    after = observe(model, torch.zeros(1, 3, 8, 8), {"shared"}, edit)
    assert after.calls["shared"][0].output[2:] == (3, 3)
    assert model.shared.stride == (1, 1)


@pytest.mark.parametrize("start", range(0, 30, 15))
def test_a_layer_costs_what_a_real_forward_costs(start: int, random_case: Callable[..., Any]) -> None:
    """Parameters, MACs and the growth of saved bytes per image: measured on meta tensors, checked on CPU tensors."""
    for seed in range(start, start + 15):
        conv, x, text = random_case(seed, torch.float32)
        gate, backend = ("linear", "sigmoid")[seed % 2], ("auto", "dense", "split", "merged")[seed % 4]
        config = RecastConfig(gate=gate, backend=backend)
        shape = x.shape[1:]
        for real in (conv, convert(conv, config)):
            image, pair = torch.randn(1, *shape, requires_grad=True), torch.randn(2, *shape, requires_grad=True)
            with FlopCounterMode(display=False) as flops:
                real(image)
            each = saved_bytes(real, pair) - saved_bytes(real, image)
            parameters = sum(p.numel() for p in real.parameters())
            fixed = max(0, saved_bytes(real, image) - each)
            expected = Cost(parameters, flops.get_total_flops() // 2, each, fixed)
            assert layer_cost(copy.deepcopy(real).to("meta"), *shape) == expected, text


def test_torch_does_not_log_what_its_fake_tensors_cannot_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    logged: list[logging.LogRecord] = []
    monkeypatch.setattr(log, "callHandlers", logged.append)
    with pytest.raises(RecastError, match="must match"):
        observe(
            InCode(lambda m, x: m.stem(x) + torch.ones(5, 5), stem=nn.Conv2d(3, 4, 3)), torch.zeros(1, 3, 8, 8), set()
        )
    assert not logged
    log.error("is on again")
    assert logged


def test_counting_keeps_no_tensor_alive() -> None:
    with saved_sizes(nn.Identity()) as sizes:
        y = torch.randn(4, requires_grad=True).exp()
        alive = weakref.ref(y)
    del y
    assert sizes == [16]
    assert alive() is None
