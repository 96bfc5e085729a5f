"""Suite `cost`: what a model weighs and how fast it runs here."""

from __future__ import annotations

import statistics
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from recast.lab.evaluation.context import Context
from recast.tracing.cost import count_parameters
from recast.tracing.timing import time_models

BATCH_SIZE = 32


def count_macs(model: nn.Module, image: Tensor) -> int:
    """Multiply-accumulates of matrix products and convolutions for one batch `image` (1, C, H, W).

    Half of what `torch.utils.flop_counter` counts (2 per multiply-add); softmax, norms and sums are not in it.
    """
    # The counter does not know the fused attention kernels of every device; the plain one is two products it counts.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(image)
    return counter.get_total_flops() // 2


def measure_cost(context: Context) -> Iterator[tuple[str, str, float, int]]:
    """parameters, macs (of one image), images_per_second (median) and peak_memory in batches of at most 32."""
    images = next(context.batches()).images[:BATCH_SIZE]
    times = time_models(context.models, images)
    for name, model in context.models.items():
        yield (name, "parameters", count_parameters(model), 1)
        yield (name, "macs", count_macs(model, images[:1]), 1)
        yield (name, "images_per_second", len(images) / statistics.median(times[name]), len(images))
        yield (name, "peak_memory", peak_memory(model, images), len(images))


def peak_memory(model: nn.Module, images: Tensor) -> int:
    """Bytes that a forward pass holds at its peak, above weights and input.

    CUDA: what torch's allocator gave out. Elsewhere: the tensors that are alive at the same time, without the scratch
    memory inside a kernel.
    """
    with torch.no_grad():
        if images.device.type != "cuda":
            with _Alive() as alive:
                model(images)
            return alive.peak
        torch.cuda.reset_peak_memory_stats(images.device)
        before = torch.cuda.memory_allocated(images.device)
        model(images)
        return torch.cuda.max_memory_allocated(images.device) - before


class _Alive(TorchDispatchMode):
    """Adds up the storages that operations make, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = set(_storages((args, kwargs)))
        found = func(*args, **(kwargs or {}))
        for identity, storage in _storages(found).items():
            if identity not in self.known | given:
                self.known.add(identity)
                self.held += storage.nbytes()
                weakref.finalize(storage, self._freed, identity, storage.nbytes())
        self.peak = max(self.peak, self.held)
        return found

    def _freed(self, identity: int, size: int) -> None:
        self.known.discard(identity)
        self.held -= size


def _storages(values: Any) -> dict[int, torch.UntypedStorage]:
    """The storages of all tensors in nested tuples, by their address."""
    storages = (leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return {storage._cdata: storage for storage in storages}
