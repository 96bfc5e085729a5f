"""Cost of a layer: parameters, multiply-accumulates and activation memory, counted by running it without data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from recast.config import Whole, checked


@checked
class Cost:
    """Parameters; multiply-accumulates of one image; bytes kept for the backward pass.

    A training step on B images keeps `fixed_bytes` + B · `activation_bytes`: kernels that are computed in the forward
    pass (scaled taps, standardised weights) and positional maps are kept once, whatever the batch.
    """

    parameters: Whole
    macs: Whole
    activation_bytes: Whole
    fixed_bytes: Whole = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Cost) -> Cost:
        return Cost(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def memory(self) -> int:
        """Bytes kept for the backward pass of one image."""
        return self.activation_bytes + self.fixed_bytes


@contextmanager
def saved_sizes(model: nn.Module) -> Iterator[list[int]]:
    """Collect the bytes that autograd keeps for backward: each storage once, without parameters and buffers."""
    counted = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    alive: list[Tensor] = []  # a freed storage's address may be given out again
    sizes: list[int] = []

    def count(tensor: Tensor) -> None:
        """Keep nothing, as no backward follows (a kept output would hold its own graph, and that the output)."""
        storage = _storage(tensor)
        if storage not in counted:
            counted.add(storage)
            alive.append(tensor)
            sizes.append(tensor.untyped_storage().nbytes())

    try:
        with saved_tensors_hooks(count, lambda _: None):  # type: ignore[arg-type, return-value]
            yield sizes
    finally:
        alive.clear()  # the graph holds the hook, and would hold what it saved


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def count_parameters(module: nn.Module) -> int:
    """Count the scalars in the parameters, shared ones once."""
    return sum(p.numel() for p in module.parameters())


def layer_cost(layer: nn.Module, *size: int) -> Cost:
    """Return the cost of a layer on one map (C, H, W) in training. Nothing is allocated or computed.

    `layer` is on the meta device. Activation memory is the growth from one map to two; the rest is fixed.
    """
    totals, macs = list[int](), 0
    layer.train()  # in eval mode a closed layer runs as `split`, whose count is not that of the open layer
    dtype = next((p.dtype for p in layer.parameters() if p.is_floating_point()), torch.float32)
    for batch in (1, 2):
        counted, saved = FlopCounterMode(display=False), saved_sizes(layer)
        with torch.inference_mode(False), torch.enable_grad(), counted as flops, saved as sizes:
            leaf = torch.empty(batch, *size, device="meta", dtype=dtype, requires_grad=True)
            layer(leaf.clone())  # a layer may change its input, but not a leaf
        totals.append(sum(sizes))
        macs = flops.get_total_flops() // 2 // batch
    each = totals[1] - totals[0]
    return Cost(count_parameters(layer), macs, each, max(0, totals[0] - each))


def cost_of_calls(layer: nn.Module, inputs: Iterable[tuple[int, ...]], images: int) -> Cost:
    """Return the cost per image of all uses of a layer on the meta device, from its inputs' shapes (maps, C, H, W).

    A layer may run at several sizes, and on more maps than there are images (a detector's proposals).
    """
    total = Cost(count_parameters(layer), 0, 0)
    for (maps, *size), count in Counter(inputs).items():
        cost = layer_cost(layer, *size)
        maps *= count
        total += Cost(0, cost.macs * maps // images, cost.activation_bytes * maps // images, cost.fixed_bytes * count)
    return total
