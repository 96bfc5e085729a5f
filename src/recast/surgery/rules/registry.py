"""The rules by the class that they read."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from recast.layers.cmhsa import RecastLayer
from recast.run.config import RecastConfig

Rule = Callable[[nn.Module, RecastConfig], RecastLayer]

_RULES: dict[type[nn.Module], Rule] = {}


def recasts(kind: type[nn.Module]) -> Callable[[Callable[..., RecastLayer]], Callable[..., RecastLayer]]:
    """Register the decorated function as the rule for `kind`: `@recasts(MyConv) def _(conv, config) -> RecastLayer`.

    The layer is GPSA, or CMHSA for gate="bias". A rule reads the module only, and works on the meta device too: that is
    where a plan counts what a layer costs. It raises `RecastError` with the reason for a module that it cannot take.
    """

    def register(rule: Callable[..., RecastLayer]) -> Callable[..., RecastLayer]:
        _RULES[kind] = rule
        return rule

    return register


def find_rule(module: nn.Module) -> tuple[type[nn.Module], Rule] | None:
    """The rule for a module: its exact type first, then its bases.

    A base's rule holds only for subclasses that compute what the base computes: one that overrides `forward` (a weight
    standardised on the fly, padding that depends on the input) needs a rule of its own.
    """
    own = type(module)
    for kind in own.__mro__:
        if kind in _RULES:
            same = all(getattr(own, name, None) is getattr(kind, name, None) for name in ("forward", "_conv_forward"))
            return (kind, _RULES[kind]) if same else None
    return None


def known_kinds() -> list[str]:
    """Names of the classes that have a rule."""
    return sorted(kind.__name__ for kind in _RULES)
