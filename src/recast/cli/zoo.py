"""`recast zoo`: recast and verify architectures of timm and torchvision, one row each."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from recast.cli.options import new_parser, parse, print_json
from recast.errors import RecastError

if TYPE_CHECKING:
    from recast.zoo.examine import ZooRow

EXAMPLES = """  recast zoo 'timm:resnet*' --out resnets.csv
  recast zoo --workers 2 --out results/zoo.csv          (all 1,500: hours; Ctrl-C, and the same command goes on)
  recast zoo 'torchvision:*' --again failed --out results/zoo.csv
"""


def run(argv: Sequence[str]) -> int:
    """Walk, print what came out; 1 if an architecture is not recast exactly."""
    parser = new_parser(
        "zoo",
        "[GLOB ...] [options]",
        "Recast architectures of timm and torchvision with random weights and compare each with its parent: the last\n"
        "stage, then everything within 600 tokens; in both forms of the layer; with a control that must show, and\n"
        "with random open heads. One row per architecture is appended to a CSV file; what has a row is not run again.",
        EXAMPLES,
    )
    parser.add_argument("patterns", type=str, nargs="*", default=["timm:*", "torchvision:*"], help="globs of names")
    parser.add_argument("--out", type=str, default="zoo.csv", help="table of rows, resumed where it exists")
    parser.add_argument("--workers", type=int, default=1, help="networks at a time, one process of one thread each")
    parser.add_argument("--memory", type=float, default=20.0, help="GiB that they may need together")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one network")
    parser.add_argument("--again", type=str | None, default=None, help="run rows of this status again, or all")
    parser.add_argument("--json", type=bool, default=False, help="machine-readable output")
    options = parser.instantiate(parse(parser, argv))
    if options.workers < 1 or options.memory <= 0 or options.timeout <= 0:
        raise RecastError("--workers, --memory and --timeout must be positive")
    out = Path(options.out)
    if not out.parent.is_dir():
        raise RecastError(f"the folder of --out does not exist: {out.parent}")

    from recast.zoo.subjects import architectures
    from recast.zoo.summary import EXACT, NOTHING, summary
    from recast.zoo.walk import read_zoo, walk, write_zoo

    names = architectures(options.patterns)
    if out.exists():
        known = read_zoo(out)
        if options.again is not None:
            again = {row.model for row in known if row.model in names and options.again in (row.status, "all")}
            write_zoo(out, [row for row in known if row.model not in again])
    try:
        rows = walk(
            names, out, workers=options.workers, memory=int(options.memory * 2**30), timeout=options.timeout,
            done=_progress(names, out),
        )  # fmt: skip
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted: {out} holds the rows so far; the same command goes on") from None
    write_zoo(out, read_zoo(out))
    if options.json:
        print_json([dataclasses.asdict(row) for row in rows])
    else:
        print(summary(rows))
    return 0 if all(row.status in (*EXACT, *NOTHING) for row in rows) else 1


def _progress(names: list[str], out: Path) -> _Lines:
    from recast.zoo.walk import read_zoo

    known = {row.model for row in read_zoo(out)} if out.exists() else set()
    return _Lines(len(names), len(known & set(names)))


class _Lines:
    """One line on stderr per finished architecture."""

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done = total, done

    def __call__(self, row: ZooRow) -> None:
        self.done += 1
        cause = f" ({row.cause})" if row.cause else ""
        text = f"{self.done}/{self.total}  {row.model}  {row.status}{cause}  {row.seconds:.0f} s"
        print(text, file=sys.stderr, flush=True)
