"""What must not change: `unchanged(*models)` compares models before and after a block."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn


def _look_of(model: nn.Module) -> list[Any]:
    """Modules, flags, hooks, parameters, attributes and the text of a model."""
    modules = [
        (name, id(module), module.training, len(module._forward_hooks), len(module._forward_pre_hooks))
        for name, module in model.named_modules()
    ]
    parameters = [(id(p), p.requires_grad, p.grad is None) for p in model.parameters()]
    return [modules, parameters, set(vars(model)), getattr(model, "recast_plan", None), repr(model)]


@contextmanager
def _unchanged(*models: nn.Module) -> Iterator[None]:
    looks = [_look_of(model) for model in models]
    states = [{name: value.clone() for name, value in model.state_dict().items()} for model in models]
    yield
    for model, look, state in zip(models, looks, states, strict=True):
        assert _look_of(model) == look
        for name, value in model.state_dict().items():
            assert value.is_meta or torch.equal(value.nan_to_num(7.5), state[name].nan_to_num(7.5)), name


@pytest.fixture(scope="session")
def unchanged() -> Callable[..., AbstractContextManager[None]]:
    """`with unchanged(model):` the block leaves modules, values, flags and hooks as they were."""
    return _unchanged
