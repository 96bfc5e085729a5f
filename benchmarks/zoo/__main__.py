"""Every convnet of timm and torchvision, recast and compared with its parent: a row each, resumed where it was stopped.

    PYTHONPATH=benchmarks python -m zoo                    # writes results/zoo.csv; all 1,500 take hours
    PYTHONPATH=benchmarks python -m zoo 'timm:resnet*' --out resnets.csv

The last stage, then everything within 600 tokens, in both forms of the layer, with a control that must show, and with
random open heads. `zoo.rows.ZooRow` says what the columns are. Exit code 1 if an architecture is not recast exactly.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from zoo.architectures import architectures
from zoo.rows import EXACT, NOTHING, ZooRow, read_zoo, summary, write_zoo
from zoo.walk import walk


def show(row: ZooRow) -> None:
    """Print one line on stderr."""
    print(row.model, row.status, row.cause, f"{row.seconds:.0f} s", file=sys.stderr, flush=True)


def main() -> int:
    """Walk, print what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", default=["timm:*", "torchvision:*"], help="globs of names")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "results" / "zoo.csv")
    parser.add_argument("--workers", type=int, default=2, help="networks at a time, one process of one thread each")
    parser.add_argument("--memory", type=float, default=20.0, help="GiB that they may need together")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one network")
    parser.add_argument("--again", help="run rows of this status again, or all")
    options = parser.parse_args()
    names = architectures(options.patterns)
    if options.again is not None and options.out.exists():
        rows = read_zoo(options.out)
        write_zoo(
            options.out, [row for row in rows if row.model not in names or options.again not in (row.status, "all")]
        )
    limits = {"workers": options.workers, "memory": int(options.memory * 2**30), "timeout": options.timeout}
    rows = walk(names, options.out, **limits, done=show)
    write_zoo(options.out, read_zoo(options.out))
    print(summary(rows))
    return 0 if all(row.status in (*EXACT, *NOTHING) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
