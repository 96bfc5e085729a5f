"""Does recasting help? The papers' claims as studies with power, on CIFAR.

    RECAST_DATA=DIR python studies/evidence --out runs/evidence              # everything, one run per core
    RECAST_DATA=DIR python studies/evidence --out runs/evidence --study a-cifar100-cifar10-4000 b-controls
    RECAST_DATA=DIR python studies/evidence --out runs/evidence --collect    # only the tables in results/

Needs $RECAST_DATA/{cifar10,cifar100}/{train,test}.zip, classes.txt beside them, and $RECAST_DATA/weights. Finished runs
are skipped, so the same command continues where it was stopped. Records of runs are also packed beside the tables
(evidence_runs/), and the command continues from there if --out is missing. `--device cuda` keeps the images on the GPU,
trains in bf16 and lets `--workers` runs share the GPU. After `nvidia-cuda-mps-control -d` they share it twice as fast:
12 runs made 200 steps a second on an H200, 6 without it 100.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from archives import pack, unpack
from claims import all_claims
from csv_files import RESULTS, read, write
from run import Setup, load_images, run_all
from studies import Job, Study, studies
from tables import differences, updated


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="\n".join(__doc__.splitlines()[1:]))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; continues where it was stopped")
    parser.add_argument("--study", nargs="+", choices=list(studies()), default=list(studies()))
    parser.add_argument("--arms", nargs="+", help="run only these arms")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, help="runs at a time; default: one per core, or 8 on a GPU")
    parser.add_argument("--few", type=int, default=1000, help="test images that are corrupted and attacked")
    parser.add_argument("--updates", type=int, help="number of updates, for a rehearsal")
    parser.add_argument("--num-train", type=int, help="number of training images, for a rehearsal")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--collect", action="store_true", help="only write the tables")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the tables")
    options = parser.parse_args()
    if "RECAST_DATA" not in os.environ and not options.collect:
        parser.error("RECAST_DATA must name the folder of cifar10/, cifar100/ and weights/")
    options.workers = options.workers or (8 if options.device == "cuda" else os.cpu_count() or 1)
    return options


def best_rates(study: Study, arm: str, out: Path) -> dict[str, float]:
    """Return the rates of the arm's trial with the best top-1 on the held-out images."""
    trials = study.trials(study.rates_of.get(arm, arm))
    best = max(trials, key=lambda job: json.loads((out / job.folder / "result.json").read_text())["held_out_top1"])
    return {"lr": best.lr, "gate_lr": best.gate_lr}


def batches(study: Study, every: dict[str, Study], options: argparse.Namespace) -> Iterator[list[Job]]:
    """Yield jobs that run one batch after the other: parents, trials, and final runs with the rates of the trials."""
    if study.needs is not None:
        yield from batches(every[study.needs], every, options)
    arms = [arm for arm in study.arms if options.arms is None or arm in options.arms]
    if not study.pairs:  # parents are not compared
        yield [study.job(arm, seed=seed) for seed in range(options.seeds) for arm in study.arms]
        return
    tuned_on = every[study.tuned_on] if study.tuned_on else study
    yield [job for arm in dict.fromkeys(study.rates_of.get(arm, arm) for arm in arms) for job in tuned_on.trials(arm)]
    rates = {}
    if not study.rates_fixed:
        rates = {arm: best_rates(tuned_on, study.rates_of.get(arm, arm), options.out) for arm in arms}
    yield [study.job(arm, seed=seed, **rates.get(arm, {})) for seed in range(options.seeds) for arm in arms]


def main() -> None:
    """Choose rates, run the jobs and write the tables."""
    options = parse()
    # freed memory is kept: attention asks for the same tens of MB each step, and touching them anew costs a fifth
    os.environ |= {"MALLOC_TRIM_THRESHOLD_": str(2**34), "MALLOC_MMAP_THRESHOLD_": str(2**34)}
    rehearsal = {name: value for name in ("updates", "num_train") if (value := getattr(options, name))}
    every = {name: replace(study, base=replace(study.base, **rehearsal)) for name, study in studies().items()}
    for name in every:
        unpack(options.results, name, options.out)
    for name in () if options.collect else options.study:
        setup = Setup(Path(os.environ["RECAST_DATA"]), options.out, options.few, options.device)
        load_images(every[name].base.data, setup._replace(device="cpu"))  # makes the corrupted images once
        for jobs in batches(every[name], every, options):
            run_all(jobs, setup, options.workers)
    for name in every:
        pack(options.results, name, options.out)
    tables = differences(options.out, [every[name] for name in options.study])
    paths = [options.results / f"evidence{part}.csv" for part in ("", "_differences")]
    for path, rows in zip(paths, tables, strict=True):
        if rows:
            write(path, updated(read(path), rows))
    if claims := all_claims(options.results):
        write(options.results / "evidence_claims.csv", claims)


if __name__ == "__main__":
    main()
