"""Temporary eval mode, and a test of whether a module computes what its class does.

Every switch to eval mode of the package goes through here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

FORWARD = ("forward", "_conv_forward", "__call__")
"""Methods that a subclass, or a patch of an instance, replaces to compute something else."""


def inherits_forward(kind: type, base: type) -> bool:
    """Return True if a class overrides nothing of the forward pass of its base."""
    return issubclass(kind, base) and all(getattr(kind, name, None) is getattr(base, name, None) for name in FORWARD)


def computes_as(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Return True if `module` computes what one of `kinds` does: its forward pass is inherited, not replaced on the
    instance, and no hook could change what goes in or comes out. `isinstance` promises none of that."""
    inherits = any(inherits_forward(type(module), base) for base in kinds)
    return inherits and vars(module).keys().isdisjoint(FORWARD) and not any(map(len, hooks_of(module)))


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return the hooks of a module's forward and backward passes, by kind."""
    return (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)


def data_of(module: nn.Module, name: str) -> Any:
    """Return an attribute of a module that is data: no part and no method, which would be taken for the asker's own."""
    value = getattr(module, name)
    if isinstance(value, nn.Module) or callable(value):
        raise AttributeError(f"{name} of {type(module).__name__} is no number and no tensor")
    return value


@contextmanager
def in_eval(*models: nn.Module) -> Iterator[None]:
    """Set eval mode, and give every module its own mode back afterwards."""
    before = {module: module.training for model in models for module in model.modules()}
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            # `train(True)` on a GPSA layer forgets its closed heads, and some modules refuse it: the flag alone
            module.training = training
