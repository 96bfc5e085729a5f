"""Files with a table of images: CSV, Parquet, and lines of PATH LABEL."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from recast.errors import RecastError, first_line, shown
from recast.lab.data.images import is_image_name
from recast.lab.folder.tables import Table, read_table
from recast.lab.plugins import optional_package
from recast.reading import check_file, check_unpacked, decode, read_bytes

_LINE = re.compile(r"(\S.*?\.\w+) +([^\s,;][^\t]*)")
"""PATH LABEL."""
_VECTOR = re.compile(r"list<.*(float|double)")
"""Type of a Parquet column that is not read: an embedding, which is neither path nor label."""
BATCH, POINTER = 256, 8
"""Rows of a Parquet file that are read at a time, and bytes of a cell without its value."""


def read_file(path: Path) -> Table:
    """Read a CSV or Parquet file, a folder of Parquet files, or lines of PATH LABEL.

    Raises RecastError for a file that is missing, cannot be read or unpacks to more than `check_unpacked` allows.
    """
    if path.suffix.lower() not in (".parquet", ".pq"):
        text = decode(read_bytes(path), path) if path.is_file() else None
        return (text and _read_list(path, text)) or read_table(path, text)
    return _read_parquet(path)


def _read_parquet(path: Path) -> Table:
    arrow = optional_package("pyarrow.dataset", "pyarrow", f"{path} requires pyarrow; a CSV file does not")
    if not path.exists():
        raise RecastError(f"no such file: {path}")
    if not path.is_dir():  # of parts, as Spark writes
        check_file(path)
    try:
        table = arrow.dataset(path, format="parquet", partitioning="hive")
        names, rows, size = table.schema.names, list[tuple[Any, ...]](), 0
        read = [field.name for field in table.schema if not _VECTOR.search(str(field.type))]
        groups = (part.metadata.row_group(i) for part in table.get_fragments() for i in range(len(part.row_groups)))
        chunks = (group.column(i) for group in groups for i in range(group.num_columns))
        check_unpacked(sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.partition(".")[0] in read))
        # a value that repeats is stored once: those sizes do not have it
        for batch in table.to_batches(columns=read, batch_size=BATCH, batch_readahead=0, fragment_readahead=0):
            columns = [c.dictionary_decode() if hasattr(c, "dictionary_decode") else c for c in batch.columns]
            size += sum(map(_size, columns))
            check_unpacked(size)
            cells = dict(zip(read, (column.to_pylist() for column in columns), strict=True))
            rows += zip(*(cells.get(name, [None] * len(batch)) for name in names), strict=True)
    except (OSError, ValueError) as error:
        cure = f"; keep fewer columns in it, or for images in it use --data hfds/{path.parent}"
        raise RecastError(f"cannot read {path}: {first_line(error)}{cure * ('unpacked' in str(error))}") from None
    return Table(path.stem, tuple(names), tuple(rows))


def _size(column: Any) -> int:
    """Return the bytes of a column of pyarrow as Python objects, with those in lists."""
    inner = getattr(column, "values", None)
    return int(column.nbytes + POINTER * len(column)) + (0 if inner is None else _size(inner))


def _read_list(path: Path, text: str) -> Table | None:
    """Read lines of PATH LABEL, also below two names of columns; None if the text is something else."""
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), start=1)]
    lines = [(number, line) for number, line in lines if line]
    header = ("path", "label")
    if (
        lines
        and not _pair(lines[0][1])
        and len(names := lines[0][1].split()) == 2
        and not re.search("[,;\t]", lines[0][1])
    ):
        header, lines = (names[0], names[1]), lines[1:]
    if not lines or not _pair(lines[0][1]):
        return None
    rows = [(number, line, _pair(line)) for number, line in lines]
    if wrong := [(number, line) for number, line, pair in rows if pair is None]:
        number, line = wrong[0]
        raise RecastError(f"{path} line {number}: expected PATH LABEL as in the first line, got {shown(line)}")
    return Table(path.stem, header, tuple(pair for _, _, pair in rows if pair))


def _pair(line: str) -> tuple[str, str] | None:
    """Return path and label of a line, which a blank separates; None if it does not start with an image."""
    match = _LINE.fullmatch(line)
    return (match[1], match[2]) if match and is_image_name(match[1]) else None
