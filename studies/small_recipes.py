"""What the `_small` recipes of T-CNN* and PRS give, run to the end, and parts of other recipes on tiny networks.

    RECAST_DATA=DIR python studies/small_recipes.py --out runs/small --seeds 0 1 2    # continues where it was stopped

Writes results/small_recipes.csv, a row per arm and seed: top-1 of the last epoch on the test images (2,500 of
CIFAR-100; parts: 5,000 of CIFAR-10) and on the training images, heads with attention and how many are awake
(`recast.awake`), seconds of the processor; evidence/claims.py has the verdicts. The control arm that most recipes train
is left out (--no-control): tcnn_cnn_small and prs_interpolation_300_0_small are that network. Spectra (Fig. 3) are
studied with other runs (evidence, d).

Stated before the first run. By the rule of every page (evidence/rule.py) a claim of these papers is about networks
that have converged: below 95 % of the training images it is "too short", and with fewer than half of the heads awake in
some run "asleep", whatever the difference. 20 to 30 epochs of 5,000 images are likely to be too short, and so are ten
of 4,000 for the parts; the runs then say what a user of the recipe gets, and decide nothing about the papers.
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
from trainings import correct, top1

from recast.lab.folder.records import Wakefulness
from recast.lab.open import open_run
from recast.lab.training.metrics import read_metrics

TCNN = ("tcnn_cnn", "tcnn_star_300", "tcnn_star_200", "tcnn_star_100", "tcnn_hybrid")
PRS = ("prs_cmhsa3", "cmhsa3", "prs_reversed", "prs_cmhsa5", "cmhsa5")
BETWEEN = tuple(f"prs_interpolation_{epochs}" for epochs in ("300_0", "250_50", "150_150", "50_250"))
SHORT = (
    "--no-pretrained --data cifar10 --batch-size 64 --base-batch 64 --epochs 10 --warmup-epochs 1 --lr 5e-4 "
    "--crop pad --crop-pct 1 --amp off --workers 0 --opt adamw --weight-decay 0.05 "
)
"""Parts of recipes, trained as in docs/studies/recipe.md."""
PLAIN = SHORT + "--num-train 4000 --repeats 1 --auto-augment null --mixup 0 --cutmix 0 --erasing 0 --color-jitter 0 "
"""Augmented by crop and flip alone."""
AT_32 = "--img-size 32 --input-size 32 --kwargs embed_dim=96 "
DEIT = f"deit_tiny {SHORT} --num-train 16000 {AT_32} depth=6 num_heads=3 patch_size=4"
MIXERS = {"matrix": "p8", "none": "none", "mlp": "mlp", "conv": "conv"}
"""Mixing of patches → the network that has it; its patches become 4 pixels."""
ARMS = (
    {f"{name}_small": f"{name}_small --no-control" for name in (*TCNN, *PRS, *BETWEEN)}
    | {
        f"resmlp mixed by {mixer}": f"resmlp_12 {PLAIN} --model resmlp_12_{name} {AT_32} num_blocks=6 patch_size=4"
        for mixer, name in MIXERS.items()
    }
    | {
        f"patchconvnet_s60{part}": f"patchconvnet_s60{part} {PLAIN} --img-size 128 --kwargs embed_dim=96 depth=6"
        for part in ("", "_linear_stem", "_multi")
    }
    | {f"deit repeats {count}": f"{DEIT} --repeats {count}" for count in (1, 3)}
    | {
        f"deit depth {depth}{name}": f"deit_tiny {PLAIN} {AT_32} depth={depth} num_heads=3 patch_size=8 {kwargs}"
        for depth in (36, 48)
        for name, kwargs in (("", ""), (" LayerScale", "init_values=1e-6"))
    }
)
"""Name of an arm → the words after `recast train`."""


def run(arm: str, seed: int, out: Path) -> dict[str, Any]:
    """Train an arm, or go on; return its row."""
    folder = out / f"{arm.replace(' ', '_')}_{seed}"
    words = ["train", *ARMS[arm].split(), "--seed", str(seed), "--resume", "auto", "--out", str(folder)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([sys.executable, "-m", "recast", *words], check=True)
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    opened = open_run(folder)
    model = opened.models["recast" if "recast" in opened.models else "finetuned"].eval()
    parts: Any = (opened.data.val, opened.data.train)
    with torch.no_grad():
        images = (opened.data.normalised(part.pixels, torch.device("cpu")) for part in parts)
        hits, seen = (correct(model, pixels, part.labels) for pixels, part in zip(images, parts, strict=True))
    epochs = read_metrics(folder / "metrics.jsonl")
    awake = Wakefulness.of(epochs[-1]["layers"])
    row = {"recipe": arm, "seed": seed, "epochs": epochs[-1]["epoch"], "top1": top1(hits)}
    row |= {"train": top1(seen), "heads": awake.heads if awake else "", "awake": awake.awake if awake else ""}
    return row | {"seconds": f"{seconds:.0f}"}


def main() -> None:
    """Run what the table lacks, seed by seed, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", default=ARMS, choices=ARMS, help="arms")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "small_recipes.csv"
    for seed in options.seeds:
        for arm in options.only:
            if not has_row(path, recipe=arm, seed=seed):
                append(path, run(arm, seed, options.out))
    write(RESULTS / "small_recipes.csv", read(path))


if __name__ == "__main__":
    main()
