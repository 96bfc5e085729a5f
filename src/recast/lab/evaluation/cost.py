"""Suite `cost`: parameters, multiply-accumulates, speed and memory of a model on this machine."""

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
from recast.lab.evaluation.evaluators import evaluates
from recast.tracing.cost import count_parameters
from recast.tracing.timing import time_models

BATCH_SIZE = 32


def count_macs(model: nn.Module, image: Tensor) -> int:
    """Return the multiply-accumulates of matrix products and convolutions for one `image` (1, C, H, W).

    This is half of the count of `torch.utils.flop_counter` (2 per multiply-add), without softmax, norms and sums.
    """
    # MATH: the counter does not know the fused attention kernels of every device
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(image)
    return counter.get_total_flops() // 2


@evaluates("cost", "measure")
def measure_cost(context: Context) -> Iterator[tuple[str, str, float, int]]:
    """Measure parameters, macs (of one image), images_per_second (median) and peak_memory for at most 32 images."""
    images = next(context.batches()).images[:BATCH_SIZE]
    times = time_models(context.models, images)
    for name, model in context.models.items():
        yield (name, "parameters", count_parameters(model), 1)
        yield (name, "macs", count_macs(model, images[:1]), 1)
        yield (name, "images_per_second", len(images) / statistics.median(times[name]), len(images))
        yield (name, "peak_memory", peak_memory(model, images), len(images))


def peak_memory(model: nn.Module, images: Tensor) -> int:
    """Return the peak memory of a forward pass in bytes, without weights and input.

    On CUDA that of torch's allocator, elsewhere the tensors alive at the same time, without scratch memory of kernels.
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
    """Sum of the storages created by operations and not yet freed, and its peak."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.peak = 0
        self.alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = set(_storages((args, kwargs)))
        outputs = func(*args, **(kwargs or {}))
        for identity, storage in _storages(outputs).items():
            if identity not in self.alive | inputs:
                self.alive.add(identity)
                self.total += storage.nbytes()
                weakref.finalize(storage, self._freed, identity, storage.nbytes())
        self.peak = max(self.peak, self.total)
        return outputs

    def _freed(self, identity: int, size: int) -> None:
        self.alive.discard(identity)
        self.total -= size


def _storages(values: Any) -> dict[int, torch.UntypedStorage]:
    """Return the storages of all tensors in nested tuples by address."""
    storages = (leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return {storage._cdata: storage for storage in storages}
