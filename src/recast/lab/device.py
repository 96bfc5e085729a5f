"""Which device a run uses, and what a number that was made on it depends on."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
from pathlib import Path

import timm
import torch

import recast
from recast.errors import RecastError, first_line


def choose_device(name: str | torch.device = "auto") -> torch.device:
    """`auto` is the accelerator that is there, else the CPU. Raises RecastError for a device that is not."""
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it computes nothing")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise RecastError(
            f"device {str(name)!r} cannot be used here ({first_line(error)}): use device=cpu or device=auto"
        ) from None
    return device


def check_memory(needed: float, what: str, device: torch.device | None = None) -> None:
    """Raise RecastError for what needs more bytes than are free, before any is asked for."""
    try:
        if device is not None and device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
        else:
            told = dict(re.findall(r"(\w+): +(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii")))
            free = 1024 * int(told["MemAvailable"])
    except (OSError, KeyError):  # not Linux: the system says so when it is asked
        return
    if needed > free:
        raise RecastError(f"{what} need {needed / 2**30:,.0f} GiB, {free / 2**30:,.0f} are free: ask for less")


def peak_bytes(device: torch.device | None = None) -> int:
    """Most memory so far: of this process, or what its tensors took of an accelerator."""
    if device is not None and device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def surroundings(device: torch.device) -> dict[str, str | int | None]:
    """Versions and machine, as they stand beside results."""
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
