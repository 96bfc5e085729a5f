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
from dataclasses import replace
from functools import partial
from pathlib import Path

from job import Job
from studies import STUDIES, Study
from tables import collect, write
from workers import carry_out, images


def chosen(tuned_on: Study, arm: str, out: Path) -> Job:
    """The trial with the best top-1 on the held-out images."""
    trials = tuned_on.trials(arm)
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
    # freed memory is kept: attention asks for the same tens of MB each step, and touching them anew costs a fifth
    os.environ |= {"MALLOC_TRIM_THRESHOLD_": str(2**34), "MALLOC_MMAP_THRESHOLD_": str(2**34)}
    rows, differences = [], []
    studies = STUDIES
    if options.updates:
        studies = {n: replace(s, base=replace(s.base, updates=options.updates)) for n, s in STUDIES.items()}
    for name in options.study:
        study = studies[name]
        arms = [arm for arm in study.arms if options.arms is None or arm in options.arms]
        if not options.collect:
            images(root, study.base.data, options.out, options.few, "cpu")  # the corrupted images are made once
            go = partial(
                carry_out, out=options.out, root=root, few=options.few, device=options.device, workers=options.workers
            )
            tuned_on = studies[study.tuned_on] if study.tuned_on else study
            go(job for arm in arms for job in tuned_on.trials(arm))
            finals = [study.finals(arm, range(options.seeds), chosen(tuned_on, arm, options.out)) for arm in arms]
            go(job for of_seed in zip(*finals, strict=True) for job in of_seed)
        found = collect(options.out, name, study.control)
        rows += found[0]
        differences += found[1]
    if rows:
        print(write("evidence.csv", rows))
    if differences:
        print(write("evidence_differences.csv", differences))


if __name__ == "__main__":
    main()
