"""Timing by turns, counting, and the tables of results.

Every arm runs once per round, so that a machine that slows down slows all of them. Ratios are medians over the rounds.
"""

from __future__ import annotations

import csv
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from recast.lab.folder.tables import write_rows
from recast.layers.beside import AttentionBeside
from recast.layers.cmhsa import gated_layers
from recast.surgery.chosen_forms import device_name
from recast.tracing.cost import saved_sizes

RESULTS = Path(__file__).parents[1] / "results"
QUEUED = 5


def machine() -> str:
    """Return processor, threads, torch and cores."""
    name = device_name("cpu")
    if torch.cuda.is_initialized():
        name = f"{device_name('cuda')}, {name}"
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__.split('+')[0]}, {os.cpu_count()} cores"


def by_turns(arms: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every call, after a round that does not count.

    Once a GPU is in use, a measurement is the mean of QUEUED calls that enter its queue together.
    """
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    wait, calls = (torch.cuda.synchronize, QUEUED) if torch.cuda.is_initialized() else (lambda: None, 1)
    for number in range(1 + rounds):
        for name, call in arms.items():
            wait()
            started = time.perf_counter()
            for _ in range(calls):
                call()
            wait()
            if number:
                seconds[name].append((time.perf_counter() - started) / calls)
    return seconds


def ratio(a: list[float], b: list[float]) -> float:
    """Return the median over the rounds of a / b, both measured within the same round."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def spread(seconds: list[float]) -> float:
    """Return the interquartile range over the median."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / middle


def inference(model: nn.Module, images: Tensor) -> Callable[[], object]:
    """Return a function that runs a forward pass without gradients."""

    @torch.no_grad()
    def call() -> None:
        model(images)

    return call


def _backward_of_convolution(grad: Any, images: Any, weight: Any, *rest: Any, out_shape: Any, **_: Any) -> int:
    """Return the FLOPs of the gradients. torch's formula multiplies the weight's by the number of groups."""
    transposed, mask = rest[4], rest[7]
    return sum(mask[:2]) * conv_flop_count(grad, weight, images, not transposed)


def macs(model: nn.Module, images: Tensor, training: bool) -> int:
    """Return the multiply-accumulates of a pass, in training with those of the gradients."""
    formulas = {torch.ops.aten.convolution_backward: _backward_of_convolution}
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    with counter as flops, torch.set_grad_enabled(training):
        outputs = model(images)
        if training:
            outputs.sum().backward()
            model.zero_grad(set_to_none=True)
    return flops.get_total_flops() // 2


def saved_mib(model: nn.Module, images: Tensor) -> float:
    """Return the MiB that a forward pass keeps for the backward pass."""
    with saved_sizes(model) as sizes:
        model(images)
    return sum(sizes) / 2**20


@torch.no_grad()
def open_gates(model: nn.Module, gaussian: int | None = None, content: int | None = None) -> nn.Module:
    """Open Gaussians and content maps of the first heads of every layer (None: of all), with keys that are not zero."""
    for layer in gated_layers(model).values():
        if isinstance(layer, AttentionBeside):
            layer.gamma.fill_(0.2)
            continue
        layer.gamma[:content] = 0.2
        layer.key.normal_(std=0.02)
        if layer.spread is not None:
            layer.spread[:gaussian] = 0.3
    return model


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a table, [] if it is missing."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a table of rows with the same keys."""
    write_rows(path, list(rows[0]), [[*row.values()] for row in rows])
    print(path)


def update(path: Path, rows: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> None:
    """Write rows into a table, in the place of those with the same labels; print them without their machine."""
    for row in rows:
        print(*(value for name, value in row.items() if name != "machine"), sep=",", flush=True)
    table = {tuple(str(row[label]) for label in labels): row for row in (*read(path), *rows)}
    write(path, list(table.values()))
