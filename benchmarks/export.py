"""Recast networks exported to ONNX and to torch.export: distance to the module, and speed.

    python benchmarks/export.py [NETWORK …]        # writes results/export.csv; existing rows stay

Random weights with random scales. The last stage is recast and a third of its heads is open in both maps ("closed":
none, folded). `any_size`: height and width are free in the file. `error`: largest relative error of the file's outputs
over 1 and 3 images of two sizes. `over_module`, `over_parent`: median time of a pass of the file on 2 images over the
module's and the parent's, by turns. `seconds`: export and checks (those of patchconvnet_s60 count pauses of a shared
machine). `parent_error`: the error of the parent alone, in ONNX.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import timm
import torch
from timing import RESULTS, by_turns, inference, machine, ratio, read, update
from torch import nn

import recast
import recast.papers.networks  # registers networks
from recast.exporting import SUFFIX, open_program
from recast.layers.cmhsa import recast_layers
from recast.layers.config import PAPERS_LAYER
from recast.surgery.scales import randomize_scales_

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


@torch.no_grad()
def open_third_(model: nn.Module) -> None:
    """Open a third of the heads of every layer in both maps, with queries and keys that see content."""
    for layer in recast_layers(model).values():
        layer.key.normal_(0, 0.1)
        if isinstance(layer, recast.GPSA):
            layer.gamma[::3] = 0.3
            layer.spread[::3] = 0.3


def networks(name: str) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """Return parent, recast network and images."""
    torch.manual_seed(0)
    architecture, options = name.partition(",")[0], dict(NETWORKS[name])
    images = torch.randn(2, 3, SIZE, SIZE)
    parent = timm.create_model(architecture, num_classes=100).eval()
    randomize_scales_(parent, images)
    child, pool = copy.deepcopy(parent), options.pop("pool", None)
    if pool is not None:
        return parent, recast.attention_pool_(child, per_class=pool).eval(), images
    child = recast.recast_(
        child, recast.plan(child, images, recast.RecastConfig("linear", **PAPERS_LAYER, **options))
    ).eval()
    if "closed" in name:
        recast.fold_(child)
    else:
        open_third_(child)
    return parent, child.eval(), images


def error(export: Any) -> str:
    """Return the largest error of an export's checks."""
    return f"{max(check.error for check in export.checks):.1e}"


def measure(name: str, to: Any, folder: str) -> dict[str, Any]:
    """Return the row of a network and a format."""
    parent, child, images = networks(name)
    started = time.perf_counter()
    export = recast.export(child, images, Path(folder) / f"child{SUFFIX[to]}", tol=float("inf"))
    seconds = time.perf_counter() - started
    program = open_program(export.path, to)
    arms = {"file": program, "module": child, "parent": parent}
    times = by_turns({arm: inference(model, images) for arm, model in arms.items()}, ROUNDS)
    parent_error = ""
    if to == "onnx":
        parent_error = error(recast.export(parent, images, Path(folder) / "parent.onnx", tol=float("inf")))
    row: dict[str, Any] = {"network": name, "to": to, "size": SIZE, "any_size": export.any_size, "error": error(export)}
    row |= {"parent_error": parent_error, "over_module": round(ratio(times["file"], times["module"]), 2)}
    row |= {"over_parent": round(ratio(times["file"], times["parent"]), 2)}
    row |= {"module_over_parent": round(ratio(times["module"], times["parent"]), 2), "seconds": round(seconds, 1)}
    row |= {"machine": machine()}
    return row


def main() -> None:
    """Measure the rows that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", choices=(*NETWORKS, []))
    path = RESULTS / "export.csv"
    measured = {(row["network"], row["to"]) for row in read(path)}
    with TemporaryDirectory() as folder:
        for name in parser.parse_args().networks or NETWORKS:
            for to in SUFFIX:
                if (name, to) not in measured:
                    update(path, [measure(name, to, folder)], ("network", "to"))


if __name__ == "__main__":
    main()
