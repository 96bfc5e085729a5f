"""Optimisers of other packages, on `recast.param_groups`: does every parameter move, and stay finite?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from tools import LABELS, Case, Cell, tool
from torch import nn

import recast

STEPS = 4


def optimiser(name: str, does: str, *packages: str) -> Callable[[Any], object]:
    """Add a function from parameter groups to an optimizer."""

    def add(make: Callable[[Iterable[dict[str, Any]], nn.Module], Any]) -> object:
        def run(case: Case) -> Cell:
            model = copy.deepcopy(case.model).train()
            optimizer = make(recast.param_groups(model, lr=1e-3, gate_lr=1e-2), model)
            if hasattr(optimizer, "train"):
                optimizer.train()
            losses = []
            for _ in range(STEPS):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(case.images), LABELS)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            if hasattr(optimizer, "eval"):
                optimizer.eval()
            before = dict(case.model.named_parameters())
            still = [name for name, value in model.named_parameters() if torch.equal(value, before[name])]
            broken = [name for name, value in model.named_parameters() if not value.isfinite().all()]
            if broken:
                return Cell("wrong", None, f"{broken[0]} is not finite")
            if still:
                is_attention = any(name.endswith((".query", ".key", ".content", ".gamma")) for name in still)
                return Cell("loses attention" if is_attention else "wrong", None, f"{still[0]} does not move")
            return Cell("works")

        return tool(name, does, *packages)(run)

    return add


@optimiser("schedulefree", "`AdamWScheduleFree` on Recast's groups", "schedulefree==1.4.1")
def by_schedulefree(groups: Any, model: nn.Module) -> Any:
    from schedulefree import AdamWScheduleFree

    return AdamWScheduleFree(groups, lr=1e-3)


@optimiser("prodigyopt", "`Prodigy` on Recast's groups", "prodigyopt==1.1.2")
def by_prodigy(groups: Any, model: nn.Module) -> Any:
    from prodigyopt import Prodigy

    return Prodigy([{**group, "lr": 1.0} for group in groups])


@optimiser("pytorch-optimizer", "`SOAP` on Recast's groups", "pytorch-optimizer==4.1.0")
def by_pytorch_optimizer(groups: Any, model: nn.Module) -> Any:
    from pytorch_optimizer import SOAP

    return SOAP(groups, lr=1e-3)


@optimiser("torch, Muon", "`torch.optim.Muon` for the matrices, AdamW for the rest", "torch")
def by_torch_muon(groups: Any, model: nn.Module) -> Any:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=1e-3)
    muon = torch.optim.Muon(matrices, lr=1e-3)

    class Both:
        def zero_grad(self) -> None:
            rest.zero_grad()
            muon.zero_grad()

        def step(self) -> None:
            rest.step()
            muon.step()

    return Both()


@optimiser("bitsandbytes", "`AdamW8bit` on Recast's groups, on the CPU", "bitsandbytes==0.50.2")
def by_bitsandbytes(groups: Any, model: nn.Module) -> Any:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(groups, lr=1e-3)
