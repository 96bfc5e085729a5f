"""Runs side by side, each in a process of its own: a run a core, or several that share a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import torch
from images import read, split
from job import Job
from kept import is_finished
from measure import Data, corrupted, few_of
from run import run
from timm.layers import set_fused_attn


@cache
def images(root: Path, name: str, out: Path, num_few: int, num_test: int | None, device: str) -> Data:
    """The images of a study, read once by a process."""
    train, held_out = split(read(root / name, "train"))
    test = read(root / name, "test")
    test = test if num_test is None else few_of(test, num_test)
    few = few_of(test, num_few)
    sets = corrupted(few, out / "corrupted" / name)
    target = torch.device(device)
    moved = {kind: part.to(target) for kind, part in sets.items()}
    return Data(train.to(target), held_out.to(target), test.to(target), few.to(target), moved)


def work(job: Job, out: Path, root: Path, num_few: int, num_test: int | None, device: str) -> str:
    """One run, in a process of its own."""
    torch.set_num_threads(1)
    set_fused_attn(device != "cpu")  # a plain ViT in bf16 on a CPU: 95 ms an update instead of 239
    folder = run(job, out, root, images(root, job.data, out, num_few, num_test, device), torch.device(device))
    result = json.loads((folder / "result.json").read_text())
    found = result.get("scores", {"held out": result.get("held_out_top1")})
    return f"{job.folder}: {found}, {result['seconds']:.0f} s"


def carry_out(
    jobs: Iterable[Job], out: Path, root: Path, few: int, num_test: int | None, device: str, workers: int
) -> None:
    """The jobs that are not finished, `--workers` at a time; one at a time in this process."""
    waiting = [job for job in jobs if not is_finished(out, job)]
    if workers == 1:
        for job in waiting:
            print(work(job, out, root, few, num_test, device), flush=True)
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(min(workers, max(1, len(waiting))), mp_context=context) as pool:
        going = [pool.submit(work, job, out, root, few, num_test, device) for job in waiting]
        for future in going:
            print(future.result(), flush=True)
