"""The gates of a layer that were open when they were last read, and a check that this still holds."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

OpenMaps = tuple[tuple[int, ...], tuple[int, ...]]
"""Heads whose Gaussian gate is open, and heads whose content gate is."""


class SeenGates:
    """The heads whose Gaussian or content gate was open when the gates were read, and a check that this still holds."""

    def __init__(self, open_maps: OpenMaps, *gates: Tensor) -> None:
        self.open_maps, self.gates, self.versions = open_maps, gates, self._versions(gates)

    def still_hold(self, *gates: Tensor) -> bool:
        """Return True if these are the same tensor objects with unchanged version counters; no value is read."""
        return all(map(operator.is_, gates, self.gates)) and self.unwritten()

    def unwritten(self) -> bool:
        """Return True if the gates have unchanged version counters."""
        return self._versions(self.gates) == self.versions

    @staticmethod
    def _versions(gates: Iterable[Tensor]) -> list[int]:
        """Return the version counters, which every in-place write raises."""
        return [-1 if gate.is_inference() else gate._version for gate in gates]


def _count_fused_writes(optimizer: Optimizer, *_: Any) -> None:
    """Raise version counters after steps of fused optimisers, which do not do so themselves (`SeenGates`)."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            torch.autograd.graph.increment_version([p for p in group["params"] if p.grad is not None])


register_optimizer_step_post_hook(_count_fused_writes)
