"""The default layer, one wide content head, beside its convolution: how near is its time to its bound?

    python benchmarks/wide.py                  # writes results/wide.csv (two minutes on 2 idle cores)
    python benchmarks/wide.py --network        # ResNet-50's last stage, by turns: two rows per number of threads

Columns: side, channels, batch, threads; pass (forward in eval, or forward + backward; of the network inference, or a
step with SGD); median_ms; over_parent (time over the parent's, median of ratios within a round); macs_over_parent (its
bound); share_of_bound = the second over the first; machine. Gates are open.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import timm
import torch
from layer import GEOMETRY, call
from model import call as model_call
from timing import RESULTS, by_turns, machine, macs, open_gates, ratio, update
from torch import nn

import recast
from recast.layers.gpsa import GPSA

MAPS = {(8, 64): (1, 32, 256), (14, 256): (1, 32), (28, 128): (1, 32), (56, 64): (1, 8)}
"""Side and channels of a map → numbers of images."""
LABELS = ("side", "channels", "batch", "threads", "pass")


def measure(
    side: int, channels: int, batch: int, kind: str, calls: Any, counts: Mapping[str, int], rounds: int
) -> dict[str, Any]:
    """Time parent and recast layer by turns."""
    seconds = by_turns(calls, rounds)
    over, bound = ratio(seconds["ours"], seconds["parent"]), counts["ours"] / counts["parent"]
    return {
        "side": side, "channels": channels, "batch": batch, "threads": torch.get_num_threads(), "pass": kind,
        "median_ms": round(1e3 * statistics.median(seconds["ours"]), 3), "over_parent": round(over, 3),
        "macs_over_parent": round(bound, 3), "share_of_bound": round(bound / over, 3), "machine": machine(),
    }  # fmt: skip


def layers() -> Iterator[dict[str, Any]]:
    """Yield the rows of every map."""
    for (side, channels), batches in MAPS.items():
        arms = {
            "parent": nn.Conv2d(channels, channels, 3, padding=1),
            "ours": open_gates(GPSA(channels, channels, GEOMETRY)),
        }
        for batch in batches:
            x = torch.randn(batch, channels, side, side)
            for training in (False, True):
                x.requires_grad_(training)
                for arm in arms.values():
                    recast.refresh_gates_(arm.train(training))
                gradient = torch.randn(x.shape) if training else None
                counts = {name: macs(arm, x, training) for name, arm in arms.items()}
                calls = {name: call(arm, x, gradient) for name, arm in arms.items()}
                rounds = 25 if batch * side**2 < 10_000 else 5
                kind = "forward+backward" if training else "forward"
                yield measure(side, channels, batch, kind, calls, counts, rounds)


def network(rounds: int = 5) -> Iterator[dict[str, Any]]:
    """Yield the rows of ResNet-50, its last stage recast with its stride kept."""
    torch.manual_seed(0)
    parent = timm.create_model("resnet50")
    images = torch.randn(8, 3, 224, 224)
    ours = open_gates(recast.recast_(copy.deepcopy(parent), recast.plan(parent, images[:1])))
    for training in (False, True):
        arms = {name: recast.refresh_gates_(m.train(training)) or m for name, m in (("parent", parent), ("ours", ours))}
        counts = {name: macs(model, images, training) for name, model in arms.items()}
        calls = {name: model_call(model, images, training) for name, model in arms.items()}
        yield measure(224, 2048, len(images), "step" if training else "inference", calls, counts, rounds)


def main() -> None:
    """Update the table by each row as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="store_true", help="ResNet-50 instead of the layers")
    is_network = parser.parse_args().network
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for row in network() if is_network else layers():
            update(RESULTS / "wide.csv", [row], LABELS)


if __name__ == "__main__":
    main()
