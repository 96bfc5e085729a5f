"""BatchNorm in eval mode is a scale and a shift per channel: both go into the layer before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.fusion import fuse_conv_bn_weights

from recast.tracing.observe import Example, run_example


def norms_after(model: nn.Module, layers: dict[str, nn.Module], batch: Example) -> dict[str, str]:
    """Which BatchNorm takes the output of which layer, by name: seen in one forward pass, the very same tensor."""
    made: dict[int, str] = {}
    alive: list[Any] = []
    found: dict[str, str] = {}

    def note(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            made[id(output)] = name
            alive.append(output)  # an address is given out again once its tensor is gone

        return hook

    def meet(name: str) -> Any:
        def hook(_module: nn.Module, inputs: Any) -> None:
            if inputs and id(inputs[0]) in made:
                found[made[id(inputs[0])]] = name

        return hook

    handles = [layer.register_forward_hook(note(name)) for name, layer in layers.items()]
    handles += [
        module.register_forward_pre_hook(meet(name))
        for name, module in model.named_modules()
        if isinstance(module, nn.BatchNorm2d) and module.track_running_stats
    ]
    try:
        run_example(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


@torch.no_grad()
def multiply_in_(layer: nn.Module, norm: nn.Module) -> bool:
    """Scale W_out and the bias of a GPSA layer or a convolution as `norm` would its output; False where it cannot be.

    y ↦ (y − μ) · g / √(v + ε) + β, with the running statistics.
    """
    target: Any = layer[-1] if isinstance(layer, nn.Sequential) else layer
    assert isinstance(norm, nn.BatchNorm2d)
    if parametrize.is_parametrized(target, "weight") or norm.running_mean is None or norm.running_var is None:
        return False
    transposed = isinstance(target, nn.ConvTranspose2d)
    if transposed and target.groups > 1:
        return False
    weight, bias = fuse_conv_bn_weights(
        target.weight, target.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias, transposed
    )
    target.weight.copy_(weight)
    if target.bias is None:
        target.bias = bias
    else:
        target.bias.copy_(bias)
    return True


def what_remains(norm: nn.Module) -> nn.Module:
    """What stands in the place of a BatchNorm that was multiplied in: nothing, or timm's own activation after it."""
    rest = [getattr(norm, name) for name in ("drop", "act") if isinstance(getattr(norm, name, None), nn.Module)]
    rest = [module for module in rest if not isinstance(module, nn.Identity)]
    return nn.Sequential(*rest).train(norm.training) if rest else nn.Identity()
