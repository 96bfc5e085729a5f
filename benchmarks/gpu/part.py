"""A part's command line, its precision, and its CSV that grows by one unit of work at a time.

A call that is stopped loses one unit; the next call continues after it.
"""

from __future__ import annotations

import argparse
import csv
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from recast.lab.folder.tables import write_rows
from recast.tracing.hooks import full_precision

HEADER = ("unit", "arm", "quantity", "value", "limit", "state", "note")
"""unit: WHAT/CASE/…, measured together; limit: the largest value that passes, empty if there is none."""
UNFINISHED = 75
"""Exit status of a part whose time ran out before its units did."""

Row = dict[str, Any]
Unit = tuple[str, Callable[[], Sequence[Row]]]


def row(arm: str, quantity: str, value: float | str, limit: float | None = None, note: str = "") -> Row:
    """Return a measured value; with a limit it passes or fails (NaN fails)."""
    state = "passed" if limit is None or (not isinstance(value, str) and value <= limit) else "failed"
    text = value if isinstance(value, str) else f"{value:.4g}"
    limit_text = "" if limit is None else f"{limit:g}"
    return dict(zip(HEADER[1:], (arm, quantity, text, limit_text, state, note), strict=True))


def read(path: Path) -> list[dict[str, str]]:
    """Return the complete rows of a file, [] if it is missing. Raises ValueError for other columns."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != HEADER:
            raise ValueError(f"{path} has other columns than {','.join(HEADER)}: give another --out")
        return [values for values in reader if values["note"] is not None]


def carry_out(path: Path, units: Iterable[Unit], seconds: float, recover: Callable[[], None]) -> int:
    """Measure the units that have not passed yet, at most `seconds`; return the exit status of the part.

    A unit that raises is a failed row. `recover` is called then, and raises if nothing more can be measured.
    """
    until = time.monotonic() + seconds
    rows = read(path)
    failed = {values["unit"] for values in rows if values["state"] == "failed"}
    passed = [values for values in rows if values["unit"] not in failed]
    write_rows(path, HEADER, [[*values.values()] for values in passed])
    done, status = {values["unit"] for values in passed}, 0
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, HEADER, lineterminator="\n")
        for name, measure in units:
            if name in done:
                continue
            if time.monotonic() > until:
                return status or UNFINISHED
            is_broken = False
            try:
                measured = list(measure())
            except Exception as error:
                text = " ".join(f"{type(error).__name__}: {error}".split())
                measured, is_broken = [{**row("", "error", "", note=text[:300]), "state": "failed"}], True
            writer.writerows({"unit": name, **values} for values in measured)
            file.flush()
            failures = [values for values in measured if values["state"] == "failed"]
            print(f"{name}: {len(measured)} rows", *(f"  FAILED {[*v.values()]}" for v in failures), sep="\n")
            status = status or int(bool(failures))
            if is_broken:
                recover()
    return status


@contextmanager
def precision(name: str) -> Iterator[None]:
    """Compute fp32 products and convolutions as "ieee" or "tf32", by deterministic algorithms."""
    deterministic, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, True
    try:
        with full_precision():  # restores both at the end
            torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = name
            yield
    finally:
        torch.backends.cudnn.deterministic = deterministic


def start(units: Callable[[torch.device, bool], Iterator[Unit]]) -> int:
    """Measure the units of a part; return its exit status."""
    parser = argparse.ArgumentParser(description="a part of benchmarks/gpu, which calls it")
    parser.add_argument("file", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("device", type=torch.device)
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "Using padding='same' with even kernel")
    torch.set_num_threads(1 if options.toy else os.cpu_count() or 1)

    def recover() -> None:
        if options.device.type == "cuda":
            torch.cuda.synchronize()  # raises if a kernel left the GPU unusable for this process
            torch.cuda.empty_cache()

    return carry_out(options.file, units(options.device, options.toy), options.seconds, recover)
