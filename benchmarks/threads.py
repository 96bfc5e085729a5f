"""Images per second of the quickstart's training beside busy processes: torch's own threads, fixed numbers, automatic.

    python benchmarks/threads.py                  # writes results/threads.csv; six minutes, on a machine that is idle
    python benchmarks/threads.py --seconds 5 --neighbours 2 --out /tmp/threads.csv

The recast network of `recast quickstart` (batches of 64). A cell is a process of its own that trains for --seconds
after its first step.
`settled` is the speed of the second half of the steps. The neighbours compute without pause and end by themselves.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

BUSY = "import sys, time\nend = time.time() + float(sys.argv[1])\nwhile time.time() < end: sum(range(10_000))"
STARTING = 100.0
"""Seconds a cell may take besides its training."""
STEPS = 3
"""A cell takes more steps than these, however long they are."""
COLUMNS = ("neighbours", "threads", "images_s", "settled_images_s", "threads_at_end")


class Enough(Exception):
    """The time of a cell is over."""


def cell(mode: str, seconds: float) -> None:
    """Train for so long; print images per second, of all steps and of the second half, and the threads at the end."""
    from recast.lab.threads import use_threads

    if mode != "default":
        use_threads(None if mode == "automatic" else int(mode))
    import torch

    from recast.lab.data import load_data
    from recast.lab.recipes import make_recipe
    from recast.lab.training.loop import fit
    from recast.models.build import build
    from recast.surgery.apply import recast_
    from recast.surgery.planning import plan

    recipe, ends = make_recipe("odd_digit"), list[float]()
    data, model = load_data(recipe.data, recipe.augment), build(recipe.model, num_classes=10)

    def on_step(*_: object) -> None:
        ends.append(time.perf_counter())
        if ends[-1] - ends[0] > seconds and len(ends) > STEPS:
            raise Enough

    model = recast_(model, plan(model, data.val[0][0][None]))
    try:
        with tempfile.TemporaryDirectory() as folder:
            fit(model, data, recipe, folder, progress=False, on_step=on_step)
    except Enough:
        pass
    late = ends[len(ends) // 2 :]
    speeds = (recipe.data.batch_size * (len(part) - 1) / (part[-1] - part[0]) for part in (ends, late))
    print("cell", *(f"{speed:.1f}" for speed in speeds), torch.get_num_threads(), sep=",")


def measured(neighbours: int, mode: str, seconds: float) -> Sequence[str]:
    """Run a cell beside that many busy processes."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    busy = [subprocess.Popen([sys.executable, "-c", BUSY, str(seconds + STARTING)]) for _ in range(neighbours)]
    try:
        command = [sys.executable, __file__, "--cell", mode, "--seconds", str(seconds)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    return done.stdout.split("cell,")[1].strip().split(",")


def main() -> None:
    """Measure every cell, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "results" / "threads.csv")
    parser.add_argument("--cell")
    options = parser.parse_args()
    if options.cell:
        return cell(options.cell, options.seconds)
    modes = ("default", *sorted({"1", str(os.cpu_count())}), "automatic")
    rows = []
    for neighbours in options.neighbours:
        for mode in modes:
            rows.append([neighbours, mode, *measured(neighbours, mode, options.seconds)])
            print(*rows[-1], sep="  ", flush=True)
    with options.out.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    return None


if __name__ == "__main__":
    main()
