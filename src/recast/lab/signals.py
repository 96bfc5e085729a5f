"""What ends a command: Ctrl-C, SIGTERM, and a terminal that is closed (SIGHUP).

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
_heard = -math.inf
"""When a Ctrl-C was last taken for a wish."""


def _is_new() -> bool:
    global _heard
    if (now := time.monotonic()) - _heard < BURST:
        return False
    _heard = now
    return True


@contextmanager
def calm_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt for the block, but once only where it is pressed again and again."""

    def hear(_number: int, _frame: FrameType | None) -> None:
        if _is_new():
            raise KeyboardInterrupt

    with _heard_by(hear, *{signal.SIGINT} if signal.getsignal(signal.SIGINT) == signal.default_int_handler else ()):
        yield


@contextmanager
def stop_signals() -> Iterator[Event]:
    """Listen to SIGINT, SIGTERM and SIGHUP for the block; what is yielded is set once the run was asked to stop, and
    looked at after every step, so that no state is ever half a step. Ctrl-C a second time, BURST seconds later or more,
    raises KeyboardInterrupt at once, further ones do nothing."""
    global _heard
    stop, _heard = Event(), -math.inf

    def hear(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and not _is_new():
            return
        if stop.is_set() and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise KeyboardInterrupt
        stop.set()

    with _heard_by(hear, *_ending()):
        yield stop


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put signals off until the block ends, each kind once: an exception in torch's writer aborts the process."""
    late: set[int] = set()
    with _heard_by(lambda number, _frame: late.add(number), *_ending()):
        yield
    for number in late:
        signal.raise_signal(number)


def _ending() -> set[int]:
    """The signals that end a run; under nohup a closed terminal is none."""
    hears_hangup = hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    return {signal.SIGINT, signal.SIGTERM} | ({signal.SIGHUP} if hears_hangup else set())


@contextmanager
def _heard_by(hear: Callable[[int, FrameType | None], object], *numbers: int) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, hear) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
