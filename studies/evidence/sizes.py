"""Add top-1 at other test sizes (T-CNN's Fig. 7) to the finished runs of a study, as metrics that `--collect` compares.

RECAST_DATA=DIR python studies/evidence/sizes.py --out runs/evidence --study m-converged-56 --sizes 40 48
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import numpy as np
import torch
from images import read
from measure import correct
from networks import parent_of, plan_for
from safetensors.torch import load_model
from studies import Job

import recast


def main() -> None:
    """Measure every finished run of the study at every size that its record lacks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs, with their weights")
    parser.add_argument("--study", required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=[40, 48], help="sides in pixels, enlarged from 32")
    options = parser.parse_args()
    root = Path(os.environ["RECAST_DATA"])
    torch.set_num_threads(1)
    for file in sorted((options.out / options.study).glob("*/result.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        scores, job = dict(np.load(file.parent / "right.npz")), Job(**record["job"])
        sizes = [size for size in options.sizes if f"size {size}" not in scores]
        if job.tuning or not sizes:
            continue
        model = parent_of(job, options.out, root).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if (plan := plan_for(job, model)) is not None:
            recast.recast_(model.network, plan)
        load_model(model, str(file.parent / "weights.safetensors"))
        model.eval()
        _, test = read(root / job.data)
        for size in sizes:
            model.size = size
            scores[f"size {size}"] = correct(model, test).numpy()
            record["scores"][f"size {size}"] = round(100 * float(scores[f"size {size}"].mean()), 3)
        np.savez_compressed(file.parent / "right.npz", **scores)
        file.write_text(json.dumps(record), encoding="utf-8")
        print(file.parent.name, record["scores"], flush=True)


if __name__ == "__main__":
    main()
