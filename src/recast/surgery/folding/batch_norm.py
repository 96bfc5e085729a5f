"""BatchNorm multiplied into the recast layer before it: into W_out and bias, or into both paths beside attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize
from torch.nn.utils.fusion import fuse_conv_bn_weights

from recast.layers.beside import AttentionBeside
from recast.layers.cmhsa import RecastLayer
from recast.modes import computes_as
from recast.surgery.folding.forms import last_of
from recast.surgery.stride import replace_module_
from recast.tracing.examples import Example, run_example
from recast.tracing.hooks import hooked


@torch.no_grad()
def batch_norms_after(model: nn.Module, layers: Iterable[tuple[str, nn.Module]], data: Example) -> dict[str, str]:
    """Return layer → the BatchNorm that takes its output, where each runs once, the norm on its running statistics.

    `model` is in eval mode. Whether something else reads the output too is not seen here.
    """
    norms = [(n, m) for n, m in model.named_modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    outputs: dict[str, list[Tensor]] = {}
    inputs: dict[str, list[Tensor]] = {}
    with (
        hooked(layers, after=lambda name, _module, _inputs, output: outputs.setdefault(name, []).append(output)),
        hooked(norms, before=lambda name, _module, given: inputs.setdefault(name, []).append(given[0])),
    ):
        run_example(model, data)
    once = {id(given[0]): norm for norm, given in inputs.items() if len(given) == 1}
    return {name: once[id(made[0])] for name, made in outputs.items() if len(made) == 1 and id(made[0]) in once}


@torch.no_grad()
def fold_batch_norm_(model: nn.Module, layer: nn.Module, norm: Any) -> Callable[[], None] | None:
    """Multiply a BatchNorm into the layer before it, in place; what it did besides, an activation, stays.

    Returns a function that takes it back; None, with nothing changed, for a layer whose convolution does more than
    convolve.
    """
    conv: Any = last_of(layer)
    inner = conv.conv if isinstance(conv, AttentionBeside) else conv
    is_plain = isinstance(inner, RecastLayer) or computes_as(inner, nn.Conv2d, nn.ConvTranspose2d)
    if not is_plain or any(parametrize.is_parametrized(inner, name) for name in ("weight", "bias")):
        return None
    statistics = norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
    kernel: Any = inner._parameters["weight"]
    old_bias: Any = inner.bias
    state = conv.state_dict(keep_vars=True)
    values = {name: tensor.clone() for name, tensor in state.items()}
    fused, bias = fuse_conv_bn_weights(kernel, old_bias, *statistics, isinstance(inner, nn.ConvTranspose2d))
    if isinstance(conv, AttentionBeside) and conv.content_heads:
        scale = (norm.running_var + norm.eps).rsqrt() * (1 if norm.weight is None else norm.weight)
        conv.content.mul_(scale.to(conv.content.dtype)[:, None])
    kernel.copy_(fused)
    inner.bias = bias
    rest = [part for name in ("drop", "act") if isinstance(part := getattr(norm, name, None), nn.Module)]  # of timm
    rest = [part for part in rest if not isinstance(part, nn.Identity)]
    left = (rest[0] if len(rest) == 1 else nn.Sequential(*rest) if rest else nn.Identity()).train(norm.training)
    replace_module_(model, norm, left)

    def undo() -> None:
        replace_module_(model, left, norm)
        inner.bias = old_bias
        for name, tensor in state.items():
            tensor.data.copy_(values[name])

    return undo
