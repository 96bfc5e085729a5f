"""Gradients of every single image, as private training and curvature need them."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from tools import LABELS, Case, Cell, tool
from torch import nn


def without_norms(model: nn.Module) -> nn.Module:
    """Return a copy with GroupNorm in place of BatchNorm, whose gradients mix images."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(8, child.num_features))
    return model


def compared(case: Case, model: nn.Module, gradients: dict[str, torch.Tensor]) -> Cell:
    """Compare with one backward pass for each image."""
    plain, errors = without_norms(case.model), []
    plain.load_state_dict(model.state_dict(), strict=True)
    for i, (image, label) in enumerate(zip(case.images, LABELS, strict=True)):
        plain.zero_grad()
        F.cross_entropy(plain(image[None]), label[None]).backward()
        errors += [
            float((gradients[name][i] - p.grad).abs().max() / p.grad.abs().max().clamp(min=1e-8))
            for name, p in plain.named_parameters()
            if p.grad is not None
        ]
    return Cell("exact" if max(errors) < 1e-3 else "wrong", max(errors))


@tool("opacus", "`GradSampleModule`, GroupNorm in place of BatchNorm", "opacus==1.6.0")
def opacus(case: Case) -> Cell:
    from opacus.grad_sample import GradSampleModule

    model = without_norms(case.model)
    wrapped = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    F.cross_entropy(wrapped(case.images), LABELS, reduction="sum").backward()
    return compared(case, model, {name: p.grad_sample for name, p in wrapped._module.named_parameters()})


@tool(
    "backpack",
    "`extend` and `BatchGrad`",
    "backpack-for-pytorch==1.7.1",
    remedy=dict.fromkeys(("refused", "wrong"), "`torch.func.vmap(torch.func.grad(…))`"),
)
def backpack(case: Case) -> Cell:
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad

    model = without_norms(case.model)
    extended = extend(copy.deepcopy(model))
    with backpack(BatchGrad()):
        F.cross_entropy(extended(case.images), LABELS, reduction="sum").backward()
    return compared(case, model, {name: p.grad_batch for name, p in extended.named_parameters()})


@tool("torch.func", "`vmap(grad(…))` over images", "torch")
def torch_func(case: Case) -> Cell:
    model = without_norms(case.model)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(model, parameters, (image[None],)), label[None])

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, case.images, LABELS)
    return compared(case, model, gradients)
