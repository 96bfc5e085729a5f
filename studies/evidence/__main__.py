"""Does recasting help? The papers' claims as studies with power, on CIFAR.

    RECAST_DATA=DIR python studies/evidence --out runs/evidence              # everything, a run a core
    RECAST_DATA=DIR python studies/evidence --out runs/evidence --study a-cifar100-cifar10-4000 b-controls
    RECAST_DATA=DIR python studies/evidence --out runs/evidence --collect    # only the tables in results/

Needs $RECAST_DATA/{cifar10,cifar100}/{train,test}.zip, classes.txt beside them, and $RECAST_DATA/weights. What is
finished is left alone, so the same command goes on where it was stopped; records of runs are also packed beside the
tables (evidence_runs/), and the command goes on from there where --out is gone. `--scale gpu` keeps the images on the
GPU, computes in bf16, takes larger networks and more updates, and lets `--workers` runs share the GPU. After
`nvidia-cuda-mps-control -d` they share it twice as fast: 12 runs made 200 steps a second on an H200, 6 without it 100.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from claims import judged
from job import Job
from kept import pack, read, unpack, update, write
from studies import Study, studies
from tables import RESULTS, differences
from workers import carry_out, images


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="\n".join(__doc__.splitlines()[1:]))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; goes on where it was stopped")
    parser.add_argument("--scale", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--study", nargs="+", choices=list(studies("cpu")), default=list(studies("cpu")))
    parser.add_argument("--arms", nargs="+", help="only these arms")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, help="runs at a time; default: a core each, or 8 on a GPU")
    parser.add_argument("--few", type=int, default=1000, help="test images that are corrupted and attacked")
    parser.add_argument("--num-test", type=int, help="only so many test images, for a rehearsal")
    parser.add_argument("--updates", type=int, help="another number of updates, for a rehearsal")
    parser.add_argument("--num-train", type=int, help="another number of images, for a rehearsal")
    parser.add_argument("--device", help="default: cuda with --scale gpu")
    parser.add_argument("--collect", action="store_true", help="only the tables")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the tables")
    options = parser.parse_args()
    options.device = options.device or ("cuda" if options.scale == "gpu" else "cpu")
    options.workers = options.workers or (8 if options.device == "cuda" else os.cpu_count() or 1)
    return options


def choice(tuned_on: Study, arm: str, out: Path) -> dict[str, float]:
    """The rates of the trial with the best top-1 on the held-out images."""
    trials = tuned_on.trials(tuned_on.rates_of.get(arm, arm))
    found = [json.loads((out / job.folder / "result.json").read_text())["held_out_top1"] for job in trials]
    best = trials[found.index(max(found))]
    return {"lr": best.lr, "gate_lr": best.gate_lr}


def jobs(study: Study, every: dict[str, Study], options: argparse.Namespace) -> Iterator[list[Job]]:
    """What is run one after the other: the parents, the trials, the final runs with the rates that they chose."""
    if study.needs is not None:
        yield from jobs(every[study.needs], every, options)
    arms = [arm for arm in study.arms if options.arms is None or arm in options.arms]
    if not study.pairs:  # parents are not compared
        yield [study.job(arm, seed=seed) for seed in range(options.seeds) for arm in study.arms]
        return
    tuned_on = every[study.tuned_on] if study.tuned_on else study
    owners = dict.fromkeys(study.rates_of.get(arm, arm) for arm in arms)
    yield [job for arm in owners for job in tuned_on.trials(arm)]
    chosen = () if study.rates_fixed else arms
    rates = {arm: choice(tuned_on, study.rates_of.get(arm, arm), options.out) for arm in chosen}
    yield [study.job(arm, seed=seed, **rates.get(arm, {})) for seed in range(options.seeds) for arm in arms]


def main() -> None:
    """Choose rates, run, collect."""
    options = parse()
    root = Path(os.environ["RECAST_DATA"])
    # freed memory is kept: attention asks for the same tens of MB each step, and touching them anew costs a fifth
    os.environ |= {"MALLOC_TRIM_THRESHOLD_": str(2**34), "MALLOC_MMAP_THRESHOLD_": str(2**34)}
    every = studies(options.scale)
    rehearsal = {"updates": options.updates, "num_train": options.num_train}
    rehearsal = {name: value for name, value in rehearsal.items() if value}
    every = {name: replace(study, base=replace(study.base, **rehearsal)) for name, study in every.items()}
    for name in every:
        unpack(options.results, name, options.out)
    for name in options.study:
        study = every[name]
        if not options.collect:
            go = partial(
                carry_out, out=options.out, root=root, few=options.few, num_test=options.num_test,
                device=options.device, workers=options.workers,
            )  # fmt: skip
            images(root, study.base.data, options.out, options.few, options.num_test, "cpu")  # corrupted images: once
            for batch in jobs(study, every, options):
                go(batch)
    for name in every:
        pack(options.results, name, options.out)
    tables = differences(options.out, [every[name] for name in options.study])
    paths = [options.results / f"evidence{part}.csv" for part in ("", "_differences", "_claims")]
    for path, table in zip(paths, tables, strict=False):
        if table:
            print(update(path, table))
    if claims := judged(*(read(path) for path in paths[:2]), every):
        print(write(paths[2], claims))


if __name__ == "__main__":
    main()
