"""What attention pooling adds to the cost of a network: the network is counted with it and without."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

from torch import Tensor, nn

from recast.errors import RecastError
from recast.run.config import PoolConfig
from recast.surgery.pooling.swap import noise, swap_
from recast.tracing.cost import Cost, count_parameters
from recast.tracing.observe import Example, Observation, observe


def pool_cost(
    model: nn.Module, example: Example, config: PoolConfig, seen: Observation, steps: Iterable[str] = (),
    edit: Callable[[nn.Module], None] | None = None,
) -> Cost:  # fmt: skip
    """Parameters, multiply-accumulates and activation memory of one image that `config` adds; `model` is only read.

    `seen` is the pass of the network without the pool, after `edit`; `steps` are the layers that become attention too.
    Raises RecastError as `attention_pool_` does, and where the pool takes the place of one of `steps`.
    """
    pooled = copy.deepcopy(model)
    swap_(pooled, config, images_of(pooled, example))
    for name in steps:
        if type(pooled.get_submodule(name)) is not type(model.get_submodule(name)):
            raise RecastError(
                f"{name} is the classifier, which pool.kind={config.kind} takes apart: select other layers, or take "
                "pool.kind=single"
            )
    found = observe(pooled, example, set(), edit)
    added = count_parameters(pooled) - count_parameters(model)
    return Cost(added, found.macs - seen.macs, found.activation_bytes - seen.activation_bytes)


def images_of(model: nn.Module, example: Example) -> Tensor | None:
    """Noise of the shape of an example's images; None where it is no batch of them."""
    shape = pool_input(example)
    return None if shape is None else noise(model, shape)


def pool_input(example: Example) -> tuple[int, int, int] | None:
    """(C, H, W) of an example; None where it is no batch of images."""
    first = example[0] if isinstance(example, tuple) and len(example) == 1 else example
    if not isinstance(first, Tensor) or first.dim() != 4:
        return None
    return first.shape[1], first.shape[2], first.shape[3]
