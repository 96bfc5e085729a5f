"""Streams that cannot fail, and one-line messages for errors."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from recast.errors import RecastError, first_line, printable

LONGEST = 1000
"""Characters of a message."""
ADVICE = re.compile(
    r"(?<!\S)(?:(allow_change|pretrained|trust)=(True|False)(?=[,;:.)]?(?!\S))|(beside|checkpoint|checkpoint_key|device)=)"
)
"""Python arguments that messages of `recast` outside the command line advise: whole words, as paths hold such names."""


class TerminalStream:
    """Standard output or error, without terminal control characters.

    If it cannot be written to (closed pipe, full disk), the command continues in silence and `failed` has the reason.
    A stream that was closed before the start is replaced by the null device.
    """

    def __init__(self, stream: Any) -> None:
        if stream is None or getattr(stream, "closed", False):
            stream = open(os.devnull, "w", encoding="utf-8")
        self.stream = stream
        self.failed: OSError | ValueError | None = None
        self.result: TerminalStream = self
        self.is_muted = False
        self.shows_bars = stream.isatty() and stream is sys.__stderr__

    def write(self, text: str) -> int:
        """Write text; on stderr, a terminal gets the escapes of progress bars."""
        if not self.is_muted:
            self._try(self.stream.write, text if self.shows_bars else printable(text, keep="\t\n\r"))
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, call: Callable[..., Any], *args: Any) -> None:
        if self.failed is not None:
            return
        try:
            call(*args)
        except (OSError, ValueError) as error:  # ValueError: other code closed it
            self.failed = error
            with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                # what is left in buffers must not fail again
                os.dup2(nowhere.fileno(), self.stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def guarded_streams(json: bool, quiet: bool = False) -> Iterator[TerminalStream]:
    """Make `sys.stdout` and `sys.stderr` streams that cannot fail, and yield the one that results go to.

    With `json` only `print_json` reaches standard output; other output goes to standard error. With `quiet` only
    `complain` reaches standard error.
    """
    before = sys.stdout, sys.stderr
    _fill_closed_descriptors()
    for stream in before:
        if hasattr(stream, "reconfigure"):  # Windows redirects to a code page that has no → and no σ
            with suppress(OSError, ValueError):  # a pipe without a reader may not let it
                stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    result, error = map(TerminalStream, before)
    error.is_muted = quiet
    out = error if json else result
    out.result = result  # for `print_json`
    try:
        sys.stdout, sys.stderr = out, error
        yield result
    finally:
        result.flush()
        error.flush()
        sys.stdout, sys.stderr = before
        for guarded, stream in zip((result, error), before, strict=True):
            if guarded.stream is not stream:
                guarded.stream.close()


def _fill_closed_descriptors() -> None:
    """Open the null device as those of descriptors 0 to 2 that are closed, else files get them, and C code's output."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


def describe_error(error: BaseException) -> str:
    """Describe an error in one line: its message, that of the system, or the kind of the error and its message."""
    if isinstance(error, RecastError):
        return str(error)
    message = first_line(error)
    if isinstance(error, MemoryError) or any(text in str(error) for text in ("allocate memory", "out of memory")):
        return f"not enough memory ({message}): use smaller batches or images"
    if isinstance(error, OSError):
        return f"{error.filename or 'input/output'}: {error.strerror or error}"
    if isinstance(error, SystemExit):
        return f"the code that was run called sys.exit (exit code {error.code})"
    return f"{type(error).__name__}: {message} (unexpected: --verbose shows where)"


def check_alone(command: str) -> None:
    """Raise RecastError for a command that torchrun started in several processes: each would do all of the work."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        error = RecastError(
            f"only train and evaluate share their work among processes, and torchrun started "
            f"{os.environ['WORLD_SIZE']}: start {command} without torchrun"
        )
        error.is_reported = bool(later_process())  # by the first process
        raise error


def later_process() -> str:
    """Return the rank of a later process of torchrun; empty for the first, which alone prints."""
    number = os.environ.get("RANK", "0")
    is_one_of_several = os.environ.get("WORLD_SIZE", "1") not in ("", "1")  # else RANK is another program's
    return number if is_one_of_several and number != "0" else ""


def as_option(argument: re.Match[str]) -> str:
    """Return what to type for a Python argument: `--trust` for trust=True, and the value follows for checkpoint=."""
    name = (argument[1] or argument[3]).replace("_", "-")
    return {"True": f"--{name}", "False": f"--no-{name}", None: f"--{name} "}[argument[2]]


def one_line(message: object) -> str:
    """Return a message in one line of bounded length, with options as typed, without terminal control characters."""
    text = ADVICE.sub(as_option, printable(" ".join(str(message).split())))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 203]} … {text[-200:]}"


def complain(command: str, message: str, code: int = 2) -> int:
    """Print one line on standard error and return the exit code."""
    if number := later_process():
        command = f"{command} [process {number}]"
    if isinstance(sys.stderr, TerminalStream):
        sys.stderr.is_muted = False
    print(f"{command}: {one_line(message)}", file=sys.stderr)
    return code
