"""`recast zoo`: recast and verify architectures of timm and torchvision, one row each."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from recast.fields import Count, Positive
from recast.files import check_place
from recast.lab.cli.help import Command
from recast.lab.cli.options import OutputOptions, Words, parse, print_json

if TYPE_CHECKING:
    from recast.lab.zoo.rows import ZooRow

EXAMPLES = """  recast zoo 'timm:resnet*' --out resnets.csv
  recast zoo --workers 2 --out results/zoo.csv          (all 1,500: hours; Ctrl-C, and the same command goes on)
  recast zoo 'torchvision:*' --again failed --out results/zoo.csv
"""


ABOUT = """Recast architectures of timm and torchvision with random weights and compare each with its parent: the last
stage, then everything within 600 tokens; in both forms of the layer; with a control that must show, and
with random open heads. One row per architecture is appended to a CSV file; what has a row is not run again."""


@dataclass
class ZooOptions(OutputOptions):
    """What `recast zoo` is asked for."""

    WORDS: ClassVar[Words] = {"patterns": "*"}
    patterns: list[str] = field(default_factory=lambda: ["timm:*", "torchvision:*"])
    """globs of names"""
    out: str = "zoo.csv"
    """table of rows, resumed where it exists"""
    workers: Count = 1
    """networks at a time, one process of one thread each"""
    memory: Positive = 20.0
    """GiB that they may need together"""
    timeout: Positive = 1800.0
    """seconds for one network"""
    again: str | None = None
    """run rows of this status again, or all"""


def run(argv: Sequence[str]) -> int:
    """Walk, print what came out; 1 if an architecture is not recast exactly."""
    options = parse(Command("zoo", "[GLOB ...] [options]", ABOUT, EXAMPLES), ZooOptions(), argv)
    out = Path(options.out)
    check_place(out, "--out", "zoo.csv")

    from recast.lab.zoo.architectures import architectures
    from recast.lab.zoo.rows import EXACT, NOTHING, read_zoo, summary, write_zoo
    from recast.lab.zoo.walk import walk

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
        print_json([{name: "" if value is None else value for name, value in asdict(row).items()} for row in rows])
    else:
        print(summary(rows))
    return 0 if all(row.status in (*EXACT, *NOTHING) for row in rows) else 1


def _progress(names: list[str], out: Path) -> Callable[[ZooRow], None]:
    """Writes one line on stderr per finished architecture."""
    from recast.lab.zoo.rows import read_zoo

    known = {row.model for row in read_zoo(out)} if out.exists() else set()
    number = itertools.count(len(known & set(names)) + 1)

    def tell(row: ZooRow) -> None:
        cause = f" ({row.cause})" if row.cause else ""
        text = f"{next(number)}/{len(names)}  {row.model}  {row.status}{cause}  {row.seconds:.0f} s"
        print(text, file=sys.stderr, flush=True)

    return tell
