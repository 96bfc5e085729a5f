"""Helpers of several folders, as fixtures that return functions: test files cannot import one another."""

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import recast.papers.networks  # noqa: F401  registers the networks, tasks and recipes
from recast.layers.gpsa import GPSA
from recast.surgery.scales import randomize_scales_

# xdist already runs one worker a core; more threads only fight (and change the order of sums between runs)
os.environ["OMP_NUM_THREADS"] = "1"  # for processes that tests start, and so that commands keep it
torch.set_num_threads(1)

# a shell starts what it puts behind "&" with Ctrl-C ignored, and commands that the tests interrupt would inherit it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore:Using padding='same' with even kernel:UserWarning")  # torch's own
    config.addinivalue_line(
        "markers", "slow: a variant of a path that another test protects, or minutes: RECAST_SLOW=1"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `slow.txt` lists as slow, and skip all that is slow."""
    lines = Path(__file__).with_name("slow.txt").read_text(encoding="utf-8").splitlines()
    unused = {line: re.compile(re.escape(line).replace(r"\*", ".*")) for line in lines if line.startswith("tests/")}
    patterns = list(unused.items())
    for item in items:
        for line, pattern in patterns:
            if pattern.fullmatch(item.nodeid):
                item.add_marker(pytest.mark.slow)
                unused.pop(line, None)
        if item.get_closest_marker("slow") and not os.environ.get("RECAST_SLOW"):
            item.add_marker(pytest.mark.skip(reason="slow: RECAST_SLOW=1"))
    files = {item.nodeid.partition("::")[0] for item in items}  # without those of --ignore
    missing = [line for line in unused if line.partition("::")[0] in files]
    if missing and config.args_source is config.ArgsSource.TESTPATHS:
        raise pytest.UsageError(f"tests/slow.txt lists tests that are not there: {', '.join(missing)}")


class Case(NamedTuple):
    """A random convolution and an input it fits."""

    conv: nn.Conv2d
    x: Tensor
    text: str


def _channels(rng: random.Random) -> tuple[int, int, int]:
    """Input channels, output channels, groups."""
    kind = rng.choice(("one", "one", "groups", "depthwise", "multiplier"))
    if kind == "one":
        return rng.randint(1, 5), rng.randint(1, 5), 1
    groups = rng.randint(2, 4)
    if kind == "groups":
        return groups * rng.randint(2, 3), groups * rng.randint(1, 3), groups
    return groups, groups * (1 if kind == "depthwise" else rng.randint(2, 3)), groups


def _random_case(seed: int, dtype: torch.dtype = torch.float64) -> Case:
    """Any kernel, stride, dilation, groups, padding and padding mode that `nn.Conv2d` accepts, on a tiny input."""
    rng = random.Random(seed)
    kernel = rng.choice([(1, 1), (3, 3), (2, 2), (1, 7), (5, 3), (rng.randint(1, 4), rng.randint(1, 4))])
    dilation = (rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3)))
    stride = (rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3)))
    mode = rng.choice(("zeros", "zeros", "reflect", "replicate", "circular"))
    padding: str | int | tuple[int, int] = rng.choice(
        ("same", "valid", rng.randint(0, 3), (rng.randint(0, 3), rng.randint(0, 3)))
    )
    if padding == "same":
        stride = (1, 1)
    size = []
    for axis in range(2):
        reach = dilation[axis] * (kernel[axis] - 1)
        if isinstance(padding, str):
            before, total = (reach // 2, reach) if padding == "same" else (0, 0)
        else:
            before = padding if isinstance(padding, int) else padding[axis]
            total = 2 * before
        largest = max(before, total - before)
        fits = {"reflect": largest + 1, "circular": largest}.get(mode, 1)
        size.append(max(1, fits, reach + 1 - total) + rng.randint(0, 4))
    in_channels, out_channels, groups = _channels(rng)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        conv = nn.Conv2d(
            in_channels, out_channels, kernel, stride, padding, dilation, groups, rng.random() < 0.5, mode, dtype=dtype
        )
        x = torch.randn(rng.randint(1, 2), in_channels, *size, dtype=dtype)
        if torch.equal(conv(x), conv(torch.zeros_like(x))):  # every tap falls on padding: nothing to compare
            return _random_case(seed + 1_000_003, dtype)
    return Case(conv, x, f"seed {seed}: {conv} on {tuple(x.shape)}")


def _open_gates(layer: GPSA, seed: int = 0) -> GPSA:
    """Random values for everything that training may move: gates, Δ, α, W_val, queries and keys."""
    generator = torch.Generator().manual_seed(seed)

    def normal(like: Tensor, scale: float) -> Tensor:
        return scale * torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)

    scales = {"center": 0.6, "raw_alpha": 0.4, "value": 0.3, "gamma": 0.3, "spread": 0.3, "lam": 1.0}
    with torch.no_grad():
        if layer.content_heads:
            layer.query.copy_(normal(layer.query, 1.0))
            layer.key.copy_(normal(layer.key, 1.0))
        for name, scale in scales.items():
            if (parameter := getattr(layer, name, None)) is not None:
                parameter.add_(normal(parameter, scale))
    return layer


def _error(a: Tensor, b: Tensor) -> float:
    """max|a − b| / max|b|, written here again so that the tests do not trust the package's own."""
    assert a.shape == b.shape, f"{tuple(a.shape)} against {tuple(b.shape)}"
    difference, scale = float((a - b).detach().abs().max()), float(b.detach().abs().max())
    assert difference == difference
    return difference if difference == 0 else difference / max(scale, 1e-300)


@pytest.fixture(scope="session")
def random_case() -> Callable[..., Case]:
    """`random_case(seed, dtype)`: a random convolution, an input, and a text that names it."""
    return _random_case


@pytest.fixture(scope="session")
def open_gates() -> Callable[..., GPSA]:
    """`open_gates(layer, seed)`: move every parameter of a layer off its start."""
    return _open_gates


@pytest.fixture(scope="session")
def error_of() -> Callable[[Tensor, Tensor], float]:
    """`error_of(a, b)`: max|a − b| / max|b|."""
    return _error


@pytest.fixture(scope="session")
def make_non_vacuous() -> Callable[[nn.Module], nn.Module]:
    """`make_non_vacuous(model)`: a random network in which no layer is silent."""
    return randomize_scales_


@pytest.fixture(scope="session")
def two_processes() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`two_processes(script, *words)`: run it by torchrun."""
    if os.name == "nt":
        pytest.skip("torchrun with gloo is not tested on Windows")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return lambda *words: subprocess.run([*torchrun, *map(str, words)], capture_output=True, text=True, check=False)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Tests that draw random numbers draw the same ones every time."""
    torch.manual_seed(0)
