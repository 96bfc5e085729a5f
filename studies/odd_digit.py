"""The quickstart over several seeds: what the arms reach, and what is left of it without each part of attention.

On PYTHONPATH: benchmarks/.

    for seed in 0 1 2; do recast quickstart --seed $seed --out runs/odd-$seed; done   # 3 minutes each
    python studies/odd_digit.py runs/odd-0 runs/odd-1 runs/odd-2                    # writes results/odd_digit.csv

Columns: arm, metric, then the value of every seed, and mean, low_95 and high_95 over them (Student's t; of a single run
over its images). Arms: parent,
finetuned, recast, on clean, attacked and corrupted images; `recast − finetuned`, paired by seed; and the recast
network, not trained again, with uniform content maps (W_key = 0: a global mean) and without content (γ = 0), on clean
images; `heads awake` of 4. odd_digit_nine.csv is of the former default, nine heads with Gaussians and 5 epochs.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import torch
from timing import RESULTS, write_table
from torchvision.transforms.v2.functional import normalize

import recast
from recast.lab.data import load_data
from recast.lab.recipe import load_recipe
from recast.lab.records import Row, Wakefulness
from recast.lab.statistics import mean_interval
from recast.lab.tables import read_records
from recast.lab.training.metrics import read_metrics
from recast.layers.gpsa import gpsa_layers
from recast.models.build import build

METRICS = (("clean", "top1"), ("fgsm", "top1@1"), ("pgd", "top1@1"), ("basic", "top1/mean"))
WITHOUT = {"uniform maps": "key", "no content": "gamma"}


@torch.no_grad()
def ablated(run: Path) -> dict[str, float]:
    """Top-1 on clean images without each part."""
    recipe = load_recipe(run / "recipe.yaml")
    data = load_data(recipe.data)
    pixels = torch.stack([torch.as_tensor(data.val[index][0]) for index in range(len(data.val))])
    images = normalize(pixels, list(data.mean), list(data.std))
    found = {}
    for name, parameter in WITHOUT.items():
        model = recast.load(run / "weights.safetensors", parent=build(recipe.model, num_classes=len(data.classes)))
        for layer in gpsa_layers(model).values():
            getattr(layer, parameter).zero_()
        recast.refresh_gates_(model.eval())
        answers = torch.cat([model(part).argmax(1) for part in images.split(250)])
        found[f"recast, {name}"] = 100 * float((answers == data.val.labels).float().mean())
    return found


def main() -> None:
    """Read the runs, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    runs = parser.parse_args().runs
    values: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        measured = {(row.model, row.suite, row.metric): row.value for row in read_records(run / "rows.csv", Row)}
        for suite, metric in METRICS:
            for arm in ("parent", "finetuned", "recast"):
                values.setdefault((arm, f"{suite} {metric}"), []).append(measured[arm, suite, metric])
            gain = measured["recast", suite, metric] - measured["finetuned", suite, metric]
            values.setdefault(("recast − finetuned", f"{suite} {metric}"), []).append(gain)
        for arm, top1 in ablated(run).items():
            values.setdefault((arm, "clean top1"), []).append(top1)
        attention = Wakefulness.of(read_metrics(run / "metrics.jsonl")[-1]["layers"])
        assert attention is not None
        values.setdefault(("recast", "heads awake"), []).append(attention.awake)
    header = ["arm", "metric", *(run.name for run in runs), "mean", "low_95", "high_95"]
    rows = [[*key, *(round(value, 3) for value in (*of, *mean_interval(of)))] for key, of in values.items()]
    if len(runs) == 1:  # the interval over the images, of the differences alone
        with (runs[0] / "differences.csv").open(encoding="utf-8") as file:
            pairs = [r for r in csv.DictReader(file) if (r["model"], r["against"]) == ("recast", "finetuned")]
        over = {f"{r['suite']} {r['metric']}": (r["low"], r["high"]) for r in pairs}
        for row in rows:
            is_known = row[0] == "recast − finetuned" and row[1] in over
            row[-2:] = [round(float(value), 3) for value in over[row[1]]] if is_known else ["", ""]
    write_table(RESULTS / "odd_digit.csv", header, rows)


if __name__ == "__main__":
    main()
