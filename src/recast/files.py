"""Atomic writing of files, and messages about their places. Imports no torch."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from recast.errors import RecastError, shown


def check_path(path: str | Path) -> Path:
    """Return the path. Raises RecastError for an impossible name: too long, a null byte, below a file."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RecastError(f"cannot use the path {shown(os.fspath(path))}: {reason}") from None
    return Path(path)


def check_place(path: Path, option: str, example: str) -> None:
    """Raise RecastError unless a file can be written as `path`: it is not a folder, and its folder exists."""
    if check_path(path).is_dir():
        raise RecastError(f"{option} must be a file, got the folder {path}: add a name such as {example}")
    if not path.parent.is_dir():
        raise RecastError(f"the folder of {option} does not exist: {path.parent}")


def free_space(folder: Path) -> str:
    """Return the free space of the disk below a folder."""
    return f"{shutil.disk_usage(folder).free / 2**20:,.0f} MiB"


@contextmanager
def replaced(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; what the block wrote there is flushed to the disk and takes `path`'s name.

    If the block or the disk fails, the temporary file is removed and `path` is as it was. A replaced file keeps
    its mode.
    """
    path = check_path(path)
    if path.is_dir():
        raise RecastError(f"{path} is a folder: expected the name of a file")
    # an unguessable name and a new file: no existing file or link is written to
    temporary = path.with_name(f".{path.name[:40]}.{os.getpid()}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.touch(exist_ok=False)
        mode = (path if path.exists() else temporary).stat().st_mode  # of a new file as the user's umask has it
        _set_mode(temporary, 0o600)
        yield temporary
        with temporary.open("rb+") as file:
            _set_mode(temporary, stat.S_IMODE(mode))
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.errno and error.filename in (None, os.fspath(temporary)):
            error.filename = os.fspath(path)  # a full disk names no file
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "nt":  # cannot open a folder, and need not
        return
    folder = os.open(path.parent, os.O_RDONLY)  # the new name itself is only safe once the folder is on the disk
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _set_mode(path: Path, mode: int) -> None:
    with suppress(OSError):  # file systems without modes, such as FAT and some network drives
        path.chmod(mode)


def write_text(path: str | Path, text: str) -> None:
    """Replace the text file `path`."""
    with replaced(path) as temporary:
        # names of files need not be text
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")


def require(where: str, data: object, keys: Iterable[str] = ()) -> dict[str, Any]:
    """Return `data` if it is an object with `keys`; `where` names it in the error."""
    if not isinstance(data, dict):
        raise RecastError(f"{where} must be a JSON object, got {type(data).__name__}")
    if missing := [key for key in keys if key not in data]:
        raise RecastError(f"{where} lacks {', '.join(missing)}")
    return data
