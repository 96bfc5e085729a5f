"""Grad-CAM: the places of a convolutional network's last map that raise the logit of a class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recast.layers.attention_pool import attention_pools
from recast.modes import in_eval
from recast.surgery.pooling.probe import is_one
from recast.tracing.hooks import hooked, replaced_output
from recast.tracing.outputs import logits_of


def grad_cam(model: nn.Module, images: Tensor, targets: Tensor) -> Tensor | None:
    """Compute max(0, Σ_c mean(∂logit_t/∂A_c) · A_c) over the channels c of a map A, for every target class t.

    Selvaraju et al. 2017. A is the output of the last module with a map of more than one position.

    Args:
        model: returns logits (B, classes), also as `output.logits` or the first of a tuple. It runs in eval mode.
        images: (B, C, height, width).
        targets: (B, T).

    Returns:
        (B, T, h, w); None if there is no such map, or tokens come after it.

    Raises:
        RecastError: for other outputs.
    """
    leaves: list[Tensor] = []

    def cut(output: Tensor) -> Tensor:
        torch.set_grad_enabled(True)  # until the `no_grad` below ends: nothing before the map needs a gradient
        leaves.append(output.detach().requires_grad_())
        return leaves[-1].clone()  # what follows may write into it

    with in_eval(model), torch.no_grad():
        if (layer := _last_map(model, images)) is None:
            return None
        with replaced_output(model.get_submodule(layer), cut):
            logits = logits_of(model(images.clone()), model, "grad_cam")
        maps = []
        for classes in targets.unbind(1):
            chosen = logits.gather(1, classes[:, None]).sum()
            (gradient,) = torch.autograd.grad(chosen, leaves[-1], retain_graph=True)
            maps.append((gradient.mean((2, 3), keepdim=True) * leaves[-1].detach()).sum(1).relu())
    return torch.stack(maps, 1).detach()


def _last_map(model: nn.Module, images: Tensor) -> str | None:
    """Return the last module with a map (B, C, h, w); None if tokens of more than one position come after it."""
    inside = tuple(f"{name}." for name in attention_pools(model))
    outputs: list[tuple[str, torch.Size]] = []

    def note(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and not is_one(output.shape) and not name.startswith(inside):
            outputs.append((name, output.shape))

    with hooked(model.named_modules(), after=note):
        model(images[:1].clone())
    name, shape = outputs[-1] if outputs else ("", ())
    return name if len(shape) == 4 and getattr(model, "output_fmt", "NCHW") == "NCHW" else None
