"""Tensors that are held in two places: recasting one would untie them."""

from __future__ import annotations

from torch import nn


class Sharing:
    """Where in a model every module and every parameter sits; built once for a plan."""

    def __init__(self, model: nn.Module) -> None:
        self._root = type(model).__name__
        self._places: dict[int, list[str]] = {}
        self._holders: dict[int, list[str]] = {}
        # a module that stands in several places is listed at each
        for name, module in model.named_modules(remove_duplicate=False):
            self._places.setdefault(id(module), []).append(name)
            for parameter in module.parameters(recurse=False):
                self._holders.setdefault(id(parameter), []).append(name)

    def elsewhere(self, module: nn.Module) -> str | None:
        """ "weight with head": a parameter of `module`, or of what computes its weight, held outside of it; or None."""
        own = self._places[id(module)]
        for name, parameter in module.named_parameters():
            for holder in self._holders[id(parameter)]:
                if not any(place == "" or f"{holder}.".startswith(f"{place}.") for place in own):
                    return f"{name} with {holder or self._root}"
        return None
