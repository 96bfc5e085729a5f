"""Does what a process holds stay bounded: over many forward passes, with `record` or not, and over many image sizes?

    python benchmarks/bounded.py      # writes results/bounded.csv; five minutes on a CPU

A small recast ResNet with open heads, two images of 16×16 at a time. Memory is the resident size, in MiB, of
1,000 passes above that after 20; "trimmed": after malloc was told to give free pages back to the system. What it keeps
otherwise is room between maps of other sizes, no tensor. The sizes are 300 different ones from 8×8 on, once each,
against as many passes at one size of as many pixels on average; the parent beside it. Linux only.
"""

from __future__ import annotations

import ctypes
import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import timm
import torch
from timing import RESULTS, write_table
from torch import nn

import recast.models
from recast.analysis.record import record
from recast.surgery.apply import recast_, refresh_gates_
from recast.surgery.planning import plan

RESULT = RESULTS / "bounded.csv"
PASSES, SIZES = 1000, 300


def resident(trimmed: bool) -> float:
    """MiB of this process."""
    gc.collect()
    if trimmed:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def network(where: str) -> nn.Module:
    """Recast, every head open; "none": the parent."""
    torch.manual_seed(0)
    model = timm.create_model("digits_resnet", num_classes=10)
    if where == "none":
        return model.eval()
    recast_(model, plan(model, torch.zeros(1, 3, 16, 16), where=where))
    for name, parameter in model.named_parameters():
        if name.endswith((".gamma", ".spread")):
            nn.init.constant_(parameter, 0.1)
    return refresh_gates_(model.eval())


def growth(model: nn.Module, watched: Callable[[nn.Module], Any], each: bool) -> Iterator[tuple[bool, float]]:
    """Trimmed or not, and MiB after PASSES above those after 20; a new record for each pass, or one around all."""
    images = torch.randn(2, 3, 16, 16)

    def run(count: int) -> None:
        for _ in range(count):
            with watched(model) if each else nullcontext():
                model(images)

    with torch.no_grad(), nullcontext() if each else watched(model):
        run(20)
        before = {trimmed: resident(trimmed) for trimmed in (False, True)}
        run(PASSES)
        for trimmed, mib in before.items():
            yield trimmed, resident(trimmed) - mib


def sizes(model: nn.Module) -> tuple[float, float, float]:
    """Seconds of SIZES different sizes, of as many passes at one size, and MiB above those after the latter."""
    different = list(product(range(8, 8 + math.ceil(SIZES**0.5)), repeat=2))[:SIZES]
    side = round((sum(h * w for h, w in different) / SIZES) ** 0.5)
    seconds, mib = [], 0.0
    with torch.no_grad():
        for shapes in ([(side, side)] * SIZES, different):
            mib, started = resident(trimmed=True), time.perf_counter()
            for height, width in shapes:
                model(torch.randn(2, 3, height, width))
            seconds.append(time.perf_counter() - started)
    return seconds[1], seconds[0], resident(trimmed=True) - mib


def main() -> None:
    """A row for each way of running."""
    assert recast.models
    torch.set_num_threads(1)
    rows: list[list[Any]] = []
    model = network("last_stage")
    for name, watched, each in (
        ("record off", lambda _: nullcontext(), True),
        ("a record for each pass", record, True),
        ("one record around all", record, False),
    ):
        for trimmed, mib in growth(model, watched, each):
            rows.append([f"{PASSES:,} passes, {name}", "trimmed" if trimmed else "", "MiB", round(mib, 2)])
            print(*rows[-1], flush=True)
    for name, where in (("parent", "none"), ("recast", "all")):
        different, same, mib = sizes(network(where))
        rows += [
            [f"{SIZES} sizes, {name}", "", "seconds", round(different, 2)],
            [f"{SIZES} passes at one size, {name}", "", "seconds", round(same, 2)],
            [f"{SIZES} sizes, {name}", "trimmed", "MiB", round(mib, 2)],
        ]
    write_table(RESULT, ["what", "memory", "unit", "value"], rows)
    for row in rows[-6:]:
        print(*row)


if __name__ == "__main__":
    main()
