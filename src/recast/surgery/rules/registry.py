"""The rules by the class that they read, and why a convolution cannot be recast."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from recast.errors import RecastError
from recast.layers.cmhsa import CMHSA, RecastLayer
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


def convert(module: nn.Module, config: RecastConfig) -> RecastLayer:
    """The layer that a module becomes. Raises `RecastError` if its rule cannot take it; there must be one."""
    found = find_rule(module)
    assert found is not None, refusal(module)
    return found[1](module, config)


def is_convolution(module: nn.Module) -> bool:
    """Whether a module is some kind of convolution (a kernel size and a weight), or a layer that was one."""
    if isinstance(module, nn.modules.conv._ConvNd | RecastLayer) or find_rule(module) is not None:
        return True
    # not hasattr(module, "weight"): reading a parametrised weight computes it
    weighs = "weight" in module._parameters or hasattr(type(module), "weight")
    return weighs and hasattr(module, "kernel_size")


def weight_hook(conv: nn.Module) -> WeightNorm | SpectralNorm | None:
    """The hook of torch's older `weight_norm` and `spectral_norm`, which computes the weight before every forward."""
    hooks = (h for h in conv._forward_pre_hooks.values() if isinstance(h, WeightNorm | SpectralNorm))
    return next((hook for hook in hooks if hook.name == "weight"), None)


def parametrization_of(module: nn.Module) -> parametrize.ParametrizationList | None:
    """What computes the weight of a module, if `torch.nn.utils.parametrize` does."""
    makers = getattr(module, "parametrizations", None)
    found = makers["weight"] if isinstance(makers, nn.ModuleDict) and "weight" in makers else None
    return found if isinstance(found, parametrize.ParametrizationList) else None


# --- what cannot be recast --------------------------------------------------------------------------------------------


def refusal(module: nn.Module) -> str | None:
    """Why a convolution-like module cannot be recast, or None if a rule takes it.

    A class may say so itself, in an attribute `not_recast`.
    """
    kind = type(module).__name__
    if isinstance(module, RecastLayer):
        return f"is already {'CMHSA' if isinstance(module, CMHSA) else 'GPSA'}"
    if isinstance(module, torch.jit.ScriptModule):
        return "is TorchScript: recast the nn.Module that it was made from, and script that"
    if ".quantized" in type(module).__module__:
        return f"{kind} is quantised: recast the float model, and quantise that"
    if ".qat." in type(module).__module__:
        return f"{kind} is in training for quantisation: recast the float model, and prepare that"
    if reason := getattr(module, "not_recast", None):
        return str(reason)
    if find_rule(module) is None:
        return f"no rule for {kind} (rules exist for {', '.join(sorted(known.__name__ for known in _RULES))})"
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hook is not weight_hook(module) for registered in hooks for hook in registered.values()):
        return f"{kind} carries hooks, which the new layer would lose"
    if patched := [name for name in ("forward", "_conv_forward") if name in vars(module)]:
        return f"{kind} has a {patched[0]} of its own, set on the instance"
    if any(parameter.is_complex() for parameter in module.parameters()):
        return f"{kind} has complex weights: attention is real"
    return None


def check_finite(name: str, module: nn.Module) -> None:
    """Raise `RecastError` if a tensor of `module` has no values (meta device), or holds NaN or infinity."""
    for tensor_name, tensor in module.state_dict().items():
        if tensor.is_meta:
            raise RecastError(
                f"{name}.{tensor_name} is on the meta device, without values: a model there can be planned; "
                "to recast it, load its weights first"
            )
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise RecastError(f"{name}.{tensor_name} holds NaN or infinite values: repair or reload the weights first")


def held_elsewhere(model: nn.Module, modules: dict[str, nn.Module]) -> dict[str, str]:
    """Which of the `modules` share a parameter with another one of the model, by name: "weight with head". Recasting
    such a module would untie them.

    Parameters of what computes a module's weight count as its own.
    """
    places: dict[int, list[str]] = {}
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):  # one in several places is listed at each
        places.setdefault(id(module), []).append(name)
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(name)
    found: dict[str, str] = {}
    for name, module in modules.items():
        inside = tuple(f"{place}." for place in places[id(module)])
        for own, parameter in module.named_parameters():
            outside = [n for n in holders[id(parameter)] if "." not in inside and not f"{n}.".startswith(inside)]
            if outside:
                found.setdefault(name, f"{own} with {outside[0] or type(model).__name__}")
    return found
