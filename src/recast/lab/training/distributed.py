"""One run on several processes: torchrun starts them, PyTorch's DistributedDataParallel averages the gradients.

    torchrun --nproc_per_node 8 -m recast train ...

Every process builds the same network from the same recipe and takes its share of every batch (`recast evaluate`: every
eighth batch); the first one writes the files. Without torchrun there is one process, and everything here does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from timm.layers import BatchNormAct2d, convert_sync_batchnorm
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from recast.errors import RecastError, shown
from recast.lab.config import ClassifyConfig, TaskConfig
from recast.lab.data.device import choose_device
from recast.lab.folder.files import locked
from recast.modes import computes_as

P = ParamSpec("P")
T = TypeVar("T")

TIMEOUT = timedelta(minutes=30)
"""Longest wait of a process for the others."""
PLAIN_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, BatchNormAct2d)


class ReportedByFirst(RecastError):
    """An error that the first process reports: the others stop without a message."""

    is_reported = True


def process_number() -> int:
    """Return the number of this process, 0 for the first or only one."""
    return dist.get_rank() if dist.is_initialized() else 0


def process_count() -> int:
    """Return the number of processes that share this run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """Return True in the process that writes files and messages."""
    return process_number() == 0


@contextmanager
def process_group(device: str, timeout: timedelta = TIMEOUT) -> Iterator[torch.device]:
    """Join the processes that torchrun started, for the block; yields this process's device.

    `device` is the recipe's: on CUDA each process takes the GPU of its LOCAL_RANK (NCCL), else they share the CPU
    (gloo). Raises RecastError where there are fewer GPUs than processes on a machine.
    """
    chosen = choose_device(device)
    is_shared = dist.is_initialized() or _is_one_of_several()
    if is_shared and chosen.type == "cuda":
        number, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if number >= count:
            raise RecastError(f"process {number} has no GPU: start torchrun with --nproc_per_node {count}")
        torch.cuda.set_device(number)
        chosen = torch.device("cuda", number)
    if dist.is_initialized() or not is_shared:  # inside another such block, or the only process
        yield chosen
        return
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=timeout)
    try:
        yield chosen
    finally:
        with suppress(RuntimeError):  # another process may have ended
            dist.destroy_process_group()


def _is_one_of_several() -> bool:
    """Return True if torchrun started this process beside others. Raises RecastError for variables that do not fit."""
    values = {name: os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")}
    if values["WORLD_SIZE"] in ("", "1"):
        return False
    remedy = "start the command with torchrun, or unset WORLD_SIZE"
    if missing := [name for name, value in values.items() if not value]:
        raise RecastError(f"WORLD_SIZE={shown(values['WORLD_SIZE'])} is set without {', '.join(missing)}: {remedy}")
    numbers = {name: value for name, value in values.items() if name != "MASTER_ADDR"}
    numbers["LOCAL_RANK"] = os.environ.get("LOCAL_RANK", "0")
    wrong = [name for name, value in numbers.items() if not (value.isascii() and value.isdecimal())]
    if not wrong and int(values["RANK"]) >= int(values["WORLD_SIZE"]):
        wrong = ["RANK"]
    if wrong:
        text = f"{wrong[0]}={shown(numbers[wrong[0]])} is not a number that fits WORLD_SIZE={values['WORLD_SIZE']}"
        raise RecastError(f"{text}: {remedy}")
    return True


def check_shares(batch_size: int, accumulate: int, task: TaskConfig) -> None:
    """Raise RecastError unless every part of every process gets the same number of images, an even one for Mixup."""
    parts = process_count() * accumulate
    size, rest = divmod(batch_size, parts)
    settings = f"data.batch_size {batch_size}, {process_count()} processes and accumulate {accumulate}"
    if rest or not size:
        raise RecastError(f"{settings}: every part must have the same number of images, use a multiple of {parts}")
    if isinstance(task, ClassifyConfig) and task.mixes and size % 2:
        raise RecastError(f"{settings} make parts of {size} images, but Mixup and CutMix pair them: use an even number")


def synchronise_batch_norm(model: nn.Module, device: torch.device) -> nn.Module:
    """Return the model with timm's SyncBatchNorm instead of every BatchNorm; a single process keeps its layers.

    Raises RecastError on a CPU, where torch has no such layer, and for a subclass of BatchNorm.
    """
    if process_count() == 1:
        return model
    if device.type != "cuda":
        raise RecastError(f"sync_bn requires GPUs, got {device.type}: set sync_bn=false")
    for name, norm in model.named_modules():
        if isinstance(norm, _BatchNorm) and not computes_as(norm, *PLAIN_NORMS):
            raise RecastError(f"sync_bn cannot replace {name} ({type(norm).__name__}): set sync_bn=false")
    return convert_sync_batchnorm(model)


def wrapped(model: nn.Module, device: torch.device, before: nn.Module | None = None) -> nn.Module:
    """Return the network whose backward pass averages gradients over the processes; the model for a single process.

    All processes get weights and buffers of the first one, before every forward pass its BatchNorm statistics: these
    are measured and saved. `before` is the return value for the same network while it had other parameters.
    """
    if isinstance(before, DistributedDataParallel):
        before.reducer._remove_autograd_hooks()  # parameters of both must not report to two reducers
    if process_count() == 1:
        return model
    return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)


def sum_over_processes_(values: Tensor, device: torch.device) -> Tensor:
    """Return the sum of a small tensor over the processes, perhaps in place, on `device`, without waiting for it."""
    if process_count() > 1:
        values = values.to(device)
        dist.all_reduce(values)
    return values


def gathered(values: Tensor) -> Tensor:
    """Return `values` (B, ...) of all processes in their order; B must be equal in all."""
    if process_count() == 1:
        return values
    parts = [torch.empty_like(values) for _ in range(process_count())]
    dist.all_gather(parts, values.contiguous())
    return torch.cat(parts)


def gathered_objects(value: T) -> list[T]:
    """Return the small objects of all processes in their order."""
    if process_count() == 1:
        return [value]
    values: list[T] = [value] * process_count()
    dist.all_gather_object(values, value)
    return values


@torch.no_grad()
def share_(model: nn.Module, weights: bool = True) -> None:
    """Copy the buffers (BatchNorm statistics) of the first process to all, and its weights."""
    if process_count() > 1:
        for tensor in (*(model.parameters() if weights else ()), *model.buffers()):
            dist.broadcast(tensor.data, src=0)


def on_first(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` in the first process. All return its value, and its RecastError or OSError stops all of them."""
    if process_count() == 1:
        return function(*args, **kwargs)
    outcome: list[object] = [None, None]
    error: BaseException | None = None
    if is_first():
        try:
            outcome = [function(*args, **kwargs), None]
        except (RecastError, OSError) as caught:
            outcome, error = [None, f"{caught}"], caught
    dist.broadcast_object_list(outcome, src=0)
    if error is not None:
        raise error
    if outcome[1] is not None:
        raise ReportedByFirst(str(outcome[1]))
    return outcome[0]  # type: ignore[return-value]


def first_then_all(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` in the first process, then in the others, which use the files that it downloaded."""
    values: list[T] = []
    on_first(lambda: values.append(function(*args, **kwargs)))
    return values[0] if values else function(*args, **kwargs)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock `folder` for the block: the first process holds it (`locked`) for all of them."""
    with ExitStack() as stack:
        on_first(stack.enter_context, locked(folder))
        yield


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGHUP. The message names the command that resumes; `saved` is True if the state is on disk.

    It is a KeyboardInterrupt, so that an `except Exception` around a study does not start its next run.
    """

    def __init__(self, message: str, saved: bool = False) -> None:
        super().__init__(message)
        self.saved = saved


class Stopped(KeyboardInterrupt):
    """Stop was requested between two steps: the state is whole and may be saved."""
