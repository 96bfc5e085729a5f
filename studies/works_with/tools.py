"""What the scripts of this folder share: the list of tools, their networks, and the verdict on an output."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch import Tensor, nn

import recast

LAYERS = {"beside": "last_of_blocks", "linear": "last_stage"}
"""Gate → layers that are recast: the default, and the papers' layer."""
LABELS = torch.arange(4)
"""Classes of the images of a `Case`."""
EXACT = 1e-4
"""Largest relative error of an exact output, as in `recast.export`."""


@dataclass(frozen=True)
class Cell:
    """What a tool did with one network: `exact`, `works`, `wrong`, `loses attention` or `refused`."""

    cell: str
    error: float | None = None
    message: str = ""


def relative(a: Tensor, b: Tensor) -> float:
    """Return max|a − b| / max|b|."""
    return float((a - b).abs().max() / b.abs().max())


@dataclass(frozen=True)
class Case:
    """One network in eval mode, every head open, and images (4, 3, 96, 96). `layer`: a gate, or "parent"."""

    layer: str
    model: nn.Module
    parent: nn.Module
    images: Tensor

    @torch.no_grad()
    def judged(self, outputs: Tensor, model: nn.Module | None = None, message: str = "") -> Cell:
        """Return the verdict on outputs that should be those of `model`; default: the network that the tool got."""
        truth, plain = (self.model if model is None else model)(self.images), self.parent(self.images)
        pairs = (outputs, truth), (outputs, plain), (truth, plain)
        error, lost, effect = (float((a - b).abs().max() / truth.abs().max()) for a, b in pairs)
        if error <= EXACT:
            return Cell("exact", error, message)
        if lost < min(error, effect / 2):
            return Cell("loses attention", error, message)
        return Cell("works" if error < max(effect / 2, 0.1) else "wrong", error, message)


@dataclass(frozen=True)
class Tool:
    """A tool, what a user does with it, the packages (the first is the tool), and verdict → what to do instead.

    `run` returns a `Cell`, the logits, or a relative error. `is_own`: it has no plain network to be compared with.
    """

    name: str
    does: str
    packages: tuple[str, ...]
    run: Callable[[Case], Any]
    remedy: dict[str, str]
    kind: str
    is_own: bool


TOOLS: dict[str, Tool] = {}


def tool(name: str, does: str, *packages: str, remedy: Any = None, is_own: bool = False) -> Callable[[Any], Any]:
    """Add the decorated function to `TOOLS`."""

    def add(run: Callable[[Case], Any]) -> Callable[[Case], Any]:
        TOOLS[name] = Tool(name, does, packages, run, remedy or {}, run.__module__, is_own)
        return run

    return add


def case_of(layer: str) -> Case:
    """Return a ResNet-18 with random weights, measured statistics and open heads."""
    torch.manual_seed(0)
    images = torch.randn(4, 3, 96, 96)
    parent = timm.create_model("resnet18", num_classes=10)
    for norm in (module for module in parent.modules() if isinstance(module, nn.BatchNorm2d)):
        norm.momentum = None  # the mean over the passes below
        nn.init.uniform_(norm.weight, 0.5, 1.5)  # timm starts the last norm of a block at 0
    with torch.no_grad():
        parent(torch.randn(16, 3, 96, 96))
    model = copy.deepcopy(parent.eval())
    if layer != "parent":
        recast.recast_(model, recast.plan(parent, images, recast.RecastConfig(gate=layer), where=LAYERS[layer]))
        for module in model.modules():
            if isinstance(module, recast.AttentionBeside | recast.GPSA):
                nn.init.constant_(module.gamma, 0.5)
                nn.init.normal_(module.key, std=0.05)
    return Case(layer, model.eval(), parent, images)
