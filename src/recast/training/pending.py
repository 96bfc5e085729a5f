"""Losses that the device is still computing: read one step late on an accelerator, so that it never waits for us."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from recast.training.distributed import mean_over_processes_


@dataclass(frozen=True)
class Outcome:
    """What a finished step gave, the same in every process."""

    step: int
    loss: float
    """Mean over the images of the whole batch."""
    stop: bool
    """Some process was asked to stop."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss)


class Pending:
    """Steps that were launched and not yet looked at. On a CPU there is nothing to wait for: the newest is read."""

    def __init__(self, device: torch.device) -> None:
        self.lag = 0 if device.type == "cpu" else 1
        self.waiting: deque[tuple[int, Tensor]] = deque()

    def add(self, step: int, loss: Tensor, stop: bool) -> None:
        """Average loss and wish over the processes, without waiting for the result."""
        values = torch.stack([loss.float(), torch.full_like(loss, float(stop), dtype=torch.float32)])
        self.waiting.append((step, mean_over_processes_(values)))

    def finished(self, everything: bool = False) -> list[Outcome]:
        """Steps to look at now, in order; `everything` waits for the last one too."""
        outcomes = []
        while len(self.waiting) > (0 if everything else self.lag):
            step, values = self.waiting.popleft()
            loss, stop = values.tolist()
            outcomes.append(Outcome(step, loss, stop > 0))
        return outcomes
