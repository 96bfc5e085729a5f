"""The walk: one process per architecture, rows appended as they come, so that it can be stopped and resumed.

A process is forked from a server that has imported everything. Memory is bounded by reservation: a network waits until
what it is going to need is free.
"""

from __future__ import annotations

import csv
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from recast.errors import RecastError
from recast.zoo.examine import ZooRow, examine
from recast.zoo.subjects import on_meta_device

COLUMNS = tuple(field.name for field in fields(ZooRow))
BYTES_PER_PARAMETER = 16
UNKNOWN_BYTES = 10 * 2**30
BASE_BYTES = 2 * 2**30
"""What any network needs beside its weights: maps, activations."""


@dataclass
class _Job:
    name: str
    process: ForkServerProcess
    connection: Connection
    started: float
    reserved: int


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
    context.set_forkserver_preload(["recast.zoo.walk", "torchvision"])
    running: list[_Job] = []
    sizes: dict[str, int] = {}
    try:
        while waiting or running:
            _start_some(waiting, running, sizes, context, workers, memory)
            wait([job.connection for job in running], timeout=1.0)
            for job in list(running):
                row = _finished(job, timeout)
                if row is not None:
                    running.remove(job)
                    known[row.model] = row
                    _append(out, row)
                    done(row)
    finally:
        for job in running:
            job.process.kill()
    return [known[name] for name in names]


def _start_some(
    waiting: list[str], running: list[_Job], sizes: dict[str, int], context: Any, workers: int, memory: int
) -> None:
    """Start the next networks while processes and memory are free; one that needs more than all runs alone."""
    for name in list(waiting[: 4 * workers]):
        if len(running) >= workers:
            return
        if name not in sizes:
            sizes[name] = _needed(name)
        if running and sum(job.reserved for job in running) + sizes[name] > memory:
            continue
        waiting.remove(name)
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(name, sender), daemon=True)
        process.start()
        sender.close()
        running.append(_Job(name, process, receiver, time.monotonic(), sizes[name]))


def _needed(name: str) -> int:
    """Bytes that a network is going to need, roughly: parent, recast layers and a comparison in double precision."""
    try:
        return BASE_BYTES + BYTES_PER_PARAMETER * sum(p.numel() for p in on_meta_device(name).parameters())
    except Exception:  # of unknown size; its own process will say what is wrong with it
        return UNKNOWN_BYTES


def _work(name: str, sender: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    sender.send(examine(name))
    sender.close()


def _finished(job: _Job, timeout: float) -> ZooRow | None:
    seconds = time.monotonic() - job.started
    if job.connection.poll():
        try:
            row: ZooRow = job.connection.recv()
        except EOFError:
            job.process.join()
            row = ZooRow(job.name, "failed", f"its process ended with code {job.process.exitcode} (out of memory?)")
            row.seconds = round(seconds, 1)
        job.process.join()
        return row
    if seconds > timeout:
        job.process.kill()
        job.process.join()
        return ZooRow(job.name, "failed", f"took longer than {timeout:.0f} s", seconds=round(seconds, 1))
    return None


def read_zoo(path: str | Path) -> list[ZooRow]:
    """The rows of a walk. Raises `RecastError` for another kind of file."""
    with Path(path).open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise RecastError(f"{path} is no table of a walk of this version: choose another file with --out")
        return [ZooRow(**{name: _parse(name, text) for name, text in line.items()}) for line in reader]


def write_zoo(path: str | Path, rows: Iterable[ZooRow]) -> None:
    """Replace the table by these rows, sorted by name."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    for row in sorted(rows, key=lambda row: row.model):
        _append(temporary, row)
    os.replace(temporary, path)


def _append(path: Path, row: ZooRow) -> None:
    is_new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(COLUMNS)
        writer.writerow(_shown(getattr(row, name)) for name in COLUMNS)


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1 else str(value)


def _parse(name: str, text: str) -> Any:
    if name in ("model", "status", "cause", "size", "last_left", "all_left") or text == "":
        return text
    if text in ("True", "False"):
        return text == "True"
    return float(text) if name.endswith(("error", "fp64", "gib", "seconds", "control")) else int(text)
