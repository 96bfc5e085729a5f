"""Are the plan's numbers true? Parameters, MACs and activation memory as planned, against the recast model at work.

    OMP_NUM_THREADS=1 python benchmarks/estimates.py             # writes results/estimates.csv

Ten networks with random weights: the parent (`none`), the last stage (in the form that `auto` chooses, and in
`dense`), and all layers within 1024 tokens. A process each. The plan's example is one image, its numbers are per image.
MACs are in millions, bytes in MiB, all per image but planned_fixed_mib.

planned_*            `plan.after` (the parent: `plan.before`); B images keep planned_fixed_mib + B * planned_mib
params_exact         the parameters of the recast model are as many as planned
macs_b1, _b4         torch's FlopCounterMode in a real forward of the recast model in eval mode, 1 and 4 images
macs_error           macs_b1 over planned, minus 1
saved_b1, _b4        bytes that autograd keeps in that forward (`recast.tracing.cost.saved_sizes`), 1 and 4 images
memory_error_b1, _b4 saved over planned for that batch, minus 1
kept                 resident memory after the forward of a training step of 8 images, above that before the step
peak                 largest resident memory within that step, backward included, above that before the step
kept_ratio, peak_ratio   both over planned for 8 images: 1 where the estimate is the truth

Before the step the process has made one like it: weights, gradients and oneDNN's buffers are there already. Blocks of
64 KiB and more go back to the system when they are freed (MALLOC_MMAP_THRESHOLD_), so resident memory is live memory.
Linux only (/proc/self/clear_refs).
"""

from __future__ import annotations

import csv
import gc
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

RESULT = Path(__file__).parents[1] / "results" / "estimates.csv"
NETWORKS = (
    "resnet18", "resnet50", "resnext50_32x4d", "convnext_tiny", "efficientnet_b0", "tf_efficientnet_b0", "regnety_004",
    "densenet121", "eca_nfnet_l0", "torchvision:mobilenet_v3_small",
)  # fmt: skip
SELECTIONS = ("none", "last_stage", "last_stage dense", "all")
SIZE = (160, 192)
BATCH = 8
MIB = 2**20
HEADER = (
    "network", "size", "selection", "recast", "params_exact", "planned_macs", "macs_b1", "macs_b4", "macs_error",
    "planned_mib", "planned_fixed_mib", "saved_b1", "saved_b4", "memory_error_b1", "memory_error_b4", "kept", "peak",
    "kept_ratio", "peak_ratio", "seconds",
)  # fmt: skip


def resident(field: str = "VmRSS") -> int:
    """Bytes of resident memory now, or at most (`VmHWM`)."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def forward_cost(model: nn.Module, x: Tensor) -> tuple[float, float]:
    """MACs and bytes kept for backward of a real forward in eval mode, per image; attention as in training."""
    from torch.utils.flop_counter import FlopCounterMode

    from recast.layers.gpsa import gpsa_layers
    from recast.tracing.cost import saved_sizes

    model.eval()
    for layer in gpsa_layers(model).values():
        layer.train()  # in eval its closed heads would be known, and the form another
    with FlopCounterMode(display=False) as flops, saved_sizes(model) as sizes:
        model(x)
    return flops.get_total_flops() / 2 / len(x), sum(sizes) / len(x)


def training_step(model: nn.Module, x: Tensor) -> int:
    """A forward and a backward; returns the resident bytes in between."""
    loss = model(x).square().mean()
    between = resident()
    loss.backward()
    return between


def training_memory(model: nn.Module, x: Tensor) -> tuple[float, float]:
    """Bytes after the forward, and at most within a training step, above those before it, per image."""
    model.train()
    training_step(model, x)
    gc.collect()
    base = resident()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM := VmRSS
    between = training_step(model, x)
    return (between - base) / len(x), (resident("VmHWM") - base) / len(x)


def job(name: str, selection: str) -> None:
    """Plan, recast and measure; print the row as JSON."""
    import torch

    from recast.models.build import build
    from recast.run.config import ModelConfig, RecastConfig
    from recast.surgery.apply import recast_
    from recast.surgery.planning import plan

    torch.manual_seed(0)
    torch.set_num_threads(1)
    started = time.perf_counter()
    model = build(ModelConfig(name))
    x = torch.randn(BATCH, 3, *SIZE)
    where = "all" if selection == "all" else "last_stage"
    planned = plan(model, x[:1], RecastConfig(backend="dense" if "dense" in selection else "auto"), where=where)
    cost, layers = planned.before, 0
    if selection != "none":
        model, cost, layers = recast_(model, planned), planned.after, len(planned.steps)
    exact = sum(p.numel() for p in model.parameters()) == cost.parameters
    (macs_1, saved_1), (macs_4, saved_4) = forward_cost(model, x[:1].clone()), forward_cost(model, x[:4].clone())
    kept, peak = training_memory(model, x)
    each, fixed = cost.activation_bytes, cost.fixed_bytes
    expected = each + fixed / BATCH
    row = (
        name, f"{SIZE[0]}x{SIZE[1]}", selection, layers, exact,
        *(f"{m / 1e6:.1f}" for m in (cost.macs, macs_1, macs_4)), f"{macs_1 / cost.macs - 1:.2%}",
        *(f"{m / MIB:.1f}" for m in (each, fixed, saved_1, saved_4)),
        f"{saved_1 / (each + fixed) - 1:.1%}", f"{saved_4 / (each + fixed / 4) - 1:.1%}",
        *(f"{m / MIB:.1f}" for m in (kept, peak)), f"{kept / expected:.2f}", f"{peak / expected:.2f}",
        f"{time.perf_counter() - started:.0f}",
    )  # fmt: skip
    print(json.dumps(row))


def main() -> None:
    """Every job by itself, one at a time."""
    RESULT.parent.mkdir(exist_ok=True)
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    with RESULT.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        for name in NETWORKS:
            for selection in SELECTIONS:
                command = [sys.executable, __file__, name, selection]
                output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
                row = json.loads(output.splitlines()[-1])
                writer.writerow(row)
                file.flush()
                print(*row, flush=True)


if __name__ == "__main__":
    job(*sys.argv[1:]) if len(sys.argv) > 1 else main()
