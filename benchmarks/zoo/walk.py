"""The walk: one process per architecture. Rows are appended as they come, so that it can be stopped and resumed.

A process is forked from a server that has imported everything. Memory is bounded by reservation: a network waits until
its estimated need is free.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from recast.tracing.cost import count_parameters
from zoo.architectures import on_meta_device
from zoo.examine import examine
from zoo.rows import ZooRow, append_row, read_zoo

BYTES_PER_PARAMETER = 16
UNKNOWN_BYTES = 10 * 2**30
BASE_BYTES = 2 * 2**30
"""Need of any network beside its weights: maps, activations."""


class Job(NamedTuple):
    """A network that is being examined."""

    name: str
    reserved: int
    """Bytes."""
    started: float


def walk(
    names: Iterable[str],
    out: str | Path,
    *,
    workers: int = 1,
    memory: int = 20 * 2**30,
    timeout: float = 1800.0,
    done: Callable[[ZooRow], object] = lambda row: None,
) -> list[ZooRow]:
    """Examine every architecture that has no row in the CSV file `out` yet; return all rows for `names`.

    At most `workers` processes and about `memory` bytes at a time; the largest networks run alone. A network that takes
    longer than `timeout` seconds, or is killed, gets a row with this cause. Raises RecastError for another kind of
    file.
    """
    out, names = Path(out), list(names)
    rows = {row.model: row for row in read_zoo(out)} if out.exists() else {}
    waiting = [name for name in names if name not in rows]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["zoo.walk", "torchvision"])
    unrelated = set(multiprocessing.active_children())
    running: dict[Future[ZooRow], Job] = {}
    try:
        while waiting or running:
            while len(running) < workers and (name := next_name(waiting, running.values(), workers, memory)):
                waiting.remove(name)
                pool = ProcessPoolExecutor(1, context)  # a killed process breaks its pool
                running[pool.submit(_examine_within, name, timeout)] = Job(name, needed(name), time.monotonic())
                pool.shutdown(wait=False)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                row = _row(future, running.pop(future), timeout)
                rows[row.model] = row
                append_row(out, row)
                done(row)
    except BaseException:
        for process in set(multiprocessing.active_children()) - unrelated:
            process.kill()
        raise
    return [rows[name] for name in names]


def next_name(waiting: Sequence[str], running: Iterable[Job], workers: int, memory: int) -> str | None:
    """Return the first waiting network for which memory is free; one that needs more than `memory` runs alone."""
    reserved = [job.reserved for job in running]
    fitting = (name for name in waiting[: 4 * workers] if not reserved or sum(reserved) + needed(name) <= memory)
    return next(fitting, None)


@cache
def needed(name: str) -> int:
    """Estimate the bytes for a network: parent, recast layers and a comparison in double precision."""
    try:
        return BASE_BYTES + BYTES_PER_PARAMETER * count_parameters(on_meta_device(name))
    except Exception:  # its own process will report the error
        return UNKNOWN_BYTES


def _examine_within(name: str, seconds: float) -> ZooRow:
    torch.set_num_threads(1)
    signal.setitimer(signal.ITIMER_REAL, seconds)  # then SIGALRM ends the process
    return examine(name)


def _row(future: Future[ZooRow], job: Job, timeout: float) -> ZooRow:
    try:
        return future.result()
    except BrokenProcessPool:
        seconds = time.monotonic() - job.started
        cause = f"took longer than {timeout:.0f} s" if seconds >= timeout else "its process was killed (out of memory?)"
        return ZooRow(job.name, "failed", cause, seconds=round(seconds, 1))
