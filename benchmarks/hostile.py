"""Hostile files, command lines, pictures and calls: a thousand and more of them, damaged at random. How do they end?

    python benchmarks/hostile.py                          # writes results/hostile.csv; half an hour on one core
    python benchmarks/hostile.py --seed 2 --scale 50      # other cases, and more of them
    python benchmarks/hostile.py --only 'resume' --keep F # those whose kind or name has the word; their folders below F

A case ends well with exit code 0 and nothing wrong, or with exit code 2, one clear line and everything as it was. What
was tried stands in --out and is not tried again: after a change of the code, name another file. The cases and what is
held against them are those of tests/hostile, which tries a sample of them. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "hostile")]

import torch  # noqa: E402
from cases import SAMPLE, SEED, all_cases, expect, judge  # noqa: E402
from judging import FAULTS  # noqa: E402
from timing import RESULTS, write_table  # noqa: E402
from world import import_all, make_world  # noqa: E402

RESULT = RESULTS / "hostile.csv"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=int, default=25, help="cases of a kind, or a few times as many")
    parser.add_argument("--seed", type=int, default=SEED + 1)
    parser.add_argument("--only", default="", help="only those whose kind or name has this word")
    parser.add_argument("--out", type=Path, default=None, help="what was tried, a case a line")
    parser.add_argument("--table", type=Path, default=RESULT)
    parser.add_argument("--keep", type=Path, default=None, help="keep the folders of the cases here")
    parser.add_argument("--sample", action="store_true", help="those that are tests")
    options = parser.parse_args()
    if options.sample:
        options.scale, options.seed = SAMPLE, SEED
    torch.set_num_threads(1)
    import_all()
    with tempfile.TemporaryDirectory() as scratch:
        world = Path(scratch)
        if (child := os.fork()) == 0:  # a process that has trained cannot have children that train
            make_world(world)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, "the world could not be made"
        expect(world)
        cases = all_cases(options.scale, options.seed, world)
        random.Random(options.seed).shuffle(cases)  # what was tried until it is stopped is of all kinds
        done = _done(options.out)
        for number, case in enumerate(cases):
            key = f"{options.seed}-{options.scale}-{case.kind}: {case.name}"
            if key in done or options.only not in key:
                continue
            keep = None if options.keep is None else options.keep / f"{number}"
            result, found = judge(case, world, keep)
            done[key] = {
                "kind": case.kind, "code": result.code, "seconds": round(result.seconds, 2), "faults": found,
                "command": f"benchmarks/hostile.py --scale {options.scale} --seed {options.seed}",
            }  # fmt: skip
            if options.out is not None:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"case": key, **done[key]}) + "\n")
            if found:
                print(f"{number} {case.kind}: {case.name}\n  {case.command[:200]}\n  {json.dumps(found)}", flush=True)
            elif options.keep is not None:
                print(f"{number} {case.kind}: {case.name}: {result.code} {result.err}{result.out[:300]}", flush=True)
    rows = _rows(done.values())
    if not options.only:
        write_table(options.table, list(rows[0]), (row.values() for row in rows))
    print(rows[-1])
    return int(any(one["faults"] for one in done.values()))


def _done(path: Path | None) -> dict[str, dict[str, Any]]:
    lines = path.read_text("utf-8").splitlines() if path is not None and path.is_file() else []
    return {one.pop("case"): one for one in map(json.loads, lines)}


def _rows(done: Iterable[dict[str, Any]]) -> list[dict[str, object]]:
    """A row a kind, and one of all."""
    by_kind = defaultdict(list)
    for one in done:
        by_kind[one["kind"]].append(one)
        by_kind["all"].append(one)
    by_kind["all"] = by_kind.pop("all")
    return [
        {
            "kind": kind,
            "tried": len(found),
            "ended_well": sum(not one["faults"] for one in found),
            **{fault: sum(fault in one["faults"] for one in found) for fault in FAULTS},
            "refused": sum(one["code"] == 2 for one in found),
            "slowest_seconds": max(one["seconds"] for one in found),
            "command": "; ".join(sorted({one["command"] for one in found})),
        }
        for kind, found in by_kind.items()
    ]


if __name__ == "__main__":
    begin = time.time()
    code = main()
    print(f"{time.time() - begin:.0f} s")
    sys.stdout.flush()
    os._exit(code)
