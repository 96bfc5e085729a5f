"""Signals that end a training: Ctrl-C, SIGTERM, and a terminal that is closed (SIGHUP).

Imports no torch. Signals reach the main thread only: elsewhere nobody can ask.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType

BURST = 1.0
"""Seconds in which Ctrl-C, pressed again, is the same wish: raised while torch cleans up it may abort the process."""


@contextmanager
def stop_signals() -> Iterator[Event]:
    """Listen to SIGINT, SIGTERM and SIGHUP for the block, and yield an event that is set once the run should stop.

    The run looks at it after every step, so that no state is ever half a step. Ctrl-C a second time, BURST seconds
    later or more, raises KeyboardInterrupt at once; further ones do nothing.
    """
    stop, last = Event(), -math.inf

    def hear(number: int, _frame: FrameType | None) -> None:
        nonlocal last
        if number == signal.SIGINT:
            if (now := time.monotonic()) - last < BURST:
                return
            last = now
            if stop.is_set():
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                raise KeyboardInterrupt
        stop.set()

    with _heard_by(hear):
        yield stop


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put signals off until the block ends, each kind once: an exception in torch's writer aborts the process."""
    late: set[int] = set()
    with _heard_by(lambda number, _frame: late.add(number)):
        yield
    for number in late:
        signal.raise_signal(number)


@contextmanager
def _heard_by(hear: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle the signals that end a run; under nohup a closed terminal is none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = {signal.SIGINT, signal.SIGTERM}
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.add(signal.SIGHUP)
    before = {number: signal.signal(number, hear) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
