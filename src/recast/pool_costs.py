"""What attention pooling adds to the cost of a network: the network is counted with it and without."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

from torch import nn

from recast.config import PoolConfig
from recast.cost import Cost, count_parameters
from recast.errors import RecastError
from recast.pooling.swap import attention_pool_
from recast.shapes import Example, Observation, observe


def pool_cost(
    model: nn.Module, example: Example, config: PoolConfig, seen: Observation, steps: Iterable[str] = (),
    edit: Callable[[nn.Module], None] | None = None,
) -> Cost:  # fmt: skip
    """Parameters, multiply-accumulates and activation memory of one image that `config` adds; `model` is only read.

    `seen` is the pass of the network without the pool, after `edit`; `steps` are the layers that become attention too.
    Raises RecastError as `attention_pool_` does, and where the pool takes the place of one of `steps`.
    """
    pooled = attention_pool_(copy.deepcopy(model), config=config)
    for name in steps:
        if type(pooled.get_submodule(name)) is not type(model.get_submodule(name)):
            raise RecastError(
                f"{name} is the classifier, which pool.kind={config.kind} takes apart: select other layers, or take "
                "pool.kind=single"
            )
    found = observe(pooled, example, set(), edit)
    added = count_parameters(pooled) - count_parameters(model)
    return Cost(added, found.macs - seen.macs, found.activation_bytes - seen.activation_bytes)
