"""Which modules can be recast, and how: a rule reads a convolution and returns a GPSA layer with its weights.

Rules never change the module they read; the swap itself is `recast.surgery.recast_`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from recast.config import RecastConfig
from recast.errors import RecastError
from recast.geometry import Geometry
from recast.gpsa import GPSA

Rule = Callable[[nn.Module, RecastConfig], GPSA]

_RULES: dict[type[nn.Module], Rule] = {}


def recasts(kind: type[nn.Module]) -> Callable[[Callable[..., GPSA]], Callable[..., GPSA]]:
    """Register the decorated function as the rule for `kind`: `@recasts(nn.Conv2d) def _(conv, config) -> GPSA`."""

    def register(rule: Callable[..., GPSA]) -> Callable[..., GPSA]:
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


def refusal(module: nn.Module) -> str | None:
    """Why a convolution-like module cannot be recast, or None if a rule takes it."""
    if isinstance(module, GPSA):
        return "is already GPSA"
    kind = type(module).__name__
    if find_rule(module) is None:
        known = ", ".join(sorted(k.__name__ for k in _RULES))
        return f"no rule for {kind} (rules exist for {known})"
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks):
        return f"{kind} carries hooks, which the new layer would lose"
    if "forward" in vars(module):
        return f"{kind} has a forward of its own, set on the instance"
    return None


def is_convolution(module: nn.Module) -> bool:
    """Whether a module is some kind of convolution, or a layer that was one."""
    base = nn.modules.conv._ConvNd
    return isinstance(module, base | GPSA) or find_rule(module) is not None


def effective_weight(conv: nn.Conv2d) -> torch.Tensor:
    """The weight that `conv` uses in eval mode, materialised from any `torch.nn.utils.parametrize` parametrisation."""
    was_training = conv.training
    try:
        conv.eval()  # spectral norm takes a power-iteration step when read in training mode
        return conv.weight.detach()
    finally:
        conv.train(was_training)


def check_finite(name: str, module: nn.Module) -> None:
    """Raise `RecastError` if a tensor of `module` holds NaN or infinity."""
    for tensor_name, tensor in module.state_dict().items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise RecastError(f"{name}.{tensor_name} holds NaN or infinite values: repair or reload the weights first")


@recasts(nn.Conv2d)
def _conv2d(conv: nn.Conv2d, config: RecastConfig) -> GPSA:
    """W_out^h = the kernel's tap h, W_val = I, Δ_h = the tap's offset (d'Ascoli et al. 2021, Eq. 6)."""
    weight = effective_weight(conv)
    layer = GPSA(
        conv.in_channels, conv.out_channels, Geometry.of(conv), groups=conv.groups, bias=conv.bias is not None,
        config=config, device=weight.device, dtype=weight.dtype,
    )  # fmt: skip
    layer.weight = nn.Parameter(weight.clone())  # clone keeps channels_last, which copy_ into a new tensor would not
    with torch.no_grad():
        # a parametrised weight is a plain tensor here: what it was made from says whether it is trained
        trained = any(p.requires_grad for n, p in conv.named_parameters() if n != "bias")
        layer.weight.requires_grad_(trained)
        if conv.bias is not None and layer.bias is not None:
            layer.bias.copy_(conv.bias).requires_grad_(conv.bias.requires_grad)
    return layer.train(conv.training)
