"""Bounded reading of foreign files. Imports no torch.

Only regular files are opened, and no more is read than a file of its kind holds.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from zipfile import ZipFile, ZipInfo

from recast.errors import RecastError

MIB = 2**20
LARGEST = 256 * MIB
"""Bytes of a text file: more than the longest metrics.jsonl or table."""
MOST = 4
"""Times the size of a large file that it may have unpacked: pictures and weights hardly compress."""


def read_bytes(path: str | Path, limit: int = LARGEST) -> bytes:
    """Read a regular file of at most `limit` bytes.

    Raises FileNotFoundError, and RecastError for a larger or unreadable file, a pipe, a device or a loop of links.
    """
    try:
        check_file(path)
        with open(path, "rb") as file:
            content = file.read(limit + 1)  # what /proc holds has no size until it is read
    except (FileNotFoundError, RecastError):
        raise
    except (OSError, ValueError) as error:  # a name with a null in it
        raise RecastError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > limit:
        raise RecastError(f"cannot read {path}: it is larger than {limit // 1024:,} KiB, more than such a file holds")
    return content


def check_unpacked(size: int, packed: int = 0) -> None:
    """Raise RecastError for content of more bytes than `LARGEST` and than `MOST` times those of its file (`packed`)."""
    if size > max(LARGEST, MOST * packed):
        raise RecastError(f"unpacked it is larger than {LARGEST // MIB} MiB")


def check_member(archive: ZipFile, member: ZipInfo) -> None:
    """Raise RecastError for a file in a zip as `check_unpacked` does."""
    check_unpacked(member.file_size, min(member.compress_size, archive.start_dir))


def check_archive(archive: ZipFile) -> None:
    """Raise RecastError for all files of a zip together as `check_unpacked` does."""
    check_unpacked(sum(member.file_size for member in archive.infolist()), archive.start_dir)


def check_file(path: str | Path) -> None:
    """Raise FileNotFoundError, and RecastError for a folder, a pipe or a device."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise RecastError(f"cannot read {path}: it is a folder, a pipe or a device, expected a file")


def decode(content: bytes, path: str | Path) -> str:
    """Decode UTF-8 to text with `\\n` at the ends of lines. Raises RecastError, naming the file, for other bytes."""
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise RecastError(f"cannot read {path}: no text in UTF-8 ({error.reason} at byte {error.start})") from None
