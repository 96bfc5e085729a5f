"""Timing by turns: every arm once a round, so that a machine that slows down slows all of them; ratios of medians."""

from __future__ import annotations

import csv
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parents[1] / "results"
QUEUED = 5


def machine() -> str:
    """Processor, cores and torch, for the rows."""
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    if torch.cuda.is_initialized():
        name = f"{torch.cuda.get_device_name()}, {name}"
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__.split('+')[0]}, {os.cpu_count()} cores"


def by_turns(arms: Mapping[str, Callable[[], object]], rounds: int, warm: int = 1) -> dict[str, list[float]]:
    """Seconds of every call, the first `warm` rounds left out.

    Once a GPU is in use, a measurement is the mean of QUEUED calls that are put in its queue together and waited for.
    """
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    wait, calls = (torch.cuda.synchronize, QUEUED) if torch.cuda.is_initialized() else (_no_wait, 1)
    for number in range(warm + rounds):
        for name, call in arms.items():
            wait()
            started = time.perf_counter()
            for _ in range(calls):
                call()
            wait()
            if number >= warm:
                seconds[name].append((time.perf_counter() - started) / calls)
    return seconds


def _no_wait() -> None:
    """What runs on the processor is finished when a call returns."""


def ratio(a: list[float], b: list[float]) -> float:
    """Median over the rounds of a / b: both were measured within the same round."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def spread(seconds: list[float]) -> float:
    """Interquartile range over the median."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / middle


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """A tidy CSV of rows with the same keys."""
    header = list(rows[0])
    write_table(path, header, ([row.get(name, "") for name in header] for row in rows))


def write_table(path: Path, header: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """A tidy CSV."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
    print(path)
