"""Networks, configs and gradients that tests of several folders use."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from recast import Geometry, RecastConfig, plan, recast_
from recast.layers.config import PAPERS_LAYER

VIEWS = tuple(
    (
        "aten.promote_types aten.empty aten.new_empty aten.view aten.t. aten.transpose.int aten.slice.Tensor "
        "aten.expand aten.unsqueeze aten.split.Tensor aten._unsafe_view aten.detach aten.select.int aten.permute "
        "aten.unbind aten.squeeze"
    ).split()
)
PAPERS = RecastConfig("linear", **PAPERS_LAYER)
PAD_1 = Geometry((3, 3), padding=(1, 1, 1, 1))


class InCode(nn.Module):
    """A network whose forward pass is a function: `InCode(lambda m, x: m.conv(x).relu(), conv=nn.Conv2d(3, 4, 3))`."""

    def __init__(self, run: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.run(self, *inputs, **options)


def recast_copy(parent: nn.Module, example: Any, config: RecastConfig = PAPERS, **options: Any) -> Any:
    """A copy of a network, recast."""
    return recast_(copy.deepcopy(parent), plan(parent, example, config, **options))


def outputs_and_gradients(
    module: nn.Module, x: Tensor, backend: Any = None, allow_unused: bool = False
) -> dict[str, Tensor]:
    """Output, and the gradients of input and parameters, with a different weight for every output: none cancels."""
    if backend is not None:
        module.backend = backend
    x = x.detach().clone().requires_grad_()
    parameters = {name: p for name, p in module.named_parameters() if p.numel()}
    y = module(x)
    slope = torch.linspace(0, 9, y.numel(), dtype=y.dtype).cos().view_as(y)
    gradients = torch.autograd.grad((y * slope).sum(), [x, *parameters.values()], allow_unused=allow_unused)
    named = zip(["input", *parameters], gradients, strict=True)
    return {"output": y.detach()} | {name: gradient for name, gradient in named if gradient is not None}


@contextmanager
def issued() -> Iterator[list[str]]:
    """Collect the operations that compute something: all but views, dtypes and empty tensors."""
    names = list[str]()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.extend(() if str(function).startswith(VIEWS) else [str(function)])
            return function(*args, **kwargs or {})

    with Count():
        yield names


def groups_by_name(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The group of every parameter."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: group for group in groups for p in group["params"]}


@contextmanager
def unchanged(*models: nn.Module) -> Iterator[None]:
    """Check that a block leaves modules, values, flags, hooks, attributes and the text of models as they were."""

    def look_of(model: nn.Module) -> list[Any]:
        modules = [
            (name, id(module), module.training, len(module._forward_hooks), len(module._forward_pre_hooks))
            for name, module in model.named_modules()
        ]
        parameters = [(id(p), p.requires_grad, p.grad is None) for p in model.parameters()]
        return [modules, parameters, set(vars(model)), getattr(model, "recast_plan", None), repr(model)]

    looks = [look_of(model) for model in models]
    states = [{name: value.clone() for name, value in model.state_dict().items()} for model in models]
    yield
    for model, look, state in zip(models, looks, states, strict=True):
        assert look_of(model) == look
        for name, value in model.state_dict().items():
            assert value.is_meta or torch.equal(value.nan_to_num(7.5), state[name].nan_to_num(7.5)), name


def _undrawn(tensor: Tensor, *_: object, **__: object) -> Tensor:
    return tensor


@contextmanager
def without_values() -> Iterator[None]:
    """The meta device, where most of the time would go into drawing numbers that do not exist."""
    ours = ("kaiming_normal_", "kaiming_uniform_", "normal_", "trunc_normal_", "uniform_", "xavier_uniform_")
    with ExitStack() as patches:
        for name in ("timm.layers.weight_init._trunc_normal_", *(f"torch.nn.init.{name}" for name in ours)):
            patches.enter_context(patch(name, _undrawn))
        patches.enter_context(torch.device("meta"))
        yield
