"""The number of threads: free cores at the start, timed steps, a load that changes, and what overrides it."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from collections.abc import Iterator

import pytest

from recast.lab import threads
from recast.lab.threads import Automatic, sample, set_threads, stepped, usable_cores, use_threads


class Machine:
    """Four simulated cores, `neighbours` busy processes, and a program whose step takes 1 s on one free core."""

    def __init__(self) -> None:
        self.now = self.own = self.busy = 0.0
        self.neighbours, self.number, self.scales = 0, 4, True

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float, number: int = 0) -> None:
        self.now += seconds
        self.own += seconds * number * min(1, 4 / max(1, number + self.neighbours))
        self.busy += seconds * min(4, number + self.neighbours)

    def sample(self, cores: set[int]) -> tuple[float, float]:
        return self.now, self.busy - self.own

    def steps(self, automatic: Automatic, count: int, kind: str = "train") -> list[int]:
        """Take steps; returns the number of threads of each."""
        numbers = []
        for _ in range(count):
            crowded = self.number + self.neighbours > 4 and self.number > 1
            seconds = 20.0 if crowded else 1 / self.number if self.scales else self.number
            numbers.append(self.number)
            self.sleep(seconds, self.number)
            automatic.step(seconds, kind)
        return numbers


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    monkeypatch.setattr(threads, "time", made)
    monkeypatch.setattr(threads, "sample", made.sample)
    monkeypatch.setattr(threads, "usable_cores", lambda cores: 4)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(threads, "set_threads", lambda number: setattr(made, "number", number))
    monkeypatch.setenv("OMP_WAIT_POLICY", "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield made


@pytest.mark.parametrize(("neighbours", "free"), [(0, 4), (1, 3), (2, 2), (3, 1), (4, 1), (9, 1)])
def test_the_start_takes_the_free_cores(machine: Machine, neighbours: int, free: int) -> None:
    machine.neighbours = neighbours
    assert Automatic().number == machine.number == free


@pytest.mark.parametrize(("scales", "tried", "best"), [(True, {4, 2}, 4), (False, {4, 2, 1}, 1)])
def test_the_first_steps_are_timed(machine: Machine, scales: bool, tried: set[int], best: int) -> None:
    machine.scales = scales
    numbers = machine.steps(Automatic(), 40)
    assert set(numbers) == tried
    assert numbers[14:] == [best] * 26


def test_neighbours_come_and_go(machine: Machine) -> None:
    automatic = Automatic()
    machine.steps(automatic, 100)
    assert machine.number == 4
    machine.neighbours = 2
    assert machine.steps(automatic, 100).count(4) < 5, "one look at the cores after ten seconds of slow steps"
    assert machine.number == 2
    machine.neighbours = 0
    machine.steps(automatic, 100)
    assert machine.number == 4


def test_a_load_that_stays_changes_nothing_again(machine: Machine) -> None:
    machine.neighbours = 2
    automatic = Automatic()
    machine.steps(automatic, 30)
    assert set(machine.steps(automatic, 500)) == {2}
    numbers = machine.steps(automatic, 30, "another kind of step")
    assert set(numbers) == {2, 1}
    assert numbers[-20:] == [2] * 20


def test_what_is_chosen_is_said(machine: Machine) -> None:
    machine.neighbours = 3
    automatic = Automatic()
    with pytest.warns(UserWarning, match=r"^1 thread: .* 4 cores"):
        machine.steps(automatic, 30)
    machine.neighbours = 0
    with pytest.warns(UserWarning, match=r"^4 threads"):
        machine.steps(automatic, 100)


@pytest.mark.parametrize(
    ("number", "variable", "expected"), [(3, "", [3]), (3, "2", [3]), (None, "2", []), (None, "", [1])]
)
def test_a_number_that_is_given_stays(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, number: int | None, variable: str, expected: list[int]
) -> None:
    numbers: list[int] = []
    machine.neighbours = 3
    monkeypatch.setattr(threads, "set_threads", numbers.append)
    monkeypatch.setattr(threads, "_automatic", None)
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    use_threads(number)
    for _ in range(50):
        machine.sleep(1, 1)
        stepped(1.0, "train")
    assert numbers == expected


@pytest.mark.skipif(not threads.Path("/proc/stat").exists(), reason="Linux alone has these counters")
def test_counters_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = threads.os.sched_getaffinity(0)
    start, others = sample(cores)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
        time.sleep(0.5)
        neighbour.kill()
    now, after = sample(cores)
    assert 0.05 < after - others < len(cores) * (now - start) + 0.1
    assert 1 <= usable_cores(cores) <= len(cores)
    files = {"/proc/self/cgroup": "0::/a/b", "/sys/fs/cgroup/a/b/cpu.max": "150000 100000"}
    monkeypatch.setattr(threads, "_text", lambda path: files.get(path, ""))
    assert usable_cores(set(range(8))) == 2
    files["/sys/fs/cgroup/a/b/cpu.max"] = "max 100000"
    assert usable_cores(set(range(8))) == 8
    monkeypatch.setattr(threads, "_text", lambda path: "0-1" if path.endswith("siblings_list") else "")
    assert usable_cores({0, 1}) == 1


def test_torch_gets_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    numbers: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    set_threads(5)
    assert numbers == [5]
    assert threads.os.environ["OMP_NUM_THREADS"] == "5"
