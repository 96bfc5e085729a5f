"""What the parts share: their command line, and how a GPU computes."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rows import Unit, carry_out


@contextmanager
def precision(name: str) -> Iterator[None]:
    """fp32 products and convolutions as "ieee" or "tf32", by the algorithms that give the same bits each time."""
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    before = [switch.fp32_precision for switch in switches]
    deterministic, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, True
    try:
        for switch in switches:
            switch.fp32_precision = name
        yield
    finally:
        torch.backends.cudnn.deterministic = deterministic
        for switch, own in zip(switches, before, strict=True):
            switch.fp32_precision = own


def start(units: Callable[[torch.device, bool], Iterator[Unit]]) -> int:
    """Measure the units of a part; returns its exit status."""
    parser = argparse.ArgumentParser(description="a part of benchmarks/gpu, which calls it")
    parser.add_argument("file", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("device", type=torch.device)
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "Using padding='same' with even kernel")
    torch.set_num_threads(1 if options.toy else os.cpu_count() or 1)

    def recover() -> None:
        if options.device.type == "cuda":
            torch.cuda.synchronize()  # raises where a kernel left the GPU unusable for this process
            torch.cuda.empty_cache()

    return carry_out(options.file, units(options.device, options.toy), options.seconds, recover)
