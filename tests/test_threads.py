import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from recast import RecastConfig, plan, recast_, wake_
from recast.lab.cli import threads
from recast.lab.cli.threads import sample, usable_cores, use_threads


@pytest.mark.parametrize(
    ("number", "variable", "neighbours", "expected"),
    [
        (3, "", 9, [3]),
        (3, "2", 0, [3]),
        (None, "2", 9, []),
        (None, "", 0, []),
        (None, "", 1, [3]),
        (None, "", 3, [1]),
        (None, "", 9, [1]),
    ],
)
def test_the_start_takes_the_free_cores_or_the_number_it_is_given(
    monkeypatch: pytest.MonkeyPatch, number: int | None, variable: str, neighbours: int, expected: list[int]
) -> None:
    numbers: list[int] = []
    samples = iter([(1.0, 5.0), (1.2, 5.0 + 0.2 * neighbours)])
    monkeypatch.setattr(threads, "sample", lambda cores: next(samples))
    monkeypatch.setattr(threads, "usable_cores", len)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setenv("OMP_WAIT_POLICY", "")
    use_threads(number)
    assert numbers == expected
    assert threads.os.environ["OMP_NUM_THREADS"] == "".join(map(str, expected)) or variable


@pytest.mark.skipif(not threads.Path("/proc/stat").exists(), reason="Linux alone has these counters")
def test_counters_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = threads.os.sched_getaffinity(0)
    start, before = sample(cores)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
        time.sleep(0.5)
        neighbour.kill()
    now, after = sample(cores)
    assert 0.05 < after - before < len(cores) * (now - start) + 0.1
    assert 1 <= usable_cores(cores) <= len(cores)
    files = {"/proc/self/cgroup": "0::/a/b", "/sys/fs/cgroup/a/b/cpu.max": "150000 100000"}
    monkeypatch.setattr(threads, "_text", lambda path: files.get(path, ""))
    assert usable_cores(set(range(8))) == 2
    files["/sys/fs/cgroup/a/b/cpu.max"] = "max 100000"
    assert usable_cores(set(range(8))) == 8
    monkeypatch.setattr(threads, "_text", lambda path: "0-1" if path.endswith("siblings_list") else "")
    assert usable_cores({0, 1}) == 1


@pytest.mark.parametrize("gate", ["beside", "linear", "sigmoid"])
def test_threads_may_run_one_network(gate: str) -> None:
    torch.manual_seed(0)
    images = [torch.randn(2, 3, side, side) for side in (8, 12, 9, 16) * 4]
    parent = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))
    child = recast_(parent, plan(parent, images[0], RecastConfig(gate=gate), where="all")).eval()
    wake_(child, images[0])
    expected = [child(x) for x in images]
    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(child, images))
    assert all(map(torch.equal, outputs, expected))
