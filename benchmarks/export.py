"""Recast networks exported to ONNX and to torch.export: how far from the module, and how fast.

    python benchmarks/export.py [NETWORK …]        # writes results/export.csv, rows it has stay

Random weights with telling scales; the last stage is recast, a third of its heads opened in both maps ("closed": none,
folded). `any_size`: height and width are free in the file. `error`: largest relative error of the file's outputs over 1
and 3 images of two sizes. `over_module`, `over_parent`: median time of a pass of the file on 2 images over the module's
and the parent's, by turns. `seconds`: export and checks (those of patchconvnet_s60 count pauses of a shared
machine). `parent_error`: that of the parent alone, in ONNX.
"""

from __future__ import annotations

import copy
import csv
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import timm
import torch
from timing import RESULTS, by_turns, machine, ratio, write
from torch import nn

import recast
import recast.papers.networks
from recast.exporting import SUFFIX, open_program
from recast.lab.scales import randomize_scales_
from recast.layers.cmhsa import recast_layers
from recast.layers.config import PAPERS_LAYER

assert recast.papers.networks  # registers networks
SIZE, ROUNDS = 96, 9
NETWORKS: dict[str, dict[str, Any]] = {
    "resnet50": {},
    "resnet50, closed": {},
    "resnetrs50, stride removed": {"stride": "remove"},
    "convnext_tiny": {},
    "efficientnet_b0": {},
    "patchconvnet_s60": {},
    "cmhsa_vit_3_cifar": {"gate": "bias"},
    "resnet50, pooled single": {"pool": False},
    "resnet50, pooled per class": {"pool": True},
}
RESULT = RESULTS / "export.csv"


@torch.no_grad()
def open_heads(model: nn.Module) -> None:
    """A third of the heads of every layer, in both maps; queries and keys that look at content."""
    for layer in recast_layers(model).values():
        layer.key.normal_(0, 0.1)
        if isinstance(layer, recast.GPSA):
            layer.gamma[::3] = 0.3
            layer.spread[::3] = 0.3


def networks(name: str) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """Parent, recast network, images."""
    torch.manual_seed(0)
    kind, options = name.partition(",")[0], dict(NETWORKS[name])
    images = torch.randn(2, 3, SIZE, SIZE)
    parent = timm.create_model(kind, num_classes=100).eval()
    randomize_scales_(parent, images)
    child, pool = copy.deepcopy(parent), options.pop("pool", None)
    if pool is not None:
        return parent, recast.attention_pool_(child, per_class=pool).eval(), images
    child = recast.recast_(child, recast.plan(child, images, recast.RecastConfig(**PAPERS_LAYER, **options))).eval()
    if "closed" in name:
        recast.fold_(child)
    else:
        open_heads(child)
    return parent, child.eval(), images


def measure(name: str, to: Any, folder: str) -> dict[str, Any]:
    """One row."""
    parent, child, images = networks(name)
    started = time.perf_counter()
    found = recast.export(child, images, Path(folder) / f"child{SUFFIX[to]}", tol=float("inf"))
    seconds = time.perf_counter() - started
    program = open_program(found.path, to)
    arms = {"file": lambda: program(images), "module": lambda: child(images), "parent": lambda: parent(images)}
    with torch.no_grad():
        times = by_turns(arms, ROUNDS)
    alone = None
    if to == "onnx":
        alone = recast.export(parent, images, Path(folder) / "parent.onnx", tol=float("inf"))
    return {
        "network": name,
        "to": to,
        "size": SIZE,
        "any_size": found.any_size,
        "error": f"{max(check.error for check in found.checks):.1e}",
        "parent_error": "" if alone is None else f"{max(check.error for check in alone.checks):.1e}",
        "over_module": round(ratio(times["file"], times["module"]), 2),
        "over_parent": round(ratio(times["file"], times["parent"]), 2),
        "module_over_parent": round(ratio(times["module"], times["parent"]), 2),
        "seconds": round(seconds, 1),
        "machine": machine(),
    }


def main() -> None:
    """Rows that are missing."""
    rows: list[dict[str, Any]] = []
    if RESULT.exists():
        with RESULT.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    known = {(row["network"], row["to"]) for row in rows}
    with TemporaryDirectory() as folder:
        for name in sys.argv[1:] or NETWORKS:
            for to in SUFFIX:
                if (name, to) not in known:
                    rows.append(measure(name, to, folder))
                    print({key: value for key, value in rows[-1].items() if key != "machine"}, flush=True)
                    write(RESULT, rows)


if __name__ == "__main__":
    main()
