"""Wrappers of networks in training scripts: surgery works on the network inside, under its own names."""

from __future__ import annotations

from timm.utils import ModelEmaV2, ModelEmaV3
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from recast.errors import RecastError

WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Parts of names that compiled, checkpointed and sharded modules add, but not to the names of weights."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the network inside torch.compile, DataParallel, DistributedDataParallel and weight averages."""
    while True:
        if isinstance(model, OptimizedModule):
            model = model._orig_mod
        elif isinstance(model, nn.DataParallel | DistributedDataParallel | AveragedModel | ModelEmaV2 | ModelEmaV3):
            model = model.module
        else:
            return model


def changeable(model: nn.Module) -> nn.Module:
    """Return the network inside its wrappers, for replacing layers.

    Raises `RecastError` for a wrapper that is bound to the parameters: new ones would be trained by each process alone,
    or not at all.
    """
    if isinstance(model, DistributedDataParallel) or any(
        isinstance(module, DistributedDataParallel) for module in model.modules()
    ):
        raise RecastError(
            "DistributedDataParallel is bound to its parameters: pass model.module, and wrap that again afterwards"
        )
    network = unwrapped(model)
    sharded = type(network).__name__ == "FullyShardedDataParallel"
    if sharded or any(isinstance(p, DTensor) for p in network.parameters()):
        raise RecastError(
            "the parameters are sharded (FSDP): recast before sharding, or gather the state "
            "(torch.distributed.checkpoint.state_dict), recast, and shard again"
        )
    return network


def plain_name(name: str) -> str:
    """Return a module's name as in its state dict."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by `plain_name`."""
    return {plain_name(name): module for name, module in model.named_modules()}
