"""Write σ(λ) and 1/α of every head of a study's finished runs with the sigmoid gate (T-CNN's Fig. 4B, 4C and 5).

python studies/evidence/gates.py --out runs/evidence --study l-converged-long
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from csv_files import RESULTS, write
from safetensors.torch import load_file
from torch import sigmoid

from recast.layers.functional.operands import softplus


def main() -> None:
    """Write gates_sigmoid.csv. Heads are in the order of the kernel's taps: 5 of 9 is the centre."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs, with their weights")
    parser.add_argument("--study", required=True)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the table")
    options = parser.parse_args()
    rows = []
    for file in sorted((options.out / options.study).glob("*/weights.safetensors")):
        job = json.loads(file.with_name("result.json").read_text(encoding="utf-8"))["job"]
        run, weights = {name: job[name] for name in ("study", "arm", "seed")}, load_file(file)
        for layer in sorted(name.removesuffix(".lam") for name in weights if name.endswith(".lam")):
            spans = 1 / softplus(weights[f"{layer}.raw_alpha"])
            for head, (lam, span) in enumerate(zip(weights[f"{layer}.lam"], spans, strict=True), 1):
                place = {**run, "layer": layer.removeprefix("network."), "head": head}
                rows.append({**place, "sigma": round(float(sigmoid(lam)), 4), "inverse_alpha": round(float(span), 4)})
    write(options.results / "gates_sigmoid.csv", rows)


if __name__ == "__main__":
    main()
