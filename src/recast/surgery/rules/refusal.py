"""Why a convolution cannot be recast."""

from __future__ import annotations

import torch
from torch import nn

from recast.errors import RecastError
from recast.layers.cmhsa import CMHSA, RecastLayer
from recast.surgery.rules.convolutions import weight_hook
from recast.surgery.rules.registry import find_rule, known_kinds


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
        return f"no rule for {kind} (rules exist for {', '.join(known_kinds())})"
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hook is not weight_hook(module) for registered in hooks for hook in registered.values()):
        return f"{kind} carries hooks, which the new layer would lose"
    if patched := [name for name in ("forward", "_conv_forward") if name in vars(module)]:
        return f"{kind} has a {patched[0]} of its own, set on the instance"
    if any(parameter.is_complex() for parameter in module.parameters()):
        return f"{kind} has complex weights: attention is real"
    return None


def is_convolution(module: nn.Module) -> bool:
    """Whether a module is some kind of convolution (a kernel size and a weight), or a layer that was one."""
    if isinstance(module, nn.modules.conv._ConvNd | RecastLayer) or find_rule(module) is not None:
        return True
    # not hasattr(module, "weight"): reading a parametrised weight computes it
    weighs = "weight" in module._parameters or hasattr(type(module), "weight")
    return weighs and hasattr(module, "kernel_size")


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
