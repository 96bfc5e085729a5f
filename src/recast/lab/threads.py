"""The number of torch's threads: the cores that other programs leave free, corrected by the time of steps.

Imports no torch: what is chosen before torch starts reaches it, NumPy and child processes by OMP_NUM_THREADS.
"""

from __future__ import annotations

import math
import os
import sys
import time
import warnings
from pathlib import Path

SAMPLED, AGAIN = 0.2, 10.0
"""Seconds over which the cores are watched at the start, and between two looks at them later."""
TIMED, ENOUGH = 3, 2.0
"""Steps, or seconds of them, that a number of threads is timed on. The step before them is not counted."""
SLOWER = 1.5
"""A step that takes so many times longer than before is a reason to choose again."""


def sample(cores: set[int]) -> tuple[float, float]:
    """Seconds so far: of the clock, and that other processes computed on these cores."""
    rows = (row.split() for row in Path("/proc/stat").read_text(encoding="ascii").splitlines())
    # user, nice, system, then, after idle and iowait, irq, softirq and steal
    ticks = sum(sum(map(int, row[1:4] + row[6:9])) for row in rows if row[0] in {f"cpu{core}" for core in cores})
    return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


def usable_cores(cores: set[int]) -> int:
    """Number of cores that threads can use: hyperthreads of a core count once, and a container may have a quota."""
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


class Automatic:
    """A number of threads that follows the load: the free cores N, or N/2, N/4 … 1 where steps are faster."""

    def __init__(self) -> None:
        self.cores = os.sched_getaffinity(0)
        self.usable = usable_cores(self.cores)
        self.last = sample(self.cores)
        time.sleep(SAMPLED)
        self.number = self.most = self.free()
        self.kind, self.usual = "", 0.0
        self.times: list[float] = []
        self.tried: dict[int, float] | None = None
        """Seconds of a step by number of threads; None: the number is chosen."""
        if self.number < self.usable:
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a thread that spins takes a core from one that works
            set_threads(self.number)

    def free(self) -> int:
        """Cores that others left free since the last look; at least 1."""
        before, self.last = self.last, sample(self.cores)
        taken = (self.last[1] - before[1]) / (self.last[0] - before[0])
        return max(1, min(self.usable, round(len(self.cores) - taken)))

    def step(self, seconds: float, kind: str) -> None:
        """Count a step, and perhaps change the number before the next one."""
        is_late = time.monotonic() - self.last[0] > AGAIN
        if kind != self.kind:  # other work takes other times
            if not self.kind and self.most < self.usable:
                _note(self.most, f"other programs use the rest of {self.usable} cores")
            self.kind = kind
            return self._choose(self.free() if is_late else self.most)
        self.times.append(seconds)
        if self.tried is None and not is_late:
            return None
        counted = self.times[1:]
        if len(counted) < TIMED and sum(counted) < ENOUGH:
            return None
        mean = sum(counted) / len(counted)
        if self.tried is None:
            free, self.times = self.free(), []
            return self._choose(free) if free != self.most or mean > SLOWER * self.usual else None
        self.tried[self.number] = mean
        if self.number > 1 and mean < SLOWER * min(self.tried.values()):
            return self._set(self.number // 2)
        number = min(self.tried, key=self.tried.__getitem__)
        self.usual, self.tried, self.last = self.tried[number], None, sample(self.cores)
        if number != self.before:
            _note(number, "the fastest of those tried")
        return self._set(number)

    def _choose(self, most: int) -> None:
        self.before, self.most, self.tried = self.number, most, {}
        self._set(most)

    def _set(self, number: int) -> None:
        self.times = []
        if number != self.number:
            self.number = number
            set_threads(number)


_automatic: Automatic | None = None


def use_threads(number: int | None) -> None:
    """Compute with so many threads. None: as OMP_NUM_THREADS says, else automatically (on Linux)."""
    global _automatic
    if number is not None:
        _automatic = None
        set_threads(number)
    elif _automatic is None and not os.environ.get("OMP_NUM_THREADS") and Path("/proc/stat").exists():
        _automatic = Automatic()


def set_threads(number: int) -> None:
    """Set the number for torch, whether it is imported or not."""
    os.environ["OMP_NUM_THREADS"] = str(number)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(number)


def stepped(seconds: float, kind: str) -> None:
    """Report how long a step on the CPU took; steps of a `kind` do the same work."""
    if _automatic is not None:
        _automatic.step(seconds, kind)


def _note(number: int, why: str) -> None:
    warnings.warn(f"{number} thread{'s' * (number > 1)}: {why} (--threads sets the number)", stacklevel=5)
