"""Costs of the layers of a plan: every call at its size, equal layers counted once."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from recast.tracing.cost import Cost, layer_cost
from recast.tracing.observe import Call, copy_with


def on_meta(module: nn.Module) -> nn.Module:
    """A copy without values, on the meta device: made in no time, of any size."""
    return copy_with(module, lambda tensor: tensor.to("meta"))


class LayerCosts:
    """Costs of layers over all their calls; equal layers are measured once."""

    def __init__(self) -> None:
        self._known: dict[Any, Cost] = {}

    def of(self, layer: nn.Module, calls: list[Call], batch: int) -> Cost:
        """Cost per image of the example; a layer may run at several sizes, on more maps than images (proposals)."""
        total = Cost(0, 0, 0)
        for shape, count in Counter(call.input for call in calls).items():
            # what a layer prints holds its class, sizes, geometry and settings
            key = (repr(layer), tuple((p.dtype, p.requires_grad) for p in layer.parameters()), shape[1:])
            if key not in self._known:
                self._known[key] = layer_cost(layer, *shape[-3:])
            cost = self._known[key]
            maps = count * shape[0]
            total = Cost(
                cost.parameters,
                total.macs + cost.macs * maps // batch,
                total.activation_bytes + cost.activation_bytes * maps // batch,
                total.fixed_bytes + cost.fixed_bytes * count,
            )
        return total
