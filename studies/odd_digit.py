"""The quickstart over several seeds: scores of the arms, and of the recast one without each part of attention.

    for seed in 0 1 2; do recast quickstart --seed $seed --out runs/odd-$seed; done   # 3 minutes each
    python studies/odd_digit.py runs/odd-0 runs/odd-1 runs/odd-2                    # writes results/odd_digit.csv

Columns: arm, metric, then the value of every seed, and mean, low_95 and high_95 over them (Student's t; for a single
run over its images). Arms: parent, finetuned, recast, on clean, attacked and corrupted images; `recast − finetuned`,
paired by seed; and the recast network, without further training, with uniform content maps (W_key = 0: a global mean)
and without content (γ = 0), on clean images; `heads awake` of 4. odd_digit_nine.csv is of the former default, nine
heads with Gaussians and 5 epochs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from evidence.csv_files import read, write
from price import RESULTS

import recast
from recast.lab.data import load_data
from recast.lab.recipe import load_recipe
from recast.lab.records import Row, Wakefulness
from recast.lab.statistics import mean_interval
from recast.lab.tables import read_records
from recast.lab.training.metrics import read_metrics
from recast.layers.cmhsa import gated_layers
from recast.models.build import build

METRICS = (("clean", "top1"), ("fgsm", "top1@1"), ("pgd", "top1@1"), ("basic", "top1/mean"))
ABLATIONS = {"uniform maps": "key", "no content": "gamma"}
GAIN = "recast − finetuned"


@torch.no_grad()
def ablated(run: Path) -> dict[str, float]:
    """Return the top-1 on clean images without each part."""
    recipe = load_recipe(run / "recipe.yaml")
    data = load_data(recipe.data)
    pixels, labels = data.val.batch(range(len(data.val)))
    images = data.normalised(pixels, torch.device("cpu"))
    scores = {}
    for name, parameter in ABLATIONS.items():
        model = recast.load(run / "weights.safetensors", parent=build(recipe.model, num_classes=len(data.classes)))
        for layer in gated_layers(model).values():
            getattr(layer, parameter).zero_()
        model.eval()
        answers = torch.cat([model(part).argmax(1) for part in images.split(250)])
        scores[f"recast, {name}"] = 100 * float((answers == labels).float().mean())
    return scores


def main() -> None:
    """Read the runs, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    runs = parser.parse_args().runs
    values: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        scores = {(row.model, row.suite, row.metric): row.value for row in read_records(run / "rows.csv", Row)}
        for suite, metric in METRICS:
            metric_scores = {arm: scores[arm, suite, metric] for arm in ("parent", "finetuned", "recast")}
            metric_scores[GAIN] = metric_scores["recast"] - metric_scores["finetuned"]
            for arm, score in metric_scores.items():
                values.setdefault((arm, f"{suite} {metric}"), []).append(score)
        for arm, top1 in ablated(run).items():
            values.setdefault((arm, "clean top1"), []).append(top1)
        attention = Wakefulness.of(read_metrics(run / "metrics.jsonl")[-1]["layers"])
        assert attention is not None
        values.setdefault(("recast", "heads awake"), []).append(attention.awake)
    header = ["arm", "metric", *(run.name for run in runs), "mean", "low_95", "high_95"]
    rows = [
        dict(zip(header, [*key, *(round(value, 3) for value in (*seeds, *mean_interval(seeds)))], strict=True))
        for key, seeds in values.items()
    ]
    if len(runs) == 1:  # the interval over the images, only for differences
        pairs = [r for r in read(runs[0] / "differences.csv") if (r["model"], r["against"]) == ("recast", "finetuned")]
        intervals = {f"{r['suite']} {r['metric']}": (r["low"], r["high"]) for r in pairs}
        for row in rows:
            low, high = intervals.get(row["metric"], ("", "")) if row["arm"] == GAIN else ("", "")
            row |= {"low_95": low and round(float(low), 3), "high_95": high and round(float(high), 3)}
    write(RESULTS / "odd_digit.csv", rows)


if __name__ == "__main__":
    main()
