"""`recast_during_training_`: convolutions become attention during training, with the same optimiser.

A kernel and W_out are the same numbers, so the kernel's state in the optimiser (momentum, moments, number of steps)
becomes that of W_out. New parameters (queries, keys, positions, gates) start without a state.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from recast.config import typed
from recast.errors import RecastError
from recast.layers.attention_pool import attention_pools
from recast.surgery.apply import check_recast, recast_
from recast.surgery.optimizer_state import carried_parameters, forget_, hand_over_
from recast.surgery.parameters import DECAYED, KINDS, LINEAR_GATE_LR_RATIO, layer_numbers, layer_of, parameter_kinds
from recast.surgery.plan import Plan
from recast.surgery.wrappers import changeable

PEAKS = ("peak_lr", "initial_lr")
"""Keys of a group for the rate that a schedule scales: this library's, and that of torch's schedulers."""
ENDS = ("max_lr", "min_lr")
"""Keys of a group for the two rates of OneCycleLR."""


@typed("model", "plan", "optimizer", "steps", "gate_lr", "qk_lr")
def recast_during_training_(
    model: nn.Module,
    optimizer: Optimizer,
    plan: Plan,
    steps: Sequence[str] | None = None,
    *,
    averages: Iterable[nn.Module] = (),
    gate_lr: float | None = None,
    qk_lr: float | None = None,
) -> nn.Module:
    """Recast steps of a plan in a network that `optimizer` is training, in place.

    The optimiser stays the same object. W_out and the bias take the places of the kernel and the bias in its groups,
    with their state by the same permutation: with the linear gate at its start the next update is the convolution's.
    New parameters join the groups that `param_groups` would give them ("decay", "no_decay", "gates", by name) at these
    groups' present rate; in an optimiser with other groups, the kernel's group or one beside it with its settings;
    where groups count their steps (LAMB), a group of their own. Nothing else is touched.

    A model compiled by torch.compile is recast inside and compiled again at its next call. For DistributedDataParallel
    pass the `.module`, and wrap it again. Where W_out has another layout, factored moments (Adafactor) are reset.

    Args:
        model: the network in training.
        optimizer: the optimiser that trains it.
        plan: a plan of this network (`plan`).
        steps: names of the steps to take. Default: all.
        averages: running averages of the weights (timm's `ModelEmaV3.module`, torch's AveragedModel). They are recast
            too, with their own kernels; new parameters start from the model's.
        gate_lr: peak rate of the gates. Default: 50 × the kernel's for γ and s; the kernel's for λ, as in T-CNN*, "the
            same optimizer and learning rate" (d'Ascoli et al. 2021, Sec. 5).
        qk_lr: peak rate of queries and keys. Default: the kernel's.

    Returns:
        The model.

    Raises:
        RecastError: before any change, as `recast_` does, and for a wrapped model or an optimiser that cannot take over
            the layer's parameters.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> plan = recast.plan(model, torch.randn(1, 3, 8, 8))
        >>> model = recast.recast_during_training_(model, optimizer, plan)
        >>> [group["name"] for group in optimizer.param_groups if "name" in group]
        ['gates']
    """
    network, copies = changeable(model), [changeable(average) for average in averages]
    optimizer = getattr(optimizer, "_base_optimizer", optimizer)  # timm's Lookahead keeps its state in there
    chosen = plan if steps is None else plan.only(steps)
    names = [step.name for step in chosen.steps]
    if not names:
        return model
    _check_network(network, plan, names)
    for average in copies:  # `recast_` looks at the network itself before its first change
        check_recast(average, plan, chosen)
    convolutions = {name: module for name, module in network.named_modules() if name in names}
    homes = {name: _home(optimizer, network, name, conv) for name, conv in convolutions.items()}

    recast_(network, plan, steps=names)
    layers = {name: network.get_submodule(name) for name in names}
    carried = {name: carried_parameters(convolutions[name], layer) for name, layer in layers.items()}
    old = {id(pair.new) for pairs in carried.values() for pair in pairs}
    rates = {"gates": gate_lr, "sigmoid_gates": gate_lr, "queries_keys": qk_lr}
    for name, layer in layers.items():
        hand_over_(optimizer, carried[name])
        forget_(optimizer, name, convolutions[name], carried[name])
        kinds = parameter_kinds(layer, qk_lr is not None)
        for key, parameter in layer.named_parameters():
            if parameter.requires_grad and id(parameter) not in old:
                kind = kinds[id(parameter)]
                _join_(optimizer, f"{name}.{key}", parameter, kind, homes[name], rates.get(kind))
    for average in copies:
        recast_(average, plan, steps=names)
        _start_average_(average, layers, old)
    return model


def _check_network(network: nn.Module, plan: Plan, names: Sequence[str]) -> None:
    """Raise `RecastError` for a plan with pooling that the network does not have, and for a single convolution."""
    if plan.pool is not None and not attention_pools(network):
        raise RecastError(
            "the network lacks the plan's attention pooling: call attention_pool_(model, config=plan.pool) before the "
            "optimiser is made"
        )
    if "" in names:
        raise RecastError("the model itself is the convolution: put it into a module to recast it during training")


def _start_average_(average: nn.Module, layers: dict[str, nn.Module], old: set[int]) -> None:
    """Copy the new parameters of the layers, those whose ids are not among the `old`, into the average."""
    for name, layer in layers.items():
        averaged = dict(average.get_submodule(name).named_parameters())
        for key, parameter in layer.named_parameters():
            if id(parameter) not in old:
                averaged[key].detach().copy_(parameter.detach())


def _home(optimizer: Optimizer, network: nn.Module, name: str, conv: nn.Module) -> dict[str, Any]:
    """Return the group that trains a convolution's kernel; for a frozen one that of its layer, or the first.

    Raises RecastError for an optimiser that does not train all of the layer, or takes one group only.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise RecastError("LBFGS takes one group of parameters, recast layers require more: use another optimiser")
    groups = optimizer.param_groups
    held = {id(p): group for group in groups for p in group["params"]}
    trained = {key: p for key, p in conv.named_parameters() if p.requires_grad}
    if missing := [key for key, p in trained.items() if id(p) not in held]:
        raise RecastError(
            f"the optimiser does not train {name}.{missing[0]}: pass the optimiser of the whole layer, or freeze the "
            "parameter (requires_grad=False)"
        )
    if trained:
        return held[id(max(trained.values(), key=torch.Tensor.numel))]
    if "/" in str(groups[0].get("name", "")):  # a group for every layer: layer decay
        number = layer_of(name, layer_numbers(network), 0)
        return next((group for group in groups if str(group["name"]).endswith(f"/{number}")), groups[0])
    return groups[0]


def _peak(group: dict[str, Any]) -> float:
    return float(next((group[key] for key in PEAKS if key in group), group["lr"]))


def _peak_of(kind: str, optimizer: Optimizer, home: dict[str, Any], own_lr: float | None) -> float:
    """Return the peak rate of parameters of this kind, beside the kernel's group `home`."""
    rate = _peak(home)
    if own_lr is None:
        return rate * (LINEAR_GATE_LR_RATIO if kind == "gates" else 1.0)
    prefix, slash, _ = str(home.get("name", "")).partition("/")  # layer decay: a group for every layer
    base = max(_peak(g) for g in optimizer.param_groups if str(g.get("name", prefix)).partition("/")[0] == prefix)
    return own_lr * (rate / base if slash and base else 1.0)  # the head's rate is the one that is not decayed


def _join_(
    optimizer: Optimizer, name: str, parameter: nn.Parameter, kind: str, home: dict[str, Any], own_lr: float | None
) -> None:
    """Put a new parameter into the group of its kind; a missing group is made from the kernel's, `home`."""
    peak = _peak_of(kind, optimizer, home, own_lr)
    settings = _settings(home, kind, peak)
    prefix = str(home.get("name", "")).partition("/")[0]
    compared = ["name"] if prefix in KINDS else list(settings)  # groups of `param_groups` go by their names
    for group in optimizer.param_groups:
        # where a group counts its steps, the count would be wrong for a new parameter
        if "step" not in group and all(group.get(key) == settings[key] for key in compared):
            group["params"].append(parameter)
            if "param_names" in group:
                group["param_names"].append(name)
            return
    entry: Any = (name, parameter) if "param_names" in home else parameter
    optimizer.add_param_group({**settings, "params": [entry]})


def _settings(home: dict[str, Any], kind: str, peak: float) -> dict[str, Any]:
    """Return the settings of a group for parameters of this kind, with this peak rate, beside the kernel's group."""
    prefix, slash, number = str(home.get("name", "")).partition("/")
    decay = float(home.get("weight_decay", 0.0)) if kind in DECAYED else 0.0
    settings = {key: copy.deepcopy(home[key]) for key in home.keys() - {"params", "param_names", "step"}}
    if prefix in KINDS or (peak, decay) != (_peak(home), home.get("weight_decay", 0.0)):
        settings["name"] = f"{kind}{slash}{number}"
    settings |= dict.fromkeys((key for key in PEAKS if key in home), peak)
    settings |= {key: home[key] * peak / _peak(home) for key in ENDS if key in home and _peak(home)}
    return settings | {"lr": peak * (float(home["lr"]) / _peak(home) if _peak(home) else 0.0), "weight_decay": decay}
