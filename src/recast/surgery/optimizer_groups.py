"""Groups of an optimiser: that of a convolution's kernel, and those that its layer's new parameters join.

Groups of `param_groups` are found by their names, "kind", or "kind/number" with a group for every layer (layer decay);
groups of other optimisers by their settings.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from recast.errors import RecastError
from recast.names import modules_by_name
from recast.surgery.parameters import DECAYED, KINDS, layer_numbers, layer_of

Group = dict[str, Any]

PEAKS = ("peak_lr", "initial_lr")
"""Keys of a group for the rate that a schedule scales: this library's, and that of torch's schedulers."""
ENDS = ("max_lr", "min_lr")
"""Keys of a group for the two rates of OneCycleLR."""


def find_kernel_group(optimizer: Optimizer, network: nn.Module, name: str, conv: nn.Module) -> Group:
    """Return the group that trains a convolution's kernel.

    For a frozen one, and for attention after a block: the group of its layer, or the group that trains the last of the
    largest parameters of the innermost module around it.

    Raises RecastError for an optimiser that does not train all of the layer, or takes one group only.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise RecastError("LBFGS takes one group of parameters, recast layers require more: use another optimiser")
    groups = optimizer.param_groups
    group_of = {id(p): group for group in groups for p in group["params"]}
    trained = {key: p for key, p in conv.named_parameters() if p.requires_grad}
    if missing := [key for key, p in trained.items() if id(p) not in group_of]:
        raise RecastError(
            f"the optimiser does not train {name}.{missing[0]}: pass the optimiser of the whole layer, or freeze the "
            "parameter (requires_grad=False)"
        )
    if trained:
        return group_of[id(max(trained.values(), key=torch.Tensor.numel))]
    if _layer_suffix(groups[0]):
        numbers = layer_numbers(network)
        suffix = f"/{layer_of(name, numbers, max(numbers.values()))}"  # of a new layer as in `param_groups`
        return next((group for group in groups if _layer_suffix(group).endswith(suffix)), groups[0])
    modules, around = modules_by_name(network), name
    while not (near := [p for p in modules[around].parameters() if id(p) in group_of]) and around:
        around = around.rpartition(".")[0]
    return group_of[id(max(reversed(near), key=torch.Tensor.numel))] if near else groups[0]


def add_parameter_(
    optimizer: Optimizer, name: str, parameter: nn.Parameter, kind: str, kernel_group: Group, own_lr: float | None,
    ratio: float,
) -> None:  # fmt: skip
    """Put a new parameter into the group of its kind, or into a new one with the settings of the kernel's group.

    `own_lr` is the peak rate of its kind. None: that of the kernel, times `ratio`.
    """
    settings = _settings(kernel_group, kind, _peak_for(optimizer, kernel_group, own_lr, ratio))
    compared = ["name"] if _kind(kernel_group) in KINDS else list(settings)
    # where a group counts its steps, the count would be wrong for a new parameter
    joinable = [group for group in optimizer.param_groups if "step" not in group]
    group = next((g for g in joinable if all(g.get(key) == settings[key] for key in compared)), None)
    if group is None:
        entry: Any = (name, parameter) if "param_names" in kernel_group else parameter
        optimizer.add_param_group({**settings, "params": [entry]})
        return
    group["params"].append(parameter)
    if "param_names" in group:
        group["param_names"].append(name)


def _settings(kernel_group: Group, kind: str, peak: float) -> Group:
    """Return the settings of a group for parameters of this kind, with this peak rate, beside the kernel's group."""
    kernel_peak, kernel_decay = _peak(kernel_group), kernel_group.get("weight_decay", 0.0)
    decay = float(kernel_decay) if kind in DECAYED else 0.0
    copied = kernel_group.keys() - {"params", "param_names", "step"}
    settings = {key: copy.deepcopy(kernel_group[key]) for key in copied}
    if _kind(kernel_group) in KINDS or (peak, decay) != (kernel_peak, kernel_decay):
        settings["name"] = kind + _layer_suffix(kernel_group)
    settings |= dict.fromkeys(kernel_group.keys() & PEAKS, peak)
    settings |= {key: kernel_group[key] * peak / kernel_peak for key in ENDS if key in kernel_group and kernel_peak}
    schedule_factor = float(kernel_group["lr"]) / kernel_peak if kernel_peak else 0.0
    return settings | {"lr": peak * schedule_factor, "weight_decay": decay}


def _peak(group: Group) -> float:
    return float(next((group[key] for key in PEAKS if key in group), group["lr"]))


def _peak_for(optimizer: Optimizer, kernel_group: Group, own_lr: float | None, ratio: float) -> float:
    """Return the peak rate of parameters of a kind, beside the kernel's group."""
    kernel_peak = _peak(kernel_group)
    if own_lr is None:
        return kernel_peak * ratio
    if not _layer_suffix(kernel_group):
        return own_lr
    # the head's rate is the one that layer decay leaves as it is
    beside = [group for group in optimizer.param_groups if "name" not in group or _kind(group) == _kind(kernel_group)]
    head_peak = max(map(_peak, beside))
    return own_lr * (kernel_peak / head_peak if head_peak else 1.0)


def _kind(group: Group) -> str:
    """Return a group's name without the number of its layer."""
    return str(group.get("name", "")).partition("/")[0]


def _layer_suffix(group: Group) -> str:
    """Return "/number" of a group for one layer; empty without layer decay."""
    return str(group.get("name", "")).removeprefix(_kind(group))
