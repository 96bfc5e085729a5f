"""Groups of an optimiser: that of a convolution's kernel, its home, and those that its layer's new parameters join.

Groups of `param_groups` go by their names, "kind", or "kind/number" with a group for every layer (layer decay). Groups
of other optimisers go by their settings.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from recast.errors import RecastError
from recast.surgery.parameters import DECAYED, KINDS, LINEAR_GATE_LR_RATIO, layer_numbers, layer_of

Group = dict[str, Any]

PEAKS = ("peak_lr", "initial_lr")
"""Keys of a group for the rate that a schedule scales: this library's, and that of torch's schedulers."""
ENDS = ("max_lr", "min_lr")
"""Keys of a group for the two rates of OneCycleLR."""


def home_group(optimizer: Optimizer, network: nn.Module, name: str, conv: nn.Module) -> Group:
    """Return the group that trains a convolution's kernel; for a frozen one that of its layer, or the first.

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
        number = layer_of(name, layer_numbers(network), 0)
        return next((group for group in groups if str(group["name"]).endswith(f"/{number}")), groups[0])
    return groups[0]


def join_(
    optimizer: Optimizer, name: str, parameter: nn.Parameter, kind: str, home: Group, own_lr: float | None
) -> None:
    """Put a new parameter into the group of its kind; a missing group is made from the kernel's, `home`.

    `own_lr` is the peak rate of its kind. None: that of the kernel, times 50 for a linear gate.
    """
    settings = _settings(home, kind, _peak_for(kind, optimizer, home, own_lr))
    compared = ["name"] if _kind(home) in KINDS else list(settings)
    for group in optimizer.param_groups:
        # where a group counts its steps, the count would be wrong for a new parameter
        if "step" not in group and all(group.get(key) == settings[key] for key in compared):
            group["params"].append(parameter)
            if "param_names" in group:
                group["param_names"].append(name)
            return
    entry: Any = (name, parameter) if "param_names" in home else parameter
    optimizer.add_param_group({**settings, "params": [entry]})


def _settings(home: Group, kind: str, peak: float) -> Group:
    """Return the settings of a group for parameters of this kind, with this peak rate, beside the kernel's group."""
    home_peak, home_decay = _peak(home), home.get("weight_decay", 0.0)
    decay = float(home_decay) if kind in DECAYED else 0.0
    settings = {key: copy.deepcopy(home[key]) for key in home.keys() - {"params", "param_names", "step"}}
    if _kind(home) in KINDS or (peak, decay) != (home_peak, home_decay):
        settings["name"] = kind + _layer_suffix(home)
    settings |= dict.fromkeys(home.keys() & PEAKS, peak)
    settings |= {key: home[key] * peak / home_peak for key in ENDS if key in home and home_peak}
    now = float(home["lr"]) / home_peak if home_peak else 0.0  # the share of the peak that the schedule gives now
    return settings | {"lr": peak * now, "weight_decay": decay}


def _peak(group: Group) -> float:
    return float(next((group[key] for key in PEAKS if key in group), group["lr"]))


def _peak_for(kind: str, optimizer: Optimizer, home: Group, own_lr: float | None) -> float:
    """Return the peak rate of parameters of this kind, beside the kernel's group `home`."""
    rate = _peak(home)
    if own_lr is None:
        return rate * (LINEAR_GATE_LR_RATIO if kind == "gates" else 1.0)
    if not _layer_suffix(home):
        return own_lr
    # the head's rate is the one that layer decay leaves as it is
    beside = [group for group in optimizer.param_groups if "name" not in group or _kind(group) == _kind(home)]
    head_rate = max(map(_peak, beside))
    return own_lr * (rate / head_rate if head_rate else 1.0)


def _kind(group: Group) -> str:
    """Return a group's name without the number of its layer."""
    return str(group.get("name", "")).partition("/")[0]


def _layer_suffix(group: Group) -> str:
    """Return "/number" of a group for one layer; empty without layer decay."""
    return str(group.get("name", "")).removeprefix(_kind(group))
