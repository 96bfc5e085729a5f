"""Handle the signals that end a training: Ctrl-C, SIGTERM, and a closed terminal (SIGHUP).

Imports no torch. Signals reach the main thread only; in other threads these functions do nothing.
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
"""Seconds during which a second Ctrl-C is ignored: raised while torch cleans up, it may abort the process."""


@contextmanager
def stop_signals() -> Iterator[Event]:
    """Handle SIGINT, SIGTERM and SIGHUP during the block and yield an event that is set once the run should stop.

    The run checks it after every step, so that no state is half a step. A second Ctrl-C, at least BURST seconds later,
    raises KeyboardInterrupt at once. Further ones do nothing.
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
    """Delay signals until the block ends, each kind once: an exception in torch's writer would abort the process."""
    late: set[int] = set()
    with _heard_by(lambda number, _frame: late.add(number)):
        yield
    for number in late:
        signal.raise_signal(number)


@contextmanager
def _heard_by(hear: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Call `hear` for the signals that end a run; not for SIGHUP under nohup."""
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
