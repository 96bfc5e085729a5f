"""Files that are either the old ones or whole new ones, whatever happens while they are written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
    _flush_folder(path.parent)


def write_text(path: str | Path, text: str) -> None:
    """Replace the text file `path`."""
    with replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _flush_folder(folder: Path) -> None:
    """The new name itself is only safe once the folder is on the disk; Windows cannot open a folder and needs not."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
