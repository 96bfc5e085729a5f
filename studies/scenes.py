"""Does global attention help where a class is told by something far away? The embedded scenes, by kind of relation.

On PYTHONPATH: benchmarks/.

    OMP_NUM_THREADS=1 python studies/scenes.py --out runs/scenes                  # segmentation
    OMP_NUM_THREADS=1 python studies/scenes.py --out runs/scenes --task detect --epochs 24 16

Of every seed a network learns the scenes from random weights (the parent), then goes on learning as it is (fine-tuned)
and with its last stage recast, both by the recipe `segment` or `detect`, the same images in the same order. On the 200
held-out scenes: the metric over all classes, and over the local and the distant ones (recast.lab.tasks.scenes);
also of the recast network, not trained again, with uniform content maps (W_key = 0: a global mean), without content
(γ = 0) and without Gaussians (s = 0).

results/scenes.csv               of every arm and seed with its 95 % interval over the images, of seeds `mean` with
                                 Student's over them; `updates` of the arms, and `heads awake` of n
results/scenes_differences.csv   paired: of a seed over the images, `mean` over the seeds; smallest is half the
                                 interval, less than which would not have been told from nothing

A run that is finished, or whose rows stand in the tables, is left alone; one that was cut off goes on.
"""

from __future__ import annotations

import argparse
import copy
import csv
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from odd_digit import WITHOUT
from timing import RESULTS, machine, write_table

import recast
from recast.analysis.records import Wakefulness
from recast.lab.evaluation import evaluate
from recast.lab.evaluation.run_folder import evaluate_run, open_run
from recast.lab.recipes import make_recipe
from recast.lab.records import Row
from recast.lab.statistics import mean_interval
from recast.lab.tasks import task_of
from recast.lab.tasks.scenes import KINDS
from recast.lab.training.metrics import read_metrics
from recast.lab.training.run import train
from recast.layers.gpsa import gpsa_layers

HEAD = ["task", "arm", "seed", "metric", "value", "low_95", "high_95", "n", "machine"]
PAIRED = ["task", "arm", "against", "seed", "metric", "difference", "low_95", "high_95", "smallest", "n"]
Rows = list[list[Any]]


def arms(options: argparse.Namespace, seed: int) -> Path:
    """The run folder of a seed, trained."""
    recipe = make_recipe(options.task).replace(device="cpu", seed=seed)
    out, before = (options.out / f"{options.task}-{part}{seed}" for part in ("", "parent-"))
    weights = before / "weights.safetensors"
    model = recipe.model.replace(checkpoint=str(weights.resolve()))
    first = recipe.replace(where=["none"], control=False, epochs=options.epochs[0])
    for path, wanted in ((before, first), (out, recipe.replace(model=model, epochs=options.epochs[1]))):
        train(wanted, path, resume=(path / "recipe.yaml").is_file(), progress=False, say=print)
    return Path(out)


def ablated(out: Path, suite: str) -> list[Row]:
    """Of the recast network without each part of attention."""
    run, models = open_run(out), {}
    for name, parameter in WITHOUT.items():
        model = models[f"recast, {name}"] = copy.deepcopy(run.models["recast"])
        with torch.no_grad():
            for layer in gpsa_layers(model).values():
                getattr(layer, parameter).zero_()
        recast.refresh_gates_(model.eval())
    return evaluate(models, suite, run.data, progress=False)


def measure(options: argparse.Namespace, seed: int) -> tuple[Rows, Rows]:
    """Rows of both tables."""
    out, (suite, metric) = arms(options, seed), task_of(make_recipe(options.task)).main
    found, wanted = evaluate_run(out, [suite], progress=False), [metric, *(f"{metric}@{kind}" for kind in KINDS)]
    rows: Rows = [
        [options.task, row.model, seed, row.metric, row.value, row.low, row.high, row.n, machine()]
        for row in (*found.rows, *ablated(out, suite))
        if row.metric in wanted
    ]
    awake = Wakefulness.of(read_metrics(out / "metrics.jsonl")[-1]["layers"])
    assert awake is not None
    rows.append([options.task, "recast", seed, "heads awake", awake.awake, "", "", awake.heads, ""])
    recipe = make_recipe(options.task)
    updates = options.epochs[1] * (1000 // recipe.data.batch_size)
    rows.append([options.task, "recast", seed, "updates", updates, "", "", "", ""])
    paired: Rows = [
        [options.task, d.model, d.against, seed, d.metric, d.value, d.low, d.high, (d.high - d.low) / 2, d.n]
        for d in found.differences
        if d.metric in wanted
    ]
    return rows, paired


def kept(path: Path) -> Rows:
    """The rows of single seeds that stand in a table."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    return [row for row in rows if row[head.index("seed")] != "mean"]


def over_seeds(rows: Rows, seed: int, value: int) -> Rows:
    """The mean of every kind of row over its seeds; `seed` and `value` are the places of these columns."""
    groups: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for row in rows:
        if row[value + 1] != "":
            groups[(*row[:seed], "mean", *row[seed + 1 : value])].append(float(row[value]))
    found: Rows = []
    for key, values in groups.items():
        if len(values) > 1:
            mean, low, high = mean_interval(values)
            half = [(high - low) / 2] if value == PAIRED.index("difference") else []
            found.append([*key, mean, low, high, *half, len(values)] + [""] * (not half))
    return found


def rounded(rows: Rows) -> Rows:
    return [[round(cell, 3) if isinstance(cell, float) else cell for cell in row] for row in rows]


def main() -> None:
    """Train and measure seed by seed; the tables are written anew after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/scenes"))
    parser.add_argument("--results", type=Path, default=RESULTS, help="where tables go")
    parser.add_argument("--task", choices=("segment", "detect"), default="segment")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, nargs=2, default=[24, 16], help="of the parent; of the arms")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tables = options.results / "scenes.csv", options.results / "scenes_differences.csv"
    rows, paired = map(kept, tables)
    for seed in options.seeds:
        if any(row[0] == options.task and row[2] == str(seed) for row in rows):
            continue
        more = measure(options, seed)
        rows, paired = rows + rounded(more[0]), paired + rounded(more[1])
        write_table(tables[0], HEAD, rows + rounded(over_seeds(rows, 2, 4)))
        write_table(tables[1], PAIRED, paired + rounded(over_seeds(paired, 3, 5)))


if __name__ == "__main__":
    main()
