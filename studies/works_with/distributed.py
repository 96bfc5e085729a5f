"""Several processes of torch, on the CPU: are the gradients those of one process?"""

from __future__ import annotations

import copy
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from tools import LABELS, LAYERS, Case, Cell, case_of, tool

import recast

SEPARATE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""A store for every try of torchrun: findings/torchrun_restart.sh."""


def join(rank: int, port: int) -> None:
    """Become one of two processes."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", rank=rank, world_size=2)


def leave(rank: int, answer: str) -> None:
    """Write the first process's answer and end the group."""
    if rank == 0:
        Path("answer.txt").write_text(answer)
    dist.destroy_process_group()


def in_two(function: Callable[..., None], case: Case, *arguments: str) -> str:
    """Run a function in two processes that `join` and `leave`; return the answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(function, (case.layer, port, *arguments), nprocs=2)
    return Path("answer.txt").read_text()


def work(rank: int, layer: str, port: int, how: str) -> None:
    """Compare the gradients of half of the images, averaged over two processes, with those of all."""
    join(rank, port)
    case = case_of(layer)
    own: Any = copy.deepcopy(case.model)
    if how == "ddp":
        own = torch.nn.parallel.DistributedDataParallel(own)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(own, mesh=init_device_mesh("cpu", (2,)))
    half = slice(2 * rank, 2 * rank + 2)
    F.cross_entropy(own(case.images[half]), LABELS[half]).backward()
    F.cross_entropy(case.model(case.images), LABELS).backward()
    errors = []
    for mine, one in zip(own.parameters(), case.model.parameters(), strict=True):
        gradient = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
        errors.append(float((gradient - one.grad).abs().max() / one.grad.abs().max().clamp(min=1e-8)))
    leave(rank, str(max(errors)))


def gradients(case: Case, how: str) -> Cell:
    """Compare the gradients of `work`."""
    error = float(in_two(work, case, how))
    return Cell("exact" if error < 1e-3 else "wrong", error, "error: of the gradients")


@tool("DistributedDataParallel", "a step on two processes", "torch")
def ddp(case: Case) -> Cell:
    return gradients(case, "ddp")


@tool("FSDP2", "`fully_shard` a recast network, a step on two processes", "torch")
def fsdp(case: Case) -> Cell:
    return gradients(case, "fsdp")


def plan_sharded(rank: int, layer: str, port: int) -> None:
    """Write what `plan` says of a sharded network."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    join(rank, port)
    case = case_of("parent")
    fully_shard(case.model, mesh=init_device_mesh("cpu", (2,)))
    message = "no error"
    try:
        recast.plan(case.model, case.images, recast.RecastConfig(gate=layer), where=LAYERS[layer])
    except recast.RecastError as error:
        message = str(error)
    leave(rank, message)


@tool("FSDP2, then Recast", "recast a network that is sharded", "torch", is_own=True)
def fsdp_first(case: Case) -> Cell:
    message = in_two(plan_sharded, case)
    return Cell("wrong" if message == "no error" else "refused", None, message)


def elastic(layer: str) -> None:
    """Take four steps under `torchrun` and write the weights; the first try ends after two, the second resumes."""
    dist.init_process_group("gloo")
    case, rank = case_of(layer), dist.get_rank()
    own = torch.nn.parallel.DistributedDataParallel(case.model)
    optimizer = torch.optim.SGD(recast.param_groups(case.model, lr=1e-3, gate_lr=1e-2), lr=1e-3, momentum=0.9)
    step = 0
    if os.path.exists("last.pt"):
        last = torch.load("last.pt", weights_only=True)
        case.model.load_state_dict(last["model"])
        optimizer.load_state_dict(last["optimizer"])
        step = last["step"]
    while step < 4:
        if step == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["FAILS"] == "1":
            raise SystemExit(1)
        optimizer.zero_grad()
        half = slice(2 * rank, 2 * rank + 2)
        F.cross_entropy(own(case.images[half]), LABELS[half]).backward()
        optimizer.step()
        step += 1
        dist.barrier()
        if rank == 0:
            torch.save({"model": case.model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "last.pt")
        dist.barrier()
    dist.destroy_process_group()


@tool("torchrun", "`--max-restarts 1`: four steps, a process that ends after two, a resume", "torch", is_own=True)
def torchrun(case: Case) -> Cell:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--max-restarts=1", "--monitor-interval=1", __file__, case.layer]
    states = []
    for fails in "01":
        subprocess.run(command, check=True, env=os.environ | SEPARATE | {"FAILS": fails})
        states.append(torch.load("last.pt", weights_only=True)["model"])
        os.remove("last.pt")
    whole, resumed = states
    error = max(float((whole[name] - value).abs().max()) for name, value in resumed.items())
    note = f"with `{'='.join(*SEPARATE.items())}`: the second try may not connect without"
    return Cell("exact" if error == 0 else "wrong", error, note)


if __name__ == "__main__":
    elastic(sys.argv[1])
