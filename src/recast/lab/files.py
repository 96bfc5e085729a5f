"""Files of a run folder: one writer at a time, atomic writes, and reading that names the file in every error.

Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from recast.errors import RecastError
from recast.files import check_path, require, write_text
from recast.json_text import parse_json
from recast.reading import decode, read_bytes

LOCK = ".lock"
"""An empty file in a folder that is being written. The lock itself is the system's, which drops it with its process."""
TEMPORARY = re.compile(r"\..+?\.(\d+)(\.[0-9a-f]+)?\.tmp")
"""Names of `replaced`, with the number of the process."""
FOLDERS = ("resume", "finetuned", "scores", "analysis", "explain")
"""Folders of a run, which must lie in it."""
MARKS = (b'<meta name="generator" content="recast">', b"Software\0recast")
"""In the pages and the PNG pictures that we write."""
SEAL = "checksum"
"""The key of a line's own."""
_HELD: dict[Path, int] = {}
"""Folders that this process holds, and the thread that does."""


@contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Hold the lock of `folder` for the block; the same thread may enter again.

    The folder is made where there is none, and taken away again if nothing came of it; what a writer that was killed
    left half-written is swept. Raises RecastError while another process or thread holds it.
    """
    folder = check_path(folder)
    if folder.is_file():
        raise RecastError(f"{folder} is a file: choose another folder with --out")
    if folder.is_symlink() and not folder.exists():  # a disk that is not mounted?
        raise RecastError(f"{folder} is a link to {os.readlink(folder)}, which is not there: make that folder first")
    key, me = folder.resolve(), threading.get_ident()
    if _HELD.get(key) == me:
        yield
        return
    if _HELD.setdefault(key, me) != me:
        raise RecastError(f"{folder} is in use by another thread of this process: choose another folder")
    made = [parent for parent in (key, *key.parents) if not parent.exists()]
    try:
        key.mkdir(parents=True, exist_ok=True)
        with _system_lock(key / LOCK, folder):
            _check_folders(key)
            for path in key.rglob(".*.tmp"):
                if _is_left_over(path):
                    path.unlink(missing_ok=True)
            yield
    finally:
        del _HELD[key]
        for parent in made:
            with suppress(OSError):  # not empty
                parent.rmdir()


def _check_folders(run: Path) -> None:
    """Raise RecastError where a link would lead what is written into the run to another place."""
    for name in FOLDERS:
        for path in (run / name, *(run / name).glob("*")):
            if not path.is_file() and not Path(os.path.realpath(path)).is_relative_to(run):
                raise RecastError(f"{path} is a link that leads out of the run: remove it, or move its target here")


def _is_left_over(path: Path) -> bool:
    """Return True for a temporary file whose process ended. Only Linux tells."""
    match = TEMPORARY.fullmatch(path.name)
    if match is None or path.is_symlink() or not path.is_file():
        return False
    return Path("/proc/self").exists() and not Path("/proc", match[1]).exists()


@contextmanager
def _system_lock(path: Path, folder: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # Windows: nobody is kept out
        yield
        return
    while True:
        try:  # a link here would lead to a file of somebody's, and opening a pipe would wait
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise RecastError(f"cannot open {path}: {error.strerror}; if it is a link or a folder, remove it") from None
        try:
            state = os.fstat(file)
            if state.st_size or not stat.S_ISREG(state.st_mode):  # it is removed at the end
                raise RecastError(f"{path} was not written by this library: look at it, and remove it")
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, loader processes do not inherit it
            except (BlockingIOError, PermissionError):
                raise RecastError(f"{folder} is in use by another process: wait for its end, or stop it") from None
            except OSError as error:
                message = f"the storage of {folder} has no locks ({error.strerror}): see that nobody else writes there"
                warnings.warn(message, stacklevel=4)
            if not (path.exists() and os.path.samestat(state, path.stat())):
                continue  # its holder ended meanwhile and took this file away: the next one is another
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return
        finally:
            os.close(file)


def is_ours(path: Path, *marks: bytes) -> bool:
    """Return True for a file with one of these marks at its head, which this library wrote."""
    if not path.is_file():  # opening a pipe would wait
        return False
    with path.open("rb") as file:
        head = file.read(2**16)
    return any(mark in head for mark in marks)


def check_ours(path: Path) -> None:
    """Raise RecastError for a file that is there and was not written by us."""
    if os.path.lexists(check_path(path)) and not (path.is_file() and is_ours(path, *MARKS)):
        raise RecastError(
            f"{path} was not written by this command and is left as it is: choose another --out, or move it"
        )


def write_json(path: str | Path, content: Mapping[str, Any] | list[Any]) -> None:
    """Replace the JSON file `path`."""
    write_text(path, as_json(content))


def as_json(content: Mapping[str, Any] | list[Any]) -> str:
    """Return the text of a JSON file."""
    return json.dumps(content, indent=1, ensure_ascii=False, default=str) + "\n"


def read_text(path: str | Path) -> str:
    """Read the text of a file, without a byte order mark. Raises RecastError if it is missing or no text."""
    return decode(_read(path), path)


def _read(path: str | Path) -> bytes:
    try:
        return read_bytes(path)
    except FileNotFoundError:
        raise RecastError(f"{path} is missing: {Path(path).parent} is not a complete run folder") from None


def read_json(path: Path, *keys: str) -> dict[str, Any]:
    """Read the JSON object in a file. Raises RecastError if it lacks one of the keys."""
    return require(str(path), parse_json(read_text(path), path), keys)


def read_names(path: Path) -> list[str]:
    """Read the JSON list of texts in a file."""
    names = parse_json(read_text(path), path)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RecastError(f"{path} must be a JSON list of names")
    return names


def read_lines(path: Path) -> tuple[list[tuple[int, dict[str, Any]]], list[int]]:
    """The JSON objects of a file with one a line, each with the number of its line, and the numbers of other lines:
    of what is no JSON, and of what is not as `sealed` wrote it."""
    rows: list[tuple[int, dict[str, Any]]] = []
    damaged = []
    for number, line in enumerate(_read(path).split(b"\n"), start=1):
        try:
            row = require("", parse_json(line.decode("utf-8"), path))
            if row.pop(SEAL, None) not in (None, row_digest(row)):
                raise ValueError
            rows.append((number, row))
        except ValueError:  # RecastError and UnicodeDecodeError are ValueErrors
            damaged += [number] if line.strip() else []
    return rows, damaged


def sealed(row: Mapping[str, Any]) -> str:
    """A line for `read_lines`, with a checksum: a digit that a disk turned over is not taken for a measurement."""
    return json.dumps({**row, SEAL: row_digest(row)}) + "\n"


def row_digest(row: Mapping[str, Any]) -> str:
    """Return the checksum of a row of metrics.jsonl."""
    return hashlib.sha256(json.dumps(row).encode()).hexdigest()[:16]


def number(value: object) -> float:
    """Return a float; NaN for anything but a number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
