"""What the experiments of T-CNN* and PRS give at the smallest scale: their `_small` recipes, run to the end.

    RECAST_DATA=DIR python studies/small_recipes.py --out runs/small --seeds 0 1 2    # continues where it was stopped

Writes results/small_recipes.csv, a row per recipe and seed: top-1 of the last epoch on the 2,500 test images and on the
5,000 training images, heads with attention and how many are awake (`recast.awake`), seconds of the processor; and
results/small_recipes_differences.csv, the differences of `QUESTIONS` over the seeds that both recipes have. The control
arm that most recipes train is left out (--no-control): tcnn_cnn_small and prs_interpolation_300_0_small are that
network. Spectra (Fig. 3) are studied with other runs (evidence, d).

Stated before the first run. By the rule of every page (evidence/rule.py) a claim of these papers is about networks
that have converged: below 95 % of the training images it is "too short", and with fewer than half of the heads awake in
some run "asleep", whatever the difference. 20 to 30 epochs of 5,000 images are likely to be too short; the runs then
say what a user of the recipe gets, and decide nothing about the papers.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from evidence.csv_files import RESULTS, append, has_row, read, write
from evidence.rule import ASLEEP, TOO_SHORT, TRAINED, is_awake
from price import columns, correct, store, stored, top1

from recast.lab.evaluation.intervals import POINTS, interval
from recast.lab.folder.records import Wakefulness
from recast.lab.open import open_run
from recast.lab.training.metrics import read_metrics

TCNN = ("tcnn_cnn", "tcnn_star_300", "tcnn_star_200", "tcnn_star_100", "tcnn_hybrid")
PRS = ("prs_cmhsa3", "cmhsa3", "prs_reversed", "prs_cmhsa5", "cmhsa5")
BETWEEN = tuple(f"prs_interpolation_{epochs}" for epochs in ("300_0", "250_50", "150_150", "50_250"))
QUESTIONS = (
    ("T-CNN, Table 2: recast at 100 of 400 epochs beats the plain network", "tcnn_star_100", "tcnn_cnn"),
    ("T-CNN, Table 2: … beats the hybrid from scratch", "tcnn_star_100", "tcnn_hybrid"),
    ("T-CNN, Table 2: … beats recasting at 300", "tcnn_star_100", "tcnn_star_300"),
    ("T-CNN, Table 2: recast at 200 beats the plain network", "tcnn_star_200", "tcnn_cnn"),
    ("PRS, Table 3: layer by layer beats two stages", "prs_cmhsa3", "cmhsa3"),
    ("ours: the last layer first beats the first layer first", "prs_cmhsa3", "prs_reversed"),
    ("PRS, Table 3: with a 5×5 kernel two stages are better than with 3×3", "cmhsa5", "cmhsa3"),
)


def run(name: str, seed: int, out: Path) -> dict[str, Any]:
    """Train a recipe, or go on; return its row and store which test images were right."""
    folder = out / f"{name}_{seed}"
    words = ["train", f"{name}_small", "--seed", str(seed), "--no-control", "--resume", "auto", "--out", str(folder)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([sys.executable, "-m", "recast", *words], check=True)
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    opened = open_run(folder)
    model = opened.models["recast" if "recast" in opened.models else "finetuned"].eval()
    parts: Any = (opened.data.val, opened.data.train)
    with torch.no_grad():
        images = (opened.data.normalised(part.pixels, torch.device("cpu")) for part in parts)
        hits, seen = (correct(model, pixels, part.labels) for pixels, part in zip(images, parts, strict=True))
    store(out / f"right_{name}_{seed}.npy", hits)
    epochs = read_metrics(folder / "metrics.jsonl")
    awake = Wakefulness.of(epochs[-1]["layers"])
    row = {"recipe": f"{name}_small", "seed": seed, "epochs": epochs[-1]["epoch"], "top1": top1(hits)}
    row |= {"train": top1(seen), "heads": awake.heads if awake else "", "awake": awake.awake if awake else ""}
    return row | {"seconds": f"{seconds:.0f}"}


def differences(runs: list[dict[str, Any]], out: Path) -> list[dict[str, Any]]:
    """Return a row for each question whose recipes share two seeds."""
    rows, of = [], {(row["recipe"].removesuffix("_small"), row["seed"]): row for row in runs}
    for question, arm, against in QUESTIONS:
        seeds = [seed for name, seed in of if name == arm and (against, seed) in of]
        if len(seeds) < 2:
            continue
        ours, theirs = (stored(out / f"right_{name}", seeds, 2500) for name in (arm, against))
        pairs = [of[name, seed] for seed in seeds for name in (arm, against)]
        asleep = any(row["heads"] and not is_awake(int(row["awake"]), int(row["heads"])) for row in pairs)
        short = any(float(row["train"]) < TRAINED for row in pairs)
        verdict = ASLEEP if asleep else TOO_SHORT if short else "see interval"
        row = {"question": question, "arm": arm, "against": against, "seeds": len(seeds), "verdict": verdict}
        rows.append(row | columns("difference", interval(100 * (ours - theirs), POINTS)))
    return rows


def main() -> None:
    """Run what the table lacks, seed by seed, and write both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", default=(*TCNN, *PRS, *BETWEEN), help="recipes, without _small")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "small_recipes.csv"
    for seed in options.seeds:
        for name in options.only:
            if not has_row(path, recipe=f"{name}_small", seed=seed):
                append(path, run(name, seed, options.out))
    runs = read(path)
    write(RESULTS / "small_recipes.csv", runs)
    if rows := differences(runs, options.out):
        write(RESULTS / "small_recipes_differences.csv", rows)


if __name__ == "__main__":
    main()
