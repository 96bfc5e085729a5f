"""Fixtures of `small.py`, and a hand that presses Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from small import small_child, small_data, small_parent, small_recipe
from torch import nn

from recast.data import Data
from recast.run.config import Recipe
from recast.training import loop as fit_module


@pytest.fixture
def ctrl_c() -> Callable[[str, int], AbstractContextManager[None]]:
    """`with ctrl_c("update", 4):` presses Ctrl-C during the fourth update; "measure" is the validation."""

    @contextmanager
    def pressing(where: str, calls: int) -> Iterator[None]:
        owner, name = (fit_module.Update, "__call__") if where == "update" else (fit_module, "measure")
        function, seen = getattr(owner, name), []

        def pressed(*args: Any, **kwargs: Any) -> Any:
            seen.append(1)
            if len(seen) == calls:
                signal.raise_signal(signal.SIGINT)
            return function(*args, **kwargs)

        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(owner, name, pressed)
            yield

    return pressing


@pytest.fixture
def data() -> Data:
    return small_data()


@pytest.fixture
def parent() -> nn.Module:
    return small_parent()


@pytest.fixture
def make_child(parent: nn.Module) -> Callable[..., nn.Module]:
    def make(**config: Any) -> nn.Module:
        return small_child(parent, **config)

    return make


@pytest.fixture
def make_recipe() -> Callable[..., Recipe]:
    return small_recipe
