"""Set the number of torch's threads: the cores that other programs leave free when a command starts.

Imports no torch. A number chosen before torch starts reaches it, NumPy and child processes by OMP_NUM_THREADS.
"""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path

SAMPLED = 0.2
"""Seconds over which the load of the cores is measured."""


def use_threads(number: int | None) -> None:
    """Use `number` threads. None: OMP_NUM_THREADS, else the number of free cores (on Linux)."""
    if number is not None:
        set_threads(number)
    elif not os.environ.get("OMP_NUM_THREADS") and Path("/proc/stat").exists():
        cores = os.sched_getaffinity(0)
        usable = usable_cores(cores)
        if (free := free_cores(cores, usable)) < usable:
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a spinning thread takes a core from a working one
            set_threads(free)


def set_threads(number: int) -> None:
    """Set the number of threads, whether torch is imported or not."""
    os.environ["OMP_NUM_THREADS"] = str(number)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(number)


def free_cores(cores: set[int], usable: int) -> int:
    """Return the number of cores that other processes leave free during `SAMPLED` seconds, from 1 to `usable`."""
    start, before = sample(cores)
    time.sleep(SAMPLED)
    end, after = sample(cores)
    return max(1, min(usable, round(len(cores) - (after - before) / (end - start))))


def sample(cores: set[int]) -> tuple[float, float]:
    """Return seconds so far: of the clock, and of computation by other processes on these cores."""
    rows = (row.split() for row in Path("/proc/stat").read_text(encoding="ascii").splitlines())
    # user, nice, system, then, after idle and iowait, irq, softirq and steal
    ticks = sum(sum(map(int, row[1:4] + row[6:9])) for row in rows if row[0] in {f"cpu{core}" for core in cores})
    return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


def usable_cores(cores: set[int]) -> int:
    """Return the number of cores for threads. Hyperthreads of a core count once; a container may have a quota."""
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    physical = len({_text(topology.format(core)) or str(core) for core in cores})
    group = _text("/proc/self/cgroup").rpartition("0::")[2].partition("\n")[0]
    quota, _, period = _text(f"/sys/fs/cgroup{group}/cpu.max").partition(" ")
    return min(physical, math.ceil(int(quota) / int(period))) if quota.isdigit() else physical


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""
