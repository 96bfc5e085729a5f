"""Optimiser state of a convolution's parameters, carried over to the layer that it became."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recast.layers.geometry import flip_transpose


class Carried(NamedTuple):
    """A parameter of a convolution and the one that it became."""

    old: nn.Parameter
    new: nn.Parameter
    relaid: Callable[[Tensor], Tensor] | None
    """Rearranges a tensor from the old parameter's layout to the new one's; None: the layouts are equal."""


@torch.no_grad()
def carried_parameters(conv: nn.Module, layer: nn.Module) -> list[Carried]:
    """Return the parameters of `conv` that live on in its layer: the same numbers, perhaps in another order.

    A pair counts only if the numbers are equal: a kernel that is computed from a parameter is not that parameter.
    """
    theirs = dict(layer.named_parameters())
    shared = {id(parameter) for parameter in theirs.values()}  # beside attention, those of the convolution
    pairs = []
    for name, old in conv.named_parameters():
        if id(old) in shared:
            pairs.append(Carried(old, old, None))
            continue
        relaid = _relaid(conv) if name == "weight" else None
        same = old if relaid is None else relaid(old)
        new = theirs.get(name)
        if new is not None and same.shape == new.shape and torch.equal(same, new):
            pairs.append(Carried(old, new, relaid))
    return pairs


def _relaid(conv: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return the function that rearranges a tensor of the kernel's layout to W_out's; None if they are equal."""
    if isinstance(conv, nn.ConvTranspose2d):
        return lambda tensor: flip_transpose(tensor, conv.groups)
    token_kernel: Any = getattr(conv, "token_kernel", None)  # a convolution of pixels, as a kernel over tokens
    return token_kernel if callable(token_kernel) else None


@torch.no_grad()
def _carried_state(old_state: dict[str, Any], pair: Carried) -> dict[str, Any] | None:
    """Return the state of a parameter for its successor; None if it cannot be rearranged.

    Moments are rearranged like the kernel. Factored ones (Adafactor's rows and columns) have one layout only. If W_out
    has entries that the kernel lacked (the zeros of a convolution of pixels over tokens), second moments are the mean
    of the others: with a count of steps and a second moment of 0, the first updates would be several times the rate.
    """
    if pair.relaid is None:
        return dict(old_state)
    state = {}
    for key, value in old_state.items():
        if isinstance(value, Tensor) and value.dim() and value.shape == pair.old.shape:
            state[key] = pair.relaid(value)
            if "sq" in key:  # exp_avg_sq, square_avg, max_exp_avg_sq
                state[key] = torch.where(pair.relaid(torch.ones_like(value)) == 0, value.mean(), state[key])
        elif (isinstance(value, Tensor) and value.dim()) or isinstance(value, list | tuple | dict):
            return None
        else:
            state[key] = value
    return state


def hand_over_(optimizer: Optimizer, carried: Iterable[Carried]) -> None:
    """Put the new parameters in the places of the old ones, in their groups and in the optimiser's state."""
    by_old = {id(pair.old): pair for pair in carried}
    for group in optimizer.param_groups:
        group["params"] = [by_old[id(p)].new if id(p) in by_old else p for p in group["params"]]
    for pair in by_old.values():
        if pair.old.grad is not None:
            pair.new.grad = pair.old.grad if pair.relaid is None else pair.relaid(pair.old.grad)
        old_state = optimizer.state.pop(pair.old, None)
        if old_state and (state := _carried_state(old_state, pair)) is not None:
            optimizer.state[pair.new] = state


def forget_(optimizer: Optimizer, name: str, conv: nn.Module, carried: Iterable[Carried]) -> None:
    """Remove the parameters that the network no longer has: those that a kernel was computed from."""
    gone = {id(p) for p in conv.parameters()} - {id(pair.old) for pair in carried}
    lost = [p for group in optimizer.param_groups for p in group["params"] if id(p) in gone]
    for group in optimizer.param_groups:
        stay = [id(p) not in gone for p in group["params"]]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [item for item, stays in zip(group[key], stay, strict=True) if stays]
    for parameter in lost:
        optimizer.state.pop(parameter, None)
    if lost:
        warnings.warn(f"{name} computes its kernel: W_out starts without its moments", stacklevel=3)
