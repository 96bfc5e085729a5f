"""Time modules on this machine side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

SECONDS = 2.0
"""Time a model may take, unless its first batches take longer."""


Clock = Callable[[], float]
Model = Callable[[Tensor], object]


def time_models(
    models: Mapping[str, Model], images: Tensor, seconds: float = SECONDS, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Measure the seconds of a batch, several times for each model.

    The models take turns, so that a machine that slows down slows them all, in one order and back: what follows a model
    that filled the cache is not always the same. First one round that is not counted.
    """
    first = [_time(model, images, clock) for model in models.values()]
    repeats = min(20, max(3, int(seconds / max(first))))
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(repeats):
        for name in list(models)[:: -1 if turn % 2 else 1]:
            times[name].append(_time(models[name], images, clock))
    return times


@torch.no_grad()
def _time(model: Model, images: Tensor, clock: Clock) -> float:
    wait = torch.accelerator.synchronize if images.device.type != "cpu" else lambda device: None
    wait(images.device)
    begin = clock()
    model(images)
    wait(images.device)
    return clock() - begin
