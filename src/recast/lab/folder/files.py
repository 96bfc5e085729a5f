"""Files of a run folder: one writer at a time, atomic writes, and reading that names the file in every error.

Imports no torch.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from recast.errors import RecastError
from recast.files import check_path, require, write_text
from recast.json_text import parse_json
from recast.reading import decode, read_bytes

T = TypeVar("T")
TEMPORARY = re.compile(r"\..+?\.(\d+)(\.[0-9a-f]+)?\.tmp")
"""Names of `replaced`, with the number of the process."""
FOLDERS = STATES, CONTROL, SCORES, ANALYSIS, EXPLAIN = "resume", "finetuned", "scores", "analysis", "explain"
"""Folders of a run, which must lie in it."""
LOCK = ".lock"
"""An empty file in a folder that is being written."""
MARKS = (b'<meta name="generator" content="recast">', b"Software\0recast")
"""In the pages and the PNG pictures that we write."""


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
    key = folder.resolve()
    lock = FileLock(key / LOCK, blocking=False, is_singleton=True)
    if lock.is_locked:
        yield
        return
    made = [parent for parent in (key, *key.parents) if not parent.exists()]
    try:
        key.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            raise RecastError(f"{folder} is in use by another process or thread: wait for its end") from None
        except OSError as error:
            odd = (key / LOCK).is_symlink() or (key / LOCK).is_dir()
            remedy = f"remove {LOCK}, which is a link or a folder" if odd else "the folder must be writable"
            raise RecastError(f"cannot lock {folder}: {error.strerror}; {remedy}") from None
        try:
            _check_folders(key)
            for path in key.rglob(".*.tmp"):
                if _is_left_over(path):
                    path.unlink(missing_ok=True)
            yield
        finally:
            with suppress(FileNotFoundError):
                if not os.path.getsize(key / LOCK):  # else it is somebody's
                    (key / LOCK).unlink()
            lock.release()
    finally:
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


def check_ours(path: Path) -> None:
    """Raise RecastError for a file that is there and has none of our MARKS at its head."""
    if not os.path.lexists(check_path(path)):
        return
    if path.is_file():  # opening a pipe would wait
        with path.open("rb") as file:
            head = file.read(2**16)
        if any(mark in head for mark in MARKS):
            return
    raise RecastError(f"{path} was not written by this command and is left as it is: choose another --out, or move it")


def write_json(path: str | Path, content: Mapping[str, Any] | list[Any]) -> None:
    """Replace the JSON file `path`."""
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False, default=str) + "\n")


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


def read_existing(path: Path, reader: Callable[[Path], T]) -> T | None:
    """Return what a function reads from a file; None if it is missing."""
    return reader(path) if path.is_file() else None


def read_names(path: Path) -> list[str]:
    """Read the JSON list of texts in a file."""
    names = parse_json(read_text(path), path)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RecastError(f"{path} must be a JSON list of names")
    return names


def read_lines(path: Path) -> tuple[list[tuple[int, dict[str, Any]]], list[int]]:
    """Return the JSON objects of a file with one a line, each with the number of its line, and those of other lines."""
    rows: list[tuple[int, dict[str, Any]]] = []
    damaged = []
    for number, line in enumerate(_read(path).split(b"\n"), start=1):
        try:
            rows.append((number, require("", parse_json(line.decode("utf-8"), path))))
        except ValueError:  # RecastError and UnicodeDecodeError are ValueErrors
            damaged += [number] if line.strip() else []
    return rows, damaged


def json_line(row: Mapping[str, Any]) -> str:
    """Return a line for `read_lines`."""
    return json.dumps(row) + "\n"


def number(value: object) -> float:
    """Return a float; NaN for anything but a number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
