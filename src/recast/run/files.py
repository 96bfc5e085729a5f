"""Files of a run folder: atomic writes, and reading that names the file in every error. Imports no torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recast.errors import RecastError
from recast.run.reading import LARGEST, decode, parse_json, read_bytes


@contextmanager
def replaced(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; what the block wrote there is flushed to the disk and takes `path`'s name.

    If the block or the disk fails, the temporary file is removed and `path` is as it was.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # two writers never share one
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # as the user's umask has it: safetensors makes files that only the owner reads
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "nt":  # cannot open a folder, and need not
        return
    folder = os.open(path.parent, os.O_RDONLY)  # the new name itself is only safe once the folder is on the disk
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_text(path: str | Path, text: str) -> None:
    """Replace the text file `path`."""
    with replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: str | Path, content: Mapping[str, Any] | list[Any]) -> None:
    """Replace the JSON file `path`."""
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False, default=str) + "\n")


def read_text(path: str | Path, limit: int = LARGEST) -> str:
    """The text of a file, without a byte order mark. Raises RecastError for a file that is missing or no text."""
    try:
        return decode(read_bytes(path, limit), path)
    except FileNotFoundError:
        raise RecastError(f"{path} is missing: {Path(path).parent} is not a complete run folder") from None


def read_json(path: Path, *keys: str) -> dict[str, Any]:
    """The JSON object in a file, which has these keys."""
    return require(str(path), parse_json(read_text(path), path), keys)


def read_names(path: Path) -> list[str]:
    """The JSON list of texts in a file."""
    found = parse_json(read_text(path), path)
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise RecastError(f"{path} must be a JSON list of names")
    return found


def require(where: str, found: object, keys: Iterable[str] = ()) -> dict[str, Any]:
    """`found` as an object that holds `keys`; `where` names it in the error."""
    if not isinstance(found, dict):
        raise RecastError(f"{where} must be a JSON object, got {type(found).__name__}")
    if missing := [key for key in keys if key not in found]:
        raise RecastError(f"{where} lacks {', '.join(missing)}")
    return found


def number(value: object) -> float:
    """A float, NaN for what is not a number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
