"""The default layer, attention beside a convolution, against the convolution: how near is its time to its bound?

    python benchmarks/wide.py                  # writes results/wide.csv (three minutes on 2 idle cores)

Single layers, and ResNet-50 recast by default. Columns: side, channels, batch, threads; pass (forward in eval,
or forward + backward; for the network inference, or a step with SGD); median_ms; over_parent (time over the parent's,
median of ratios within a round); macs_over_parent (its bound); share_of_bound = the second over the first; machine.
Gates are open.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import timm
import torch
from layer import call as layer_call
from model import call as model_call
from timing import RESULTS, by_turns, machine, macs, open_gates, ratio, update
from torch import Tensor, nn

import recast

MAPS = {(8, 64): (1, 32, 256), (14, 256): (1, 32), (28, 128): (1, 32), (56, 64): (1, 8)}
"""Side and channels of a map → numbers of images."""
LABELS = ("side", "channels", "batch", "threads", "pass")


def measure(arms: dict[str, nn.Module], x: Tensor, kind: str, call: Callable[..., Any]) -> dict[str, Any]:
    """Return the row of a parent and its recast form in one pass."""
    training = kind in ("forward+backward", "step")
    for model in arms.values():
        model.train(training)
    counts = {arm: macs(model, x, training) for arm, model in arms.items()}
    rounds = 25 if len(x) * x.shape[-1] ** 2 < 10_000 else 5
    seconds = by_turns({arm: call(model, x, training) for arm, model in arms.items()}, rounds)
    over, bound = ratio(seconds["ours"], seconds["parent"]), counts["ours"] / counts["parent"]
    row: dict[str, Any] = {"side": x.shape[-1], "channels": getattr(arms["parent"], "num_features", x.shape[1])}
    row |= {"batch": len(x), "threads": torch.get_num_threads(), "pass": kind}
    row |= {"median_ms": round(1e3 * statistics.median(seconds["ours"]), 3), "over_parent": round(over, 3)}
    row |= {"macs_over_parent": round(bound, 3), "share_of_bound": round(bound / over, 3), "machine": machine()}
    return row


def rows() -> Iterator[dict[str, Any]]:
    """Yield the rows of every map, and of ResNet-50, recast by default."""
    for (side, channels), batches in MAPS.items():
        conv = nn.Conv2d(channels, channels, 3, padding=1)
        arms = {"parent": conv, "ours": open_gates(recast.AttentionBeside(copy.deepcopy(conv)))}
        for batch in batches:
            x = torch.randn(batch, channels, side, side)
            for kind in ("forward", "forward+backward"):
                yield measure(arms, x.requires_grad_(kind != "forward"), kind, layer_call)
    torch.manual_seed(0)
    parent, images = timm.create_model("resnet50"), torch.randn(8, 3, 224, 224)
    ours = open_gates(recast.recast_(copy.deepcopy(parent), recast.plan(parent, images[:1])))
    for kind in ("inference", "step"):
        yield measure({"parent": parent, "ours": ours}, images, kind, model_call)


def main() -> None:
    """Update the table by each row as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for row in rows():
            update(RESULTS / "wide.csv", [row], LABELS)


if __name__ == "__main__":
    main()
