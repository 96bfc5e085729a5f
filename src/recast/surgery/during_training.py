"""`recast_during_training_`: layers leave the convolution in the middle of a training, and the optimiser goes on.

A kernel and W_out are the same numbers, so what the optimiser knows of the kernel (momentum, first and second moments,
number of steps) goes on as W_out's. What is new (queries, keys, positions, gates) starts without a history.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from recast.errors import RecastError, shown
from recast.fields import typed
from recast.layers.attention_pool import attention_pools
from recast.surgery.apply import check_recast, recast_
from recast.surgery.optimizer_state import carried_parameters, forget_, hand_over_
from recast.surgery.parameters import DECAYED, KINDS, LINEAR_GATE_LR_RATIO, layer_numbers, layer_of, parameter_kinds
from recast.surgery.plan import Plan
from recast.surgery.wrappers import changeable

PEAKS = ("peak_lr", "initial_lr")
"""Where a group keeps the rate that a schedule scales: this library's, and torch's schedulers'."""
ENDS = ("max_lr", "min_lr")
"""Where OneCycleLR keeps the rates that it goes between."""


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
    """Recast steps of a plan (all by default) of a network that `optimizer` is training; returns the model.

    The optimiser stays the same object. W_out and the bias take the places of the kernel and the bias in its groups,
    with their state by the same permutation: with the linear gate at its start the next update is the convolution's.
    New parameters join the groups that `param_groups` would give them ("decay", "no_decay", "gates", by name) at these
    groups' present rate; in an optimiser with other groups, the kernel's group or one beside it with its settings;
    where groups count their steps (LAMB), a group of their own. Nothing else is touched.

    gate_lr: peak rate of the gates. None: 10 × the kernel's for γ and s; the kernel's own for the sigmoid's λ, as in
    T-CNN*, "the same optimizer and learning rate" (d'Ascoli et al. 2021, Sec. 5).
    qk_lr: peak rate of queries and keys. None: the kernel's.
    averages: running averages of the weights (timm's `ModelEmaV3.module`, torch's AveragedModel): recast too, with the
    average's own kernels; new parameters start from the model's.

    A model compiled by torch.compile is recast inside and compiled anew at its next call. Of DistributedDataParallel
    pass the `.module`, and wrap that again. Raises RecastError as `recast_` does, before any change, and for a wrapped
    or sharded model, or an optimiser that trains only a part of the layer. Warns where a kernel is computed and its
    moments cannot become W_out's. Where W_out has another layout, factored moments (Adafactor) start anew.
    """
    single = isinstance(averages, nn.Module | torch.Tensor | str)
    copies: list[nn.Module] = [averages] if single else list(averages)  # type: ignore[list-item]
    if wrong := [average for average in copies if not isinstance(average, nn.Module)]:
        raise RecastError(f"averages must be networks (nn.Module), got {shown(wrong[0])}")
    network, copies = changeable(model), [changeable(average) for average in copies]
    optimizer = getattr(optimizer, "_base_optimizer", optimizer)  # timm's Lookahead keeps its state in there
    chosen = plan if steps is None else plan.only(steps)
    names = [step.name for step in chosen.steps]
    if not names:
        return model
    if plan.pool is not None and not attention_pools(network):
        raise RecastError(
            "the plan's attention pooling is not in the network, and the optimiser would not know it: put it in before "
            "the optimiser is made, attention_pool_(model, config=plan.pool)"
        )
    if "" in names:
        raise RecastError("the model itself is the convolution: put it into a module to recast it during training")
    for average in copies:  # `recast_` looks at the network itself before its first change
        check_recast(average, plan, chosen)
    convolutions = {name: module for name, module in network.named_modules() if name in names}
    homes = {name: _home(optimizer, network, name, conv) for name, conv in convolutions.items()}

    recast_(network, plan, steps=names)
    layers = {name: network.get_submodule(name) for name in names}
    carried = {name: carried_parameters(convolutions[name], layer) for name, layer in layers.items()}
    rates = {"gates": gate_lr, "sigmoid_gates": gate_lr, "queries_keys": qk_lr}
    known = {id(pair.new) for pairs in carried.values() for pair in pairs}
    for name, layer in layers.items():
        hand_over_(optimizer, carried[name])
        forget_(optimizer, name, convolutions[name], carried[name])
        kinds = parameter_kinds(layer, qk_lr is not None)
        for own, parameter in layer.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                kind = kinds[id(parameter)]
                _join_(optimizer, f"{name}.{own}", parameter, kind, homes[name], rates.get(kind))
    for average in copies:
        recast_(average, plan, steps=names)
        for name, layer in layers.items():
            averaged = dict(average.get_submodule(name).named_parameters())
            for own, parameter in layer.named_parameters():
                if id(parameter) not in known:  # the average of what has had one value only is that value
                    averaged[own].detach().copy_(parameter.detach())
    return model


def _home(optimizer: Optimizer, network: nn.Module, name: str, conv: nn.Module) -> dict[str, Any]:
    """The group that trains a convolution's kernel; for a frozen one that of its layer, or the first.

    Raises RecastError for an optimiser that cannot take it: it trains not all of the layer, or takes one group only.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise RecastError("LBFGS takes one group of parameters, a recast layer needs more: use another optimiser")
    groups = optimizer.param_groups
    held = {id(p): group for group in groups for p in group["params"]}
    trained = {own: p for own, p in conv.named_parameters() if p.requires_grad}
    if missing := [own for own, p in trained.items() if id(p) not in held]:
        raise RecastError(
            f"the optimiser does not train {name}.{missing[0]}: pass the one that trains all of the layer "
            "(or freeze what nobody trains, requires_grad=False)"
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
    """Peak rate of parameters of this kind, beside the kernel's group `home`."""
    rate = _peak(home)
    if own_lr is None:
        return rate * (LINEAR_GATE_LR_RATIO if kind == "gates" else 1.0)
    own, slash, _ = str(home.get("name", "")).partition("/")  # layer decay: a group for every layer
    base = max(_peak(g) for g in optimizer.param_groups if str(g.get("name", own)).partition("/")[0] == own)
    return own_lr * (rate / base if slash and base else 1.0)  # the head's rate is the one that is not decayed


def _others(group: dict[str, Any]) -> dict[str, Any]:
    """What a group sets beside rates and decay: momentum, timm's lr_scale, whatever its owner put there."""
    own = {"params", "param_names", "name", "step", "lr", "weight_decay", *PEAKS, *ENDS}
    plain = int | float | str | tuple | None
    return {key: value for key, value in group.items() if key not in own and isinstance(value, plain)}


def _join_(
    optimizer: Optimizer, name: str, parameter: nn.Parameter, kind: str, home: dict[str, Any], own_lr: float | None
) -> None:
    """Put a new parameter into the group it belongs to, made from the kernel's where there is none."""
    peak = _peak_of(kind, optimizer, home, own_lr)
    _, slash, number = str(home.get("name", "")).partition("/")
    wanted, decay = f"{kind}{slash}{number}", float(home.get("weight_decay", 0.0)) if kind in DECAYED else 0.0
    is_ours = str(home.get("name", "")).partition("/")[0] in KINDS
    for group in sorted(optimizer.param_groups, key=lambda group: group is not home):  # the kernel's own first
        alike = (_peak(group), float(group.get("weight_decay", 0.0))) == (peak, decay)
        alike = alike and _others(group) == _others(home)
        named = group.get("name", wanted) == wanted
        fits = (named and (alike or "name" in group)) if is_ours else (alike and (named or group is home))
        if fits and "step" not in group:  # a count of steps would be wrong for it
            group["params"].append(parameter)
            if "param_names" in group:
                group["param_names"].append(name)
            return
    factor = float(home["lr"]) / _peak(home) if _peak(home) else 0.0
    settings = {key: copy.deepcopy(home[key]) for key in home.keys() - {"params", "param_names", "step"}}
    settings |= dict.fromkeys((key for key in PEAKS if key in home), peak)
    settings |= {key: home[key] * peak / _peak(home) for key in ENDS if key in home and _peak(home)}
    settings |= {"lr": peak * factor, "weight_decay": decay, "name": wanted}
    own: Any = (name, parameter) if "param_names" in home else parameter
    optimizer.add_param_group({**settings, "params": [own]})
