"""Every convnet of timm and torchvision, recast and compared with its parent; continues where it was stopped.

    PYTHONPATH=benchmarks python -m zoo                    # writes results/zoo.csv; all 1,500 take hours
    PYTHONPATH=benchmarks python -m zoo 'timm:resnet*' --out resnets.csv

The last stage, then everything within 600 tokens, in both forms of the layer, with a control that must change the
outputs, and with random open heads. `zoo.rows.ZooRow` describes the columns. Exit code 1 if an architecture is not
recast exactly.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from recast.errors import RecastError
from zoo.architectures import architectures
from zoo.rows import EXACT, NOTHING, ZooRow, read_zoo, summary, write_zoo
from zoo.walk import walk


def show(row: ZooRow) -> None:
    print(row.model, row.status, row.cause, f"{row.seconds:.0f} s", file=sys.stderr, flush=True)


def main() -> int:
    """Walk and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", default=["timm:*", "torchvision:*"], help="globs of names")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "results" / "zoo.csv")
    parser.add_argument("--workers", type=int, default=2, help="networks at a time, each in a process with one thread")
    options = parser.parse_args()
    try:
        rows = walk(architectures(options.patterns), options.out, workers=options.workers, done=show)
    except RecastError as error:
        parser.error(str(error))
    write_zoo(options.out, read_zoo(options.out))
    print(summary(rows))
    return 0 if all(row.status in (*EXACT, *NOTHING) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
