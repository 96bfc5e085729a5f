"""The walk: one process per architecture, rows appended as they come, so that it can be stopped and resumed.

A process is forked from a server that has imported everything. Memory is bounded by reservation: a network waits until
what it is going to need is free.
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
"""What any network needs beside its weights: maps, activations."""


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
    """Examine every architecture that has no row in the CSV file `out` yet; returns all rows for `names`.

    At most `workers` processes and about `memory` bytes at a time; the largest networks run alone. One that takes
    longer than `timeout` seconds, or is killed, gets a row that says so. Raises `RecastError` for a file that is no
    table of this kind.
    """
    out, names = Path(out), list(names)
    known = {row.model: row for row in read_zoo(out)} if out.exists() else {}
    waiting = [name for name in names if name not in known]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["zoo.walk", "torchvision"])
    others = set(multiprocessing.active_children())
    running: dict[Future[ZooRow], Job] = {}
    try:
        while waiting or running:
            while len(running) < workers and (name := next_name(waiting, running.values(), workers, memory)):
                waiting.remove(name)
                pool = ProcessPoolExecutor(1, context)  # of its own: a process that is killed breaks its pool
                running[pool.submit(_examine_within, name, timeout)] = Job(name, needed(name), time.monotonic())
                pool.shutdown(wait=False)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                row = _row(future, running.pop(future), timeout)
                known[row.model] = row
                append_row(out, row)
                done(row)
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        raise
    return [known[name] for name in names]


def next_name(waiting: Sequence[str], running: Iterable[Job], workers: int, memory: int) -> str | None:
    """The first waiting network for which memory is free; one that needs more than all runs alone."""
    reserved = [job.reserved for job in running]
    fitting = (name for name in waiting[: 4 * workers] if not reserved or sum(reserved) + needed(name) <= memory)
    return next(fitting, None)


@cache
def needed(name: str) -> int:
    """Bytes that a network is going to need, roughly: parent, recast layers and a comparison in double precision."""
    try:
        return BASE_BYTES + BYTES_PER_PARAMETER * count_parameters(on_meta_device(name))
    except Exception:  # of unknown size; its own process will say what is wrong with it
        return UNKNOWN_BYTES


def _examine_within(name: str, seconds: float) -> ZooRow:
    torch.set_num_threads(1)
    signal.setitimer(signal.ITIMER_REAL, seconds)  # then SIGALRM ends the process, whatever it is doing
    return examine(name)


def _row(future: Future[ZooRow], job: Job, timeout: float) -> ZooRow:
    try:
        return future.result()
    except BrokenProcessPool:
        seconds = time.monotonic() - job.started
        cause = f"took longer than {timeout:.0f} s" if seconds >= timeout else "its process was killed (out of memory?)"
        return ZooRow(job.name, "failed", cause, seconds=round(seconds, 1))
