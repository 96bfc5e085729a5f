"""Which parameter of a recast layer is which of its convolution's, and how what belongs to one belongs to the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recast.layers.geometry import flip_transpose


class Moved(NamedTuple):
    """A parameter of a convolution and the one that it became."""

    old: nn.Parameter
    new: nn.Parameter
    relaid: Callable[[Tensor], Tensor] | None
    """Lays out any tensor of the old one's shape as the new one is; None: they are laid out alike."""


@torch.no_grad()
def moved_parameters(conv: nn.Module, layer: nn.Module) -> list[Moved]:
    """Parameters of `conv` that live on in the layer that it became, with the same numbers in another order at most.

    A pair counts only if the numbers are equal: a kernel that was computed from its parameter is not that parameter.
    """
    theirs = dict(layer.named_parameters())
    pairs = []
    for name, old in conv.named_parameters():
        for where in _candidates(name, theirs):
            new, relaid = theirs[where], _relaid(conv, name)
            same = old if relaid is None else relaid(old)
            if same.shape == new.shape and torch.equal(same, new):
                pairs.append(Moved(old, new, relaid))
                del theirs[where]
                break
    return pairs


def _candidates(name: str, theirs: dict[str, nn.Parameter]) -> list[str]:
    """Names that a convolution's parameter may have in the layer: its own, or inside a kept parametrisation."""
    kept = [other for other in theirs if other.startswith("parametrizations.weight.")]
    if name == "weight":
        return [other for other in ("weight", "parametrizations.weight.original") if other in theirs]
    if name == "gain":
        return [other for other in kept if other.endswith(".gain")]
    return [name] if name in theirs else []


def _relaid(conv: nn.Module, name: str) -> Callable[[Tensor], Tensor] | None:
    """How a tensor of the kernel's shape is laid out in W_out; None: as it is."""
    if name != "weight":
        return None
    if isinstance(conv, nn.ConvTranspose2d):
        return lambda tensor: flip_transpose(tensor, conv.groups)
    own: Any = getattr(conv, "token_kernel", None)  # a convolution of pixels, as a kernel over tokens
    return own if callable(own) else None


@torch.no_grad()
def moved_state(known: dict[str, Any], pair: Moved) -> dict[str, Any] | None:
    """What an optimiser knows of a parameter, for the one that it became; None: it cannot be laid out anew.

    Moments are laid out as the kernel. Factored ones (Adafactor's rows and columns) belong to one layout. Where W_out
    has entries that the kernel had not (the zeros of a convolution of pixels over tokens), second moments are the mean
    of the others: with a count of steps and a second moment of 0, the first updates would be several times the rate.
    """
    if pair.relaid is None:
        return dict(known)
    state = {}
    for key, value in known.items():
        if isinstance(value, Tensor) and value.dim() and value.shape == pair.old.shape:
            state[key] = pair.relaid(value)
            if "sq" in key:  # exp_avg_sq, square_avg, max_exp_avg_sq
                state[key] = torch.where(pair.relaid(torch.ones_like(value)) == 0, value.mean(), state[key])
        elif (isinstance(value, Tensor) and value.dim()) or isinstance(value, list | tuple | dict):
            return None
        else:
            state[key] = value
    return state
