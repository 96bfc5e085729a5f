"""A hostile case, how it is tried, what is held against it: one definition for tests and `benchmarks/hostile.py`.

A case is tried in a child of this process, in a copy of the world, with a limit of memory and of time, and without a
network. It ends well with exit code 0 and nothing wrong, or with exit code 2, one clear line and everything as it was.
"""

from __future__ import annotations

import os
import re
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import NoReturn

import torch
from world import RAN, copied, snapshot

from recast.lab.cli import main

LIMIT = 10.0
"""Seconds: of the clock if it waits, of the processor if it works (other programs may be slowing it down)."""
MEMORY = 3 * 2**30
"""Bytes above what this process has."""
FAULTS = ("traceback", "unclear", "hang", "wrong", "changed", "ran")
CHANGED = "changed by a refusal: "
"""What a case that calls the library prints where it finds so."""
CLEAN = {
    "PATH": os.environ.get("PATH", ""), "HOME": "/nonexistent", "COLUMNS": "100", "TERM": "dumb", "LANG": "C.UTF-8",
    "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MPLCONFIGDIR": tempfile.gettempdir(),
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """How a case ended."""

    code: int
    """Minus the signal's number if it died of one."""
    out: str
    err: str
    seconds: float
    hung: bool
    changes: tuple[str, ...]
    """Paths that were made, changed or taken away."""
    made: dict[str, str]
    """Digests of what is there afterwards."""
    ran: bool
    folder: Path

    @property
    def told(self) -> bool:
        """Whether it said anything but its result."""
        return bool(self.err.strip())


@dataclass(frozen=True)
class Case:
    """Something that a user would not do, or that somebody made for them."""

    kind: str
    name: str
    act: list[str] | Callable[[Path], int]
    """Words of a command line, or what is called in the folder and gives the exit code."""
    prepare: Callable[[Path], object] = lambda folder: None
    """Puts the hostile thing into the copy of the world, before it is looked at."""
    wrong: Callable[[Result], str] = lambda result: ""
    """Of an exit code 0: why it is silently wrong; empty if it is not."""
    may_change: tuple[str, ...] = ()
    """Paths that a refusal may change: what was finished before, and is told."""
    refused: bool = False
    """Nothing but a refusal will do."""
    before: Callable[[], object] = lambda: None
    """Called in the child: closes streams, sets limits and variables."""
    codes: tuple[int, ...] = (0, 2)
    unheard: bool = False
    """What it says does not come to us."""

    @property
    def command(self) -> str:
        return "recast " + " ".join(self.act) if isinstance(self.act, list) else "recast as a library"


def attempt(case: Case, world: Path, keep: Path | None = None) -> Result:
    """Try a case in a copy of the world; `keep` is where the copy stays afterwards."""
    scratch = Path(tempfile.mkdtemp(prefix="hostile"))
    folder, marker = scratch / "world", scratch / "ran"
    try:
        copied(world, folder)
        case.prepare(folder)
        before = snapshot(folder)
        begin = time.monotonic()
        code, hung = _in_a_child(case, folder, scratch)
        seconds = time.monotonic() - begin
        now = snapshot(folder)
        changes = tuple(sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path)))
        out, err = ((scratch / name).read_text("utf-8", "surrogateescape") for name in ("out", "err"))
        out, err = (text.replace(str(folder), "{tmp}") for text in (out, err))
        return Result(code, out, err, seconds, hung, changes, now, marker.exists(), folder)
    finally:
        if keep is not None:
            shutil.copytree(folder, keep, symlinks=True)
        for root, names, _ in os.walk(scratch):
            for name in names:
                with suppress(OSError):
                    os.chmod(os.path.join(root, name), 0o700)
        shutil.rmtree(scratch, ignore_errors=True)


def _in_a_child(case: Case, folder: Path, scratch: Path) -> tuple[int, bool]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads: what the child calls needs none of theirs
        child = os.fork()
    if child == 0:
        _act(case, folder, scratch)
    with os.fdopen(os.pidfd_open(child)) as ended:
        hung = not select.select([ended], [], [], LIMIT)[0]
        waited = 0
        while hung and _processor(child)[0] < LIMIT and waited < 20:  # a machine that others use is given time
            waited = 0 if _processor(child)[1] in "RD" else waited + 1
            hung = not select.select([ended], [], [], 0.2)[0]
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # and what it started
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), hung


def _processor(process: int) -> tuple[float, str]:
    """Seconds of the processor that a process has used, and whether it runs (R) or waits (S)."""
    parts = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK"), parts[0]


def _act(case: Case, folder: Path, scratch: Path) -> NoReturn:
    """In the child: nothing of this process is left but what is imported."""
    code = 1
    try:
        os.setsid()
        torch.set_num_threads(torch.get_num_threads())  # its pool anew, in one thread: two at once abort after a fork
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(CLEAN | {RAN: str(scratch / "ran")})
        files = [os.open(os.devnull, os.O_RDONLY)]
        files += [os.open(scratch / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in ("out", "err")]
        for number, file in enumerate(files):
            os.dup2(file, number)
        sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = open(2, "w", closefd=False)  # type: ignore[misc]
        size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        socket.socket.connect = _no_network  # type: ignore[method-assign, assignment]
        warnings.resetwarnings()
        case.before()
        code = case.act(folder) if callable(case.act) else main(case.act)
    except SystemExit as error:  # as the console script does
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    finally:
        with suppress(Exception):
            sys.stdout.flush()
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(code & 255)


def _no_network(*_: object) -> None:
    raise OSError(101, "Network is unreachable")


LINE = re.compile(r"recast( \w+)?( \[process \d+\])?: .+")
UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def faults(case: Case, result: Result) -> dict[str, str]:
    """What is held against the end of a case: the fault, and what shows it."""
    found: dict[str, str] = {}
    said = result.out + result.err
    errors = [line for line in result.err.splitlines() if not line.startswith("note: ")]
    if result.hung:
        found["hang"] = f"{result.seconds:.0f} s"
    elif "Traceback (most recent call last)" in said or result.code not in case.codes:
        found["traceback"] = f"exit code {result.code}: {result.err[-300:]}"
    elif "(unexpected: " in said or (UNSEEN.search(said)):
        found["unclear"] = result.err[-300:]
    elif result.code == 2 and not case.unheard and not _is_clear(errors):
        found["unclear"] = f"{len(errors)} lines: {result.err[-300:]!r}"
    elif result.code == 0 and case.refused:
        found["wrong"] = f"accepted: {said[-200:]}"
    elif result.code == 0 and (why := case.wrong(result)):
        found["wrong"] = why
    changed = [path for path in result.changes if not any(fnmatch(path, one) for one in case.may_change)]
    if CHANGED in said:
        found["changed"] = said[said.index(CHANGED) :][:200]
    elif result.code == 2 and changed:
        found["changed"] = ", ".join(changed[:5])
    left = [path for path in result.changes if path in result.made and path.endswith((".tmp", ".lock"))]
    if left and result.code in (0, 2):
        found["changed"] = f"left over: {', '.join(left[:5])}"
    if result.ran:
        found["ran"] = "canary.py"
    return found


def _is_clear(errors: list[str]) -> bool:
    """One line that says what is wrong; behind it, lines of a kind that evaluate repeats for every missing suite."""
    return (
        bool(errors)
        and len({e.partition(":")[0] for e in errors}) == 1
        and all(LINE.fullmatch(line) and "error: " in line and len(line) < 1200 for line in errors)
    )
