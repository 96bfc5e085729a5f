"""The default layer, and the same after the blocks, in every convnet of timm and torchvision.

    PYTHONPATH=benchmarks python -m zoo.default                    # continues where it stopped; an hour or two
    PYTHONPATH=benchmarks python -m zoo.default 'timm:resnet*' --out resnets.csv

As a user plans it: `plan(model, images, RecastConfig(beside=place))` and no more. Outputs must be bitwise those of the
parent at the start and after `fold_`; as a control they must change when the gates are opened. `DefaultRow` describes
the columns. Exit code 1 if a network is changed, or if no place can be recast though it has a spatial convolution.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import recast
from recast.errors import RecastError
from recast.lab.folder.tables import read_records
from recast.layers.beside import AttentionBeside
from recast.tracing.examples import run_example
from zoo.architectures import Instance, architectures, instantiate, skeleton, spatial_convolutions
from zoo.rows import NOTHING, append_row

PLACES = ("convolution", "block")


@dataclass
class DefaultRow:
    """Result of one architecture and place."""

    model: str
    place: str
    """convolution: beside the last convolution of every block of the last stage; block: after the blocks."""
    status: str
    """exact, changed, vacuous (open gates change nothing), refused, failed; `place` is empty without convolutions."""
    cause: str = ""
    size: str = ""
    layers: int = 0
    kinds: str = ""
    """Classes of the modules that attention stands beside, counted."""
    macs: float = 1.0
    """Multiply-adds over the parent's."""
    control: float | None = None
    """max|a − b| / max|b| over the outputs, of open gates against closed ones."""
    seconds: float = 0.0


@torch.no_grad()
def outputs(instance: Instance) -> list[Tensor]:
    """Return the tensors of the network's output for one image."""
    batch = tuple(images[:1] for images in instance.inputs)
    return [t.clone() for t in tree_leaves(run_example(instance.model, batch)) if isinstance(t, Tensor)]


def are_equal(a: list[Tensor], b: list[Tensor]) -> bool:
    """Return True if all outputs are bitwise equal, NaN like NaN."""
    return len(a) == len(b) and all(map(torch.equal, *([t.nan_to_num(7e7) for t in tensors] for tensors in (a, b))))


def fill(row: DefaultRow, instance: Instance) -> None:
    """Recast the network, compare, and fold it back."""
    before = outputs(instance)
    try:
        planned = recast.plan(instance.model, instance.inputs, recast.RecastConfig(beside=row.place))
    except RecastError as error:
        row.status, row.cause = "refused", " ".join(str(error).split())[:300]
        return
    row.layers, row.macs = len(planned.steps), round(planned.after.macs / max(1, planned.before.macs), 4)
    recast.recast_(instance.model, planned)
    added = [m for m in instance.model.modules() if isinstance(m, AttentionBeside)]
    kinds = Counter(type(layer.conv).__name__ for layer in added)
    row.kinds = " ".join(f"{name}:{count}" for name, count in sorted(kinds.items()))
    is_exact = are_equal(before, outputs(instance))
    with torch.no_grad():
        for layer in added:
            layer.gamma.fill_(0.5)
        opened = outputs(instance)
        for layer in added:
            layer.gamma.zero_()
    pairs = [pair for pair in zip(opened, before, strict=True) if pair[0].is_floating_point()]
    row.control = max(float(((a - b).abs().max() / b.abs().max()).nan_to_num(0)) for a, b in pairs)
    recast.fold_(instance.model)
    is_exact &= are_equal(before, outputs(instance))
    row.status = "changed" if not is_exact else "exact" if row.control > 0 else "vacuous"


def examine(name: str) -> list[DefaultRow]:
    """Return the rows of an architecture: one for each place, or one that says why there is none."""
    convolutions = spatial_convolutions(skeleton(name))
    if not any(isinstance(m, nn.Conv2d | nn.ConvTranspose2d) for m in convolutions):
        return [DefaultRow(name, "", f"no {'two-dimensional' if convolutions else 'spatial'} convolution")]
    rows, instance = [], None
    for place in PLACES:
        started, row = time.perf_counter(), DefaultRow(name, place, "failed")
        try:
            instance = instance or instantiate(name)
            instance.model.recast_plan = None  # folded, it is the parent again
            row.size = "×".join(map(str, instance.size))
            fill(row, instance)
        except Exception as error:  # a row must say it, and the walk go on
            row.cause = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            instance = None
        row.seconds = round(time.perf_counter() - started, 1)
        rows.append(row)
    return rows


def main() -> int:
    """Walk and print how many are exact."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", default=["timm:*", "torchvision:*"], help="globs of names")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "results" / "zoo_default.csv")
    options = parser.parse_args()
    rows = read_records(options.out, DefaultRow) if options.out.exists() else []
    done = {row.model for row in rows}
    for name in architectures(options.patterns):
        if name not in done:
            for row in examine(name):
                append_row(options.out, row)
                rows.append(row)
                print(row.model, row.place, row.status, row.cause, f"{row.seconds:.0f} s", file=sys.stderr, flush=True)
            gc.collect()
    for place, status in sorted(counts := Counter((row.place, row.status) for row in rows)):
        print(place or "no place", status, counts[place, status])
    return 0 if all(row.status in ("exact", "refused", *NOTHING) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
