"""Choose the device of a run, and describe the versions and machine that its numbers depend on."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import timm
import torch

import recast
from recast.errors import RecastError, first_line


def choose_device(name: str | torch.device) -> torch.device:
    """Return a device; `auto` is the accelerator, else the CPU. Raises RecastError if it cannot be used."""
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise RecastError(
            f"device {str(name)!r} cannot be used here ({first_line(error)}): use device=cpu or device=auto"
        ) from None
    return device


def check_memory(needed: float, what: str) -> None:
    """Raise RecastError if `needed` bytes exceed the free memory (on Linux)."""
    try:
        kilobytes = dict(re.findall(r"(\w+): +(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii")))
    except OSError:
        return
    if needed > (free := 1024 * int(kilobytes["MemAvailable"])):
        raise RecastError(f"{what} need {needed / 2**30:,.1f} GiB, {free / 2**30:,.1f} are free: ask for less")


def surroundings(device: torch.device) -> dict[str, str | int | None]:
    """Return versions and machine, for files of results."""
    return {
        "recast": recast.__version__,
        "torch": torch.__version__,
        "timm": timm.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type,
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
