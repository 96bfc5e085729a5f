"""What stands between a command and the terminal: streams that cannot fail, and one line for whatever goes wrong."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TextIO

from recast.errors import first_line, one_line, printable


class Stream:
    """Standard output or error. Where it cannot be written to (its reader has gone, the disk is full, it is closed) the
    command goes on in silence, and `failed` says why."""

    def __init__(self, stream: Any, failed: OSError | None = None) -> None:
        self.stream, self.failed = stream, failed
        self.result: Stream = self
        self.is_muted = False
        self.is_terminal = bool(stream.isatty())

    def write(self, text: str) -> int:
        """Write text without what a terminal obeys; on stderr, a terminal gets the escapes of progress bars.

        cyclopts sends a shell that completes words \\x1f, which terminals ignore.
        """
        if self.failed is None and not self.is_muted:
            with self._failing():
                plain = self.is_terminal and self.stream is sys.__stderr__
                self.stream.write(text if plain else printable(text, keep="\t\n\r\x1f"))
        return len(text)

    def flush(self) -> None:
        if self.failed is None:
            with self._failing():
                self.stream.flush()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failed = error
            with suppress(OSError), open(os.devnull, "wb") as nowhere:  # what is left in buffers must not fail again
                os.dup2(nowhere.fileno(), self.stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def guarded_streams(json: bool, quiet: bool = False) -> Iterator[Stream]:
    """`sys.stdout` and `sys.stderr` as streams that cannot fail; yields the one that results go to.

    With `json` nothing but `print_json` reaches standard output: what else is printed goes to standard error. With
    `quiet` nothing but `complain` reaches standard error.
    """
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for number in range(3) if closed else ():  # or the next file that is opened takes the place of standard output
        with suppress(OSError):
            if not _is_open(number):
                os.open(os.devnull, os.O_RDWR)
    with ExitStack() as stack:
        streams: dict[str, Any] = {name: stack.enter_context(open(os.devnull, "w+")) for name in closed}
        before = sys.stdin, sys.stdout, sys.stderr
        for name in ("stdout", "stderr"):
            if hasattr(stream := streams.get(name) or getattr(sys, name), "reconfigure"):
                # redirected on Windows they speak a code page that has no → and no σ; names may be no UTF-8
                with suppress(OSError):  # a pipe without a reader may not let it
                    stream.reconfigure(encoding="utf-8", errors="backslashreplace")
        is_closed = OSError(errno.EBADF, "it is closed") if "stdout" in closed else None
        out = result = Stream(streams.get("stdout") or sys.stdout, is_closed)
        error = Stream(streams.get("stderr") or sys.stderr)
        error.is_muted = quiet
        if json:
            out = error
            if not is_closed and (kept := _moved(before[1], before[2])):
                result = Stream(stack.enter_context(kept))
                stack.callback(os.dup2, kept.fileno(), 1)  # before it is closed
        try:
            sys.stdin, sys.stdout, sys.stderr = streams.get("stdin") or sys.stdin, out, error
            out.result = result  # for `print_json`
            yield result
        finally:
            result.flush()
            error.flush()
            sys.stdin, sys.stdout, sys.stderr = before


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _moved(out: TextIO, error: TextIO) -> TextIO | None:
    """Standard output under another number, and number 1 a second standard error: for what C code and processes print.

    None where Python's streams are not the process's.
    """
    try:
        if (out.fileno(), error.fileno()) != (1, 2):
            return None
    except (AttributeError, OSError, ValueError):
        return None
    out.flush()
    kept = open(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    os.dup2(2, 1)
    return kept


def describe(error: BaseException) -> str:
    """What went wrong, for one line: the system's own words, or the kind of the error and what it says."""
    said = first_line(error)
    if isinstance(error, MemoryError) or any(text in str(error) for text in ("allocate memory", "out of memory")):
        return f"not enough memory{'' if said == 'MemoryError' else f' ({said})'}: ask for less at a time"
    if isinstance(error, OSError):
        return f"{error.filename or 'input/output'}: {error.strerror or error}"
    if isinstance(error, SystemExit):
        return f"code that was run left the program (exit code {error.code})"
    if said.startswith("Symlink loop"):  # Python 3.11's own RuntimeError; later ones give an OSError
        return said
    if isinstance(error, RecursionError):
        return "something is nested too deep"
    if isinstance(error, UnicodeError):
        return f"a name or text that is not UTF-8: {said}"
    if isinstance(error, ImportError):
        return f"cannot import what is needed: {said}"
    return f"{type(error).__name__}: {said} (unexpected: --verbose shows where)"


def later_process() -> str:
    """The number of one of torchrun's processes that is not the first, which alone speaks; empty for any other. A RANK
    without a WORLD_SIZE is another program's."""
    number = os.environ.get("RANK", "0")
    return number if os.environ.get("WORLD_SIZE", "1") not in ("", "1") and number != "0" else ""


def complain(who: str, message: str, code: int = 2) -> int:
    """One line on standard error; returns the exit code."""
    if number := later_process():
        who = f"{who} [process {number}]"
    if isinstance(sys.stderr, Stream):
        sys.stderr.is_muted = False
    print(f"{who}: {one_line(message)}", file=sys.stderr)
    return code
