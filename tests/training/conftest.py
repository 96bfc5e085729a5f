"""A hand that presses Ctrl-C, and whether a training that it stopped goes on bit for bit."""

import itertools
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from small import assert_same, without_clocks
from torch import nn

from recast.lab.training import loop
from recast.lab.training.distributed import Interrupted
from recast.lab.training.metrics import read_metrics


@pytest.fixture
def after() -> Callable[[str, int, Callable[[], object]], AbstractContextManager[None]]:
    """`with after("update", 4, act):` calls `act` as the fourth update begins; "measure" is the validation."""

    @contextmanager
    def watching(where: str, calls: int, act: Callable[[], object]) -> Iterator[None]:
        owner, name = (loop.Update, "__call__") if where == "update" else (loop, "validate")
        function, numbers = getattr(owner, name), itertools.count(1)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if next(numbers) == calls:
                act()
            return function(*args, **kwargs)

        with mock.patch.object(owner, name, watched):
            yield

    return watching


@pytest.fixture
def ctrl_c(after: Callable[..., AbstractContextManager[None]]) -> Callable[[str, int], AbstractContextManager[None]]:
    """`with ctrl_c("update", 4):` presses Ctrl-C during the fourth update."""
    return lambda where, calls: after(where, calls, lambda: signal.raise_signal(signal.SIGINT))


@pytest.fixture
def goes_on(ctrl_c: Callable[[str, int], AbstractContextManager[None]], tmp_path: Path) -> Callable[..., nn.Module]:
    """`goes_on(train, make, where, calls)`: stopped there and resumed, `train(folder, make(), ...)` gives the rows and
    the weights, bit for bit, of one that was not stopped: the folders `run` and `straight`. Returns the network."""

    def check(train: Any, make: Callable[[], nn.Module], where: str, calls: int, /, **fields: Any) -> nn.Module:
        straight, resumed = make(), make()
        expected = train(tmp_path / "straight", straight, **fields)
        with ctrl_c(where, calls), pytest.raises(Interrupted, match="state saved") as stopped:
            train(tmp_path / "run", make(), **fields)
        assert stopped.value.saved
        assert not (tmp_path / "run" / "weights.safetensors").exists()
        torch.rand(7)  # a generator's state does not matter
        rows = train(tmp_path / "run", resumed, resume=True, **fields)
        assert_same(straight, resumed)
        assert without_clocks(rows) == without_clocks(expected)
        assert read_metrics(tmp_path / "run" / "metrics.jsonl") == rows
        return straight

    return check
