"""Pruning, before and after recasting."""

from __future__ import annotations

import copy
import signal
from typing import Any

import torch
from tools import LAYERS, Case, Cell, tool
from torch import nn
from torch.nn.utils import prune

import recast


def structured(model: nn.Module, images: torch.Tensor) -> nn.Module:
    """Return the network with half of its channels."""
    import torch_pruning

    (classifier,) = (module for module in model.modules() if isinstance(module, nn.Linear))
    torch_pruning.pruner.MagnitudePruner(
        model,
        images[:1],
        torch_pruning.importance.MagnitudeImportance(),
        pruning_ratio=0.5,
        ignored_layers=[classifier],
    ).step()
    return model


def stop(*_: Any) -> None:
    raise TimeoutError("no end after a minute; the parent takes seconds")


@tool(
    "torch-pruning",
    "remove half of the channels of a recast network",
    "torch-pruning==1.6.1",
    remedy={"refused": "prune the parent, then recast it", "wrong": "prune the parent, then recast it"},
)
def torch_pruning_after(case: Case) -> Cell:
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    model = structured(copy.deepcopy(case.model), case.images)
    with torch.no_grad():
        outputs = model(case.images)
    attention = [m for m in model.modules() if isinstance(m, recast.AttentionBeside | recast.GPSA)]
    return Cell("works" if outputs.isfinite().all() else "wrong", None, f"{len(attention)} layers attend")


@tool("torch-pruning, then Recast", "recast a network with half of its channels", "torch-pruning==1.6.1", is_own=True)
def torch_pruning_before(case: Case) -> Cell:
    parent = structured(copy.deepcopy(case.parent), case.images).eval()
    gate = case.layer
    child = copy.deepcopy(parent)
    recast.recast_(child, recast.plan(parent, case.images, recast.RecastConfig(gate=gate), where=LAYERS[gate]))
    return Cell("exact", recast.verify(parent, child, case.images).max_relative_error)


@tool("torch.nn.utils.prune", "prune single weights of the convolution, then `remove`", "torch")
def torch_prune(case: Case) -> Cell:
    model = copy.deepcopy(case.model)
    layer = model.layer4[1].conv2
    conv = layer.conv if case.layer == "beside" else layer
    prune.l1_unstructured(conv, "weight", 0.5)
    masked = model(case.images).detach()
    prune.remove(conv, "weight")
    return case.judged(model(case.images).detach(), model) if masked.isfinite().all() else Cell("wrong")
