"""Does recasting help? The papers' claims as studies with power, on CIFAR.

    RECAST_DATA=DIR python benchmarks/evidence --out runs/evidence              # everything, a run a core
    RECAST_DATA=DIR python benchmarks/evidence --out runs/evidence --study a-cifar100-cifar10-4000
    RECAST_DATA=DIR python benchmarks/evidence --out runs/evidence --collect    # only the tables in results/

Needs $RECAST_DATA/{cifar10,cifar100}/{train,test}.zip and $RECAST_DATA/weights. What is finished is left alone, so the
same command goes on where it was stopped. `--scale gpu` keeps the images on the GPU, computes in bf16 and lets
`--workers` runs share it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import torch
from images import read, split
from job import Job, run
from measure import Data, corrupted, few_of
from studies import STUDIES, Study
from tables import collect, write


@cache
def images(root: Path, name: str, out: Path, num_few: int, device: str) -> Data:
    """The images of a study, read once by a process."""
    train, held_out = split(read(root / name, "train"))
    test = read(root / name, "test")
    few = few_of(test, num_few)
    sets = corrupted(few, out / "corrupted" / name)
    target = torch.device(device)
    moved = {kind: part.to(target) for kind, part in sets.items()}
    return Data(train.to(target), held_out.to(target), test.to(target), few.to(target), moved)


def work(job: Job, out: Path, root: Path, num_few: int, device: str) -> str:
    """One run, in a process of its own."""
    torch.set_num_threads(1)
    folder = run(job, out, root, images(root, job.data, out, num_few, device), torch.device(device))
    result = json.loads((folder / "result.json").read_text())
    found = result.get("scores", {"held out": result.get("held_out_top1")})
    return f"{job.folder}: {found}, {result['seconds']:.0f} s"


def carry_out(jobs: Iterable[Job], options: argparse.Namespace, root: Path) -> None:
    """The jobs that are not finished, `--workers` at a time."""
    waiting = [job for job in jobs if not (options.out / job.folder / "result.json").is_file()]
    context = get_context("spawn")
    with ProcessPoolExecutor(min(options.workers, max(1, len(waiting))), mp_context=context) as pool:
        going = [pool.submit(work, job, options.out, root, options.few, options.device) for job in waiting]
        for future in going:
            print(future.result(), flush=True)


def chosen(study: Study, arm: str, out: Path) -> Job:
    """The trial with the best top-1 on the held-out images."""
    trials = study.trials(arm)
    found = [json.loads((out / job.folder / "result.json").read_text())["held_out_top1"] for job in trials]
    return trials[found.index(max(found))]


def main() -> None:
    """Choose rates, run, collect."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="\n".join(__doc__.splitlines()[1:]))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; goes on where it was stopped")
    parser.add_argument("--scale", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--study", nargs="+", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--arms", nargs="+", help="only these arms")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, help="runs at a time; default: a core each, or 6 on a GPU")
    parser.add_argument("--few", type=int, default=1000, help="test images that are corrupted and attacked")
    parser.add_argument("--updates", type=int, help="another number of updates, for a rehearsal")
    parser.add_argument("--collect", action="store_true", help="only the tables")
    options = parser.parse_args()
    root = Path(os.environ["RECAST_DATA"])
    options.device = "cuda" if options.scale == "gpu" else "cpu"
    options.workers = options.workers or (6 if options.scale == "gpu" else os.cpu_count() or 1)
    rows, differences = [], []
    for name in options.study:
        study = STUDIES[name]
        if options.updates:
            study = replace(study, base=replace(study.base, updates=options.updates))
        arms = [arm for arm in study.arms if options.arms is None or arm in options.arms]
        if not options.collect:
            images(root, study.base.data, options.out, options.few, "cpu")  # the corrupted images are made once
            carry_out((job for arm in arms for job in study.trials(arm)), options, root)
            finals = [study.finals(arm, range(options.seeds), chosen(study, arm, options.out)) for arm in arms]
            carry_out((job for of_seed in zip(*finals, strict=True) for job in of_seed), options, root)
        found = collect(options.out, name, study.control)
        rows += found[0]
        differences += found[1]
    if rows:
        print(write("evidence.csv", rows))
    if differences:
        print(write("evidence_differences.csv", differences))


if __name__ == "__main__":
    main()
