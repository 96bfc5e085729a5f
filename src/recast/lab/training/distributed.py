"""One run on several processes: torchrun starts them, PyTorch's DistributedDataParallel averages the gradients.

    torchrun --nproc_per_node 8 -m recast train ...

Every process builds the same network from the same recipe and takes its share of every batch; the first one writes the
files. Without torchrun there is one process, and everything here does nothing.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from timm.layers import BatchNormAct2d, convert_sync_batchnorm
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from recast.errors import RecastError
from recast.files import locked
from recast.lab.config import ClassifyConfig, Recipe
from recast.lab.device import choose_device
from recast.surgery.stride import replace_module_
from recast.tracing.hooks import computes_as

T = TypeVar("T")

TIMEOUT = timedelta(minutes=30)
"""A process that hears nothing from the others for so long stops: no run hangs for ever on a dead one."""

LOST = re.compile("gloo|NCCL|TCPStore|Connection (closed|reset|refused)|Broken pipe|Timed? ?out|closed by peer")
"""What torch says when a process is gone. NCCL and the store raise DistError; gloo, also inside of a backward pass,
raises the RuntimeError that a wrong shape raises too, and a process that is gone cannot be asked: only the text tells.
Any other error is raised as it is: nothing is hidden, it is only said less plainly."""


class ToldByFirst(RecastError):
    """What the first process has already reported: the others stop too, in silence."""

    already_told = True


def process_number() -> int:
    """0 for the first process, and for the only one."""
    return dist.get_rank() if dist.is_initialized() else 0


def process_count() -> int:
    """How many processes share this run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """True for the process that writes files and speaks."""
    return process_number() == 0


@contextmanager
def process_group(device: str) -> Iterator[torch.device]:
    """Join the processes that torchrun started, for the block; yields this process's device.

    `device` is the recipe's: on CUDA each process takes the GPU of its LOCAL_RANK (NCCL), else they share the CPU
    (gloo). Raises RecastError where there are fewer GPUs than processes on a machine, and where the others are lost.
    """
    chosen = choose_device(device)
    shared = dist.is_initialized() or _started_together()
    if shared and chosen.type == "cuda":
        number, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if number >= found:
            raise RecastError(f"process {number} of this machine has no GPU of its own: there are {found}, "
                              f"start torchrun with --nproc_per_node {found}")  # fmt: skip
        torch.cuda.set_device(number)
        chosen = torch.device("cuda", number)
    if dist.is_initialized() or not shared:  # the only process, or inside of another such block
        yield chosen
        return
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        yield chosen
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or LOST.search(str(error))):
            raise
        raise RecastError(
            f"process {process_number()} of {process_count()} lost the others: one of them stopped (torchrun names it "
            "below) or the network failed; continue with the same command and --resume auto"
        ) from None
    finally:
        with suppress(RuntimeError):  # the others may be gone already
            dist.destroy_process_group()


def _started_together() -> bool:
    """Whether torchrun started this process with others. Raises RecastError where it left something out."""
    told = {name: os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK", "MASTER_PORT")}
    if told["WORLD_SIZE"] in ("", "1"):
        return False
    wrong = [name for name, value in told.items() if not value.isdigit()]
    if wrong or not os.environ.get("MASTER_ADDR"):
        raise RecastError(
            f"WORLD_SIZE is set, as torchrun does to start several processes, but {(wrong or ['MASTER_ADDR'])[0]} is "
            "missing or no number: start with torchrun, or unset WORLD_SIZE"
        )
    return True


def check_shares(recipe: Recipe) -> None:
    """Raise RecastError unless every part of every process gets the same number of images, even ones for Mixup."""
    parts = process_count() * recipe.accumulate
    size, left = divmod(recipe.data.batch_size, parts)
    how = f"data.batch_size {recipe.data.batch_size}, {process_count()} processes and accumulate {recipe.accumulate}"
    if left or not size:
        raise RecastError(f"{how}: every part must have the same number of images, use a multiple of {parts}")
    if isinstance(recipe.task, ClassifyConfig) and recipe.task.mixes and size % 2:
        raise RecastError(f"{how} make parts of {size} images, but Mixup and CutMix pair them: use an even number")


def synchronise_batch_norm(model: nn.Module, device: torch.device) -> nn.Module:
    """BatchNorm statistics over all processes. A BatchNorm with a forward pass of its own stays, which a warning says.
    Raises RecastError on a CPU, where torch has no such layer."""
    if process_count() == 1:
        return model
    if device.type != "cuda":
        raise RecastError(f"sync_bn needs GPUs, got {device.type}: set sync_bn=false, or regularization.freeze_bn=true")
    return synchronised_(model)


def synchronised_(model: nn.Module) -> nn.Module:
    """timm's conversion to SyncBatchNorm of every BatchNorm that computes what its class does."""
    plain = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, BatchNormAct2d)
    norms = {
        n: m for n, m in model.named_modules() if isinstance(m, _BatchNorm) and not isinstance(m, nn.SyncBatchNorm)
    }
    skipped = [f"{name} ({type(norm).__name__})" for name, norm in norms.items() if not computes_as(norm, *plain)]
    for norm in norms.values():
        if computes_as(norm, *plain):
            replace_module_(model, norm, convert_sync_batchnorm(norm))
    if skipped:
        warnings.warn(
            f"sync_bn skips {len(skipped)} BatchNorm with a forward pass or hooks of their own, first {skipped[0]}: "
            "their statistics stay those of one process",
            stacklevel=3,
        )
    return model


def wrapped(model: nn.Module, device: torch.device, before: nn.Module | None = None) -> nn.Module:
    """The network whose backward pass averages gradients over the processes; the network itself where there is one.

    Weights and buffers of the first process go to all. BatchNorm's statistics are the first process's, sent to the
    others before every forward pass, so that they are what is saved and measured. `before` is what this gave for the
    same network while it had other parameters.
    """
    if isinstance(before, DistributedDataParallel):
        before.reducer._remove_autograd_hooks()  # of parameters that stay: they must not report to two reducers
    if process_count() == 1:
        return model
    return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)


def sum_over_processes_(values: Tensor, device: torch.device) -> Tensor:
    """Sum of a small tensor of numbers over the processes, perhaps in place, on `device`; waits for nothing there."""
    if process_count() > 1:
        values = values.to(device)
        dist.all_reduce(values)
    return values


def gathered(values: Tensor) -> Tensor:
    """`values` (B, ...) of all processes, as many in each, in the order of the processes."""
    if process_count() == 1:
        return values
    found = [torch.empty_like(values) for _ in range(process_count())]
    dist.all_gather(found, values.contiguous())
    return torch.cat(found)


def union_over_processes(names: Iterable[str]) -> list[str]:
    """Every name that some process has, each once, sorted."""
    found: list[list[str] | None] = [list(names)]
    if process_count() > 1:
        mine, found = found[0], [None] * process_count()
        dist.all_gather_object(found, mine)
    return sorted({name for each in found for name in each or ()})


@torch.no_grad()
def share_(model: nn.Module, weights: bool = True) -> None:
    """Give every process the first one's buffers (BatchNorm's statistics) and weights, so that all have one network."""
    if process_count() > 1:
        for tensor in (*(model.parameters() if weights else ()), *model.buffers()):
            dist.broadcast(tensor.data, src=0)


def on_first(function: Callable[[], T]) -> T:
    """What `function` returns in the first process, in all of them. Its RecastError or OSError stops all of them."""
    if process_count() == 1:
        return function()
    outcome: list[object] = [None, None]
    error: BaseException | None = None
    if is_first():
        try:
            outcome = [function(), None]
        except (RecastError, OSError) as caught:
            outcome, error = [None, f"{caught}"], caught
    dist.broadcast_object_list(outcome, src=0)
    if error is not None:
        raise error
    if outcome[1] is not None:
        raise ToldByFirst(str(outcome[1]))
    return outcome[0]  # type: ignore[return-value]


def first_then_all(function: Callable[[], T]) -> T:
    """What `function` returns, called in the first process before the others: what it downloads is there for them."""
    found: list[T] = []
    on_first(lambda: found.append(function()))
    return found[0] if found else function()


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Be the only run that writes `folder` for the block: the first process holds it (`locked`) for all of them."""
    with ExitStack() as holding:
        on_first(lambda: holding.enter_context(locked(folder)))
        yield


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGHUP, after the state was saved. The message says how to go on; the command line prints it.

    A KeyboardInterrupt, so that an `except Exception` around a study does not go on with the next run. `saved`: whether
    what was trained so far is on the disk.
    """

    def __init__(self, message: str, saved: bool = False) -> None:
        super().__init__(message)
        self.saved = saved


class Stopped(KeyboardInterrupt):
    """The wish was heard between two steps: the state is whole and may be saved."""
