"""Whole models: T-CNNs against the same network without attention, and small ones, by turns.

    python benchmarks/model.py                     # writes results/model.csv (about 25 minutes on 2 cores)
    python benchmarks/model.py --only resnetrs50   # some families; the rows of others stay

Columns: family, arm, img_size, batch, pass (inference, or a training step: forward, backward and SGD), median_ms,
spread, images_per_s, relative_speed (time of the network without attention over this one's, median of ratios within a
round), mac_bound (its multiply-accumulates over this one's), share_of_bound, saved_mib (kept for backward).

"no attention" is the ResNet-RS with the last stage's stride removed, as the papers run it, and "stride kept" the
published network (a small network's stride is always kept). The other arms have GPSA in the 3×3 convolutions of their
last stage: N of 9 heads open (content and Gaussian; the other maps and W_val folded away), positional (Gaussians alone,
folded), all open (as in training), folded (all heads closed, `fold_`). "compiled" is by `torch.compile`, for small
networks alone.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import timm
import torch
from timing import RESULTS, by_turns, inference, machine, macs, open_gates, ratio, saved_mib, spread, update
from torch import Tensor, nn

import recast
import recast.papers.networks
from recast.layers.config import PAPERS_LAYER

LABELS = ("family", "arm", "batch", "pass")
FAMILIES = {
    "resnetrs50": (224, (8,), (4,)),
    "resnetrs152": (320, (2,), (2,)),
    "cifar_resnet20": (32, (1, 32, 256), (32, 256)),
    "digits_resnet": (32, (1, 32, 256), (32, 256)),
}
"""Parent → image size, images of inference passes, images of training steps."""
SMALL = ("cifar_resnet20", "digits_resnet")


def channels_of(model: nn.Module) -> int:
    """Return the channels of its images."""
    return next(model.parameters()).shape[1]


def build(name: str, size: int, setting: tuple[int, int, bool] | None) -> nn.Module:
    """Return a network: as it is published, or a T-CNN with open gates in the first heads of every layer."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=1000)
    if setting is not None:
        gaussian, content, fold = setting
        config = recast.RecastConfig("linear", stride="keep" if name in SMALL else "remove", **PAPERS_LAYER)
        model = recast.recast_(model, recast.plan(model, torch.zeros(1, channels_of(model), size, size), config))
        open_gates(model, gaussian, content)
        if fold:
            recast.fold_(model)
    return model.eval()


ARMS = {
    "no attention": (0, 0, True),
    "folded": (0, 0, True),
    "all closed": (0, 0, False),
    "3 of 9 open": (3, 3, True),
    "all open": (9, 9, False),
    "all open, W_val folded": (9, 9, True),
    "positional": (9, 0, True),
    "stride kept": None,
}
"""Heads with an open Gaussian, heads with open content, True to fold the rest. None: the published network."""
IN_TRAINING = ("no attention", "3 of 9 open", "all open", "positional", "stride kept")
COMPILED = ("no attention", "all open")


def family(name: str, size: int, arms: Iterable[str] = ARMS) -> dict[str, nn.Module]:
    """Return the arms of a family."""
    return {arm: build(name, size, ARMS[arm]) for arm in arms}


def call(model: nn.Module, images: Tensor, training: bool) -> Callable[[], object]:
    """Return a function that runs an inference pass, or a training step."""
    if not training:
        return inference(model, images)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    labels = torch.zeros(len(images), dtype=torch.long, device=images.device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def measure(
    name: str, arms: dict[str, nn.Module], size: int, batch: int, training: bool, rounds: int
) -> list[dict[str, Any]]:
    """Return the rows of one family in one pass."""
    first = next(iter(arms))
    device = next(arms[first].parameters()).device
    images = torch.randn(batch, channels_of(arms[first]), size, size, device=device)
    for model in arms.values():
        model.train(training)
    if name in SMALL:
        torch.compiler.reset()
        arms = arms | {f"{arm}, compiled": torch.compile(copy.deepcopy(arms[arm])) for arm in COMPILED}
    plain = {arm: getattr(model, "_orig_mod", model) for arm, model in arms.items()}
    counts = {arm: macs(model, images, training) for arm, model in plain.items()}
    seconds = by_turns({arm: call(model, images, training) for arm, model in arms.items()}, rounds)
    rows = []
    for arm, model in plain.items():
        median = statistics.median(seconds[arm])
        speed, bound = ratio(seconds[first], seconds[arm]), counts[first] / counts[arm]
        row: dict[str, Any] = {"family": name, "arm": arm, "img_size": size, "batch": batch}
        row |= {"pass": "training step" if training else "inference", "median_ms": round(1e3 * median, 1)}
        row |= {"spread": round(spread(seconds[arm]), 3), "images_per_s": round(batch / median, 2)}
        row |= {"relative_speed": round(speed, 3), "mac_bound": round(bound, 3)}
        row |= {"share_of_bound": round(speed / bound, 3)}
        row |= {"saved_mib": round(saved_mib(model, images), 1) if training else "", "machine": machine()}
        rows.append(row)
    return rows


def main() -> None:
    """Measure every family, or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(FAMILIES), default=list(FAMILIES), help="families")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(2)
    for name in options.only:
        size, batches, train_batches = FAMILIES[name]
        arms = family(name, size, [arm for arm in ARMS if not (name in SMALL and arm == "stride kept")])
        rows = []
        for batch in batches:
            rows += measure(name, arms, size, batch, False, options.rounds)
        arms = {arm: arms[arm] for arm in IN_TRAINING if arm in arms}
        for batch in train_batches:
            rows += measure(name, copy.deepcopy(arms), size, batch, True, options.rounds)
        update(RESULTS / "model.csv", rows, LABELS)


if __name__ == "__main__":
    main()
