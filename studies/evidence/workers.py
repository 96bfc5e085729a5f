"""Run jobs side by side, each process with one thread: one per core, or several that share a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from archives import is_finished
from images import read, split
from job import Job
from measure import Data, balanced_part, corrupted
from run import run
from timm.layers import set_fused_attn


class Setup(NamedTuple):
    """Folders and device of all runs, and the number of test images that are corrupted and attacked."""

    root: Path
    out: Path
    num_few: int
    device: str


@cache
def load_images(name: str, setup: Setup) -> Data:
    """Return the images of a study, read once per process."""
    train, test = read(setup.root / name)
    train, held_out = split(train)
    few = balanced_part(test, setup.num_few)
    device = torch.device(setup.device)
    by_kind = {kind: images.to(device) for kind, images in corrupted(few, setup.out / "corrupted" / name).items()}
    return Data(train.to(device), held_out.to(device), test.to(device), few.to(device), by_kind)


def carry_out(job: Job, setup: Setup) -> str:
    """Run a job with one thread and return a line about it."""
    torch.set_num_threads(1)
    set_fused_attn(setup.device != "cpu")  # a plain ViT in bf16 on a CPU: 95 ms an update instead of 239
    folder = run(job, setup.out, setup.root, load_images(job.data, setup), torch.device(setup.device))
    result = json.loads((folder / "result.json").read_text())
    scores = result.get("scores", {"held out": result.get("held_out_top1")})
    return f"{job.folder}: {scores}, {result['seconds']:.0f} s"


def carry_out_all(jobs: Iterable[Job], setup: Setup, workers: int) -> None:
    """Run the unfinished jobs, `workers` at a time."""
    unfinished = [job for job in jobs if not is_finished(setup.out, job)]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for line in pool.map(partial(carry_out, setup=setup), unfinished):
            print(line, flush=True)
