"""Signals that end a command: Ctrl-C, SIGTERM, and a terminal that is closed (SIGHUP).

Imports no torch. Signals reach the main thread only: in other threads the blocks below change nothing.
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
"""Seconds in which repeated Ctrl-C counts once: raised while torch cleans up it may abort the process."""
_last = -math.inf
"""Time of the last Ctrl-C that counted."""


def _is_new() -> bool:
    global _last
    if (now := time.monotonic()) - _last < BURST:
        return False
    _last = now
    return True


@contextmanager
def calm_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt for the block, once in a burst."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        if _is_new():
            raise KeyboardInterrupt

    with _handled_by(handle, *{signal.SIGINT} if signal.getsignal(signal.SIGINT) == signal.default_int_handler else ()):
        yield


@contextmanager
def stop_signals() -> Iterator[Event]:
    """Yield an event that SIGINT, SIGTERM and SIGHUP set; a loop looks at it after every step.

    A second Ctrl-C, `BURST` seconds later or more, raises KeyboardInterrupt at once; further ones do nothing.
    """
    global _last
    stop, _last = Event(), -math.inf

    def handle(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and not _is_new():
            return
        if stop.is_set() and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise KeyboardInterrupt
        stop.set()

    with _handled_by(handle, *_ending()):
        yield stop


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay signals until the block ends, each kind once: an exception in torch's writer aborts the process."""
    late: set[int] = set()
    with _handled_by(lambda number, _frame: late.add(number), *_ending()):
        yield
    for number in late:
        signal.raise_signal(number)


def _ending() -> set[int]:
    """Return the signals that end a run; nohup ignores SIGHUP."""
    ends_with_terminal = hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    return {signal.SIGINT, signal.SIGTERM} | ({signal.SIGHUP} if ends_with_terminal else set())


@contextmanager
def _handled_by(handle: Callable[[int, FrameType | None], object], *numbers: int) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
