"""What plan + recast_ + verify of a ResNet-50 costs, beside one forward pass of the parent: seconds and peak memory.

    python benchmarks/footprint.py            # writes results/footprint.csv

Each job runs in a process of its own. Peak memory is the process's largest resident size above what it had after its
imports, the model's own weights included. Two threads, batch of 8 images of 224×224, random weights.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

RESULT = Path(__file__).parents[1] / "results" / "footprint.csv"
REPEATS = 3
BATCH = 8


def job(name: str) -> None:
    """Run one job and print its seconds and peak memory as JSON."""
    import timm
    import torch

    import recast
    from recast.surgery.apply import recast_
    from recast.surgery.planning import plan
    from recast.surgery.verify import trace, verify

    assert recast.__version__
    torch.set_num_threads(2)
    imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = timm.create_model("resnet50").eval()
    images = torch.randn(BATCH, 3, 224, 224)
    started = time.perf_counter()
    if name == "forward":
        with torch.no_grad():
            model(images)
    else:
        planned = plan(model, images)
        before = trace(model, planned, images)
        exactness = verify(before, recast_(model, planned), images)
        assert exactness.bitwise, exactness
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - imported
    print(json.dumps({"seconds": round(seconds, 3), "peak_mib": round(peak / 1024, 1)}))


def main() -> None:
    """Both jobs by turns, the medians to the file."""
    found: dict[str, list[dict[str, float]]] = {"forward": [], "plan_recast_verify": []}
    for _ in range(REPEATS):
        for name, results in found.items():
            output = subprocess.run([sys.executable, __file__, name], check=True, capture_output=True, text=True).stdout
            results.append(json.loads(output.splitlines()[-1]))
    RESULT.parent.mkdir(exist_ok=True)
    with RESULT.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["job", "batch", "seconds", "peak_mib", "repeats", "machine"])
        machine = f"{platform.machine()} {os.cpu_count()} cores"
        for name, results in found.items():
            medians = [sorted(r[key] for r in results)[REPEATS // 2] for key in ("seconds", "peak_mib")]
            writer.writerow([name, BATCH, *medians, REPEATS, machine])
            print(name, *medians)


if __name__ == "__main__":
    job(sys.argv[1]) if len(sys.argv) > 1 else main()
