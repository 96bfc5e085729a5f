"""A hand that presses Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from recast.training import loop


@pytest.fixture
def after() -> Callable[[str, int, Callable[[], object]], AbstractContextManager[None]]:
    """`with after("update", 4, act):` calls `act` as the fourth update begins; "measure" is the validation."""

    @contextmanager
    def watching(where: str, calls: int, act: Callable[[], object]) -> Iterator[None]:
        owner, name = (loop.Update, "__call__") if where == "update" else (loop, "measure")
        function, seen = getattr(owner, name), []

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.append(1)
            if len(seen) == calls:
                act()
            return function(*args, **kwargs)

        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(owner, name, watched)
            yield

    return watching


@pytest.fixture
def ctrl_c(after: Callable[..., AbstractContextManager[None]]) -> Callable[[str, int], AbstractContextManager[None]]:
    """`with ctrl_c("update", 4):` presses Ctrl-C during the fourth update."""
    return lambda where, calls: after(where, calls, lambda: signal.raise_signal(signal.SIGINT))
