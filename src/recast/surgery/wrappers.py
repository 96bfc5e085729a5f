"""Wrappers of networks in training scripts: surgery works on the network inside, under its own names."""

from __future__ import annotations

from timm.utils import ModelEmaV2, ModelEmaV3
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from recast.errors import RecastError


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

    Raises `RecastError` for a wrapper that holds the parameters: new ones would be trained by each process, or by none.
    """
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise RecastError("DistributedDataParallel holds its parameters: pass model.module, and wrap that again after")
    return whole(model)


def whole(model: nn.Module) -> nn.Module:
    """Return the network inside its wrappers. Raises `RecastError` for one in FSDP, also while it is gathered."""
    network = unwrapped(model)
    held = *network.modules(), *network.parameters()
    if any(isinstance(part, FSDPModule | FullyShardedDataParallel | DTensor) for part in held):
        cure = "do this before, or with the state that torch.distributed.checkpoint.state_dict gathers"
        raise RecastError(f"parameters are sharded (FSDP): {cure}")
    return network
