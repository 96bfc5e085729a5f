"""Ctrl-C and SIGTERM during training: a wish that is heard at the next step, so that no state is ever half a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, after the state was saved. The message says how to go on; the command line prints it.

    A KeyboardInterrupt, so that an `except Exception` around a study does not go on with the next run.
    """


class Stopped(KeyboardInterrupt):
    """The wish was heard between two steps: the state is whole and may be saved."""


class Stop:
    """Whether somebody asked the run to stop. A second Ctrl-C does not wait: it raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.requested = False

    def hear(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Listen to SIGINT and SIGTERM for the block. Signals reach the main thread only: elsewhere nobody can ask."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    before = {number: signal.signal(number, stop.hear) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
