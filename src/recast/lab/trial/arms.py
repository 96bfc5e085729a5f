"""The arms of a trial: one tail in several forms, trained in the same way on the same features."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recast.analysis.wakefulness import wakefulness
from recast.lab.data.seeding import mix_seed, seeded, seeded_on
from recast.lab.folder.records import Wakefulness
from recast.lab.trial.features import Bank
from recast.lab.trial.split import Tail, split_network
from recast.models.adapt import classifiers
from recast.modes import in_eval
from recast.surgery.apply import recast_
from recast.surgery.parameters import param_groups
from recast.surgery.places import places, planned_places
from recast.surgery.plan import Plan
from recast.surgery.records import Step
from recast.surgery.stride import replace_module_
from recast.surgery.wake import wake_

Arm = Literal["parent", "finetuned", "longer", "added", "recast"]
ARM_NAMES: dict[Arm, str] = {
    "parent": "as it is",
    "finetuned": "fine-tuned",
    "longer": "fine-tuned (equal time)",
    "added": "convolutions added",
    "recast": "recast",
}
"""Arms and their labels."""
TRAINED: tuple[Arm, ...] = ("finetuned", "longer", "added", "recast")
COMPARED: tuple[Arm, ...] = ("finetuned", "longer", "recast")
"""Arms that decide; `added` is trained after a yes alone."""
RATED: tuple[Arm, ...] = ("finetuned", "added", "recast")
"""Arms with a learning rate of their own; `longer` has that of finetuned."""
WEIGHT_DECAY, WARM_UP, LOWEST = 0.05, 20, 1e-2
"""AdamW: weight decay, 1/20 of the updates for the warm-up, 1/100 of the rate at the end of the cosine."""
WAKING, WATCHED = 256, 64
"""Numbers of images that queries and keys start from, and on which attention is measured."""
HEAD_UPDATES, HEAD_BATCH, HEAD_RATE = 300, 256, 1e-2
"""Training of a new classifier on what enters it."""
CURVE_POINTS, DIVERGED = 20, 1e9
"""Number of points of a loss curve; stand-in for a loss that is not finite, which JSON does not support."""


class Beside(nn.Module):
    """A convolution with another path beside it: k×k to few channels, GELU, 1×1, started at zero.

    The few channels are as many as give the path the multiply-adds that attention adds to the layer.
    """

    def __init__(self, conv: nn.Module, step: Step) -> None:
        super().__init__()
        geometry, (rows, columns) = step.parent_geometry, step.output[1:]
        taps = geometry.num_heads * step.input[0] + step.output[0]
        width = max(1, round((step.after.macs - step.before.macs) / (rows * columns * taps)))
        reach_rows, reach_columns = geometry.reach
        padding = reach_rows // 2, reach_columns // 2
        self.conv = conv
        self.narrow = nn.Conv2d(
            step.input[0], width, geometry.kernel, geometry.stride, padding, geometry.dilation, bias=False
        )
        self.wide = nn.Conv2d(width, step.output[0], 1, bias=False)
        nn.init.zeros_(self.wide.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both paths for x (B, C, H, W)."""
        y: Tensor = self.conv(x)
        return y + self.wide(F.gelu(F.adaptive_avg_pool2d(self.narrow(x), (y.shape[-2], y.shape[-1]))))


def make(arm: Arm, tail: Tail, plan: Plan, train: Bank, seed: int, device: torch.device) -> Tail:
    """Return a copy of the tail in the form of an arm: recast exactly, with a path beside its layers, or as it is."""
    tail = copy.deepcopy(tail)
    with seeded_on(device, mix_seed("arm", seed)):
        if arm == "recast":
            recast_(tail.network, plan)
            if plan.config.query_key == "images":
                features, _ = next(train.spread(WAKING).plain(WAKING, device))
                wake_(tail, features, plan.config.logit_std, seed=seed)
        elif arm == "added":
            with places(planned_places(plan.steps), tail.network):
                for step in plan.steps:
                    old = tail.network.get_submodule(step.name)
                    replace_module_(tail.network, old, Beside(old, step))
    return tail.to(device)


BLOCK_SECONDS, MOST_TURNS = 4.0, 60
"""A block of measured steps takes this long, or so many turns."""


@dataclass(frozen=True)
class Trained:
    """Result of a training: seconds, loss curve (update, loss), loss and correctness on the test images."""

    seconds: float
    curve: tuple[tuple[int, float], ...]
    loss: float
    right: tuple[bool, ...]


@dataclass(frozen=True)
class Training(Trained):
    """A finished training: a line of runs.jsonl."""

    kind: Literal["rate", "final"]
    arm: Arm
    seed: int
    rate: float
    updates: int
    attention: Wakefulness | None = None
    """Of the recast arm."""
    weights: str = ""
    """Checksum of the weights that are kept, of the first seed of the recast arm."""


def train_(
    tail: Tail, train: Bank, test: Bank, *, rate: float, updates: int, batch: int, seed: int, device: torch.device,
    advance: Callable[[], None] = lambda: None, follows: bool = True,
) -> Trained:  # fmt: skip
    """Train a tail in place by AdamW (cosine, warm-up) and measure it on `test`.

    follows: whether BatchNorm and dropout are in training mode.
    """
    optimizer = torch.optim.AdamW(param_groups(tail, lr=rate, weight_decay=WEIGHT_DECAY))
    warm = max(1, updates // WARM_UP)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warm) * max(LOWEST, (1 + math.cos(math.pi * step / updates)) / 2)
    )
    curve: list[tuple[int, float]] = []
    losses: list[Tensor] = []
    begin = time.perf_counter()
    with seeded_on(device, mix_seed("training", seed)):  # dropout
        tail.train(follows)
        for update, (features, labels) in enumerate(train.training(batch, updates, seed, device), start=1):
            loss = F.cross_entropy(tail(features), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
            if update * CURVE_POINTS // updates > (update - 1) * CURVE_POINTS // updates:
                value = float(torch.stack(losses).mean())
                curve.append((update, value if math.isfinite(value) else DIVERGED))
                losses = []
            advance()
    seconds = time.perf_counter() - begin
    return Trained(seconds, tuple(curve), *score(tail, test, device))


@torch.no_grad()
def score(tail: Tail, test: Bank, device: torch.device) -> tuple[float, tuple[bool, ...]]:
    """Return the mean cross entropy over the images, and which are right."""
    losses, right = [], []
    with in_eval(tail):
        for features, labels in test.plain(64, device):
            logits = tail(features)
            losses.append(F.cross_entropy(logits, labels, reduction="none"))
            right.append(logits.argmax(1) == labels)
    loss = float(torch.cat(losses).mean())
    return loss if math.isfinite(loss) else DIVERGED, tuple(torch.cat(right).tolist())


def attention(tail: Tail, test: Bank, device: torch.device) -> Wakefulness | None:
    """Return how many heads of a recast tail attend."""
    features, _ = next(test.spread(WATCHED).plain(WATCHED, device))
    return Wakefulness.of(wakefulness(tail, features))


def with_head(model: nn.Module, classes: int) -> nn.Module:
    """Return the model with a new classifier of `classes` outputs in the place of its own (in place)."""
    for name in classifiers(model):
        old: Any = model.get_submodule(name)
        has_bias = getattr(old, "bias", None) is not None
        with seeded(mix_seed("classifier")):
            if hasattr(old, "kernel_size"):  # SqueezeNet
                new: nn.Module = nn.Conv2d(
                    old.in_channels, classes, old.kernel_size, old.stride, old.padding, bias=has_bias
                )
            else:
                new = nn.Linear(old.in_features, classes, has_bias)
        replace_module_(model, old, new.to(old.weight))
    return model


def step_seconds(
    tails: Mapping[Arm, Tail], train: Bank, batch: int, device: torch.device, blocks: int = 1
) -> list[list[dict[Arm, float]]]:
    """Return the seconds of an update of every arm: blocks of at least three turns. The tails are trained on."""

    def turn() -> dict[Arm, float]:
        settings: dict[str, Any] = {"rate": 1e-6, "updates": 1, "batch": batch, "seed": 0, "device": device}
        return {arm: train_(tail, train, train.spread(1), **settings).seconds for arm, tail in tails.items()}

    turn()  # warms up
    turns = [[turn() for _ in range(3)] for _ in range(blocks)]
    for block in turns:
        while len(block) < MOST_TURNS and sum(sum(each.values()) for each in block) < BLOCK_SECONDS:
            block.append(turn())
    return turns


def ratio_of(block: Sequence[Mapping[Arm, float]]) -> float:
    """Return the seconds of a recast relative to a fine-tuned update, the median over the turns of a block.

    Within a turn a slow change of the machine's load meets both; a quick one shows as blocks that differ.
    """
    return median(turn["recast"] / turn["finetuned"] for turn in block)


def with_fitted_head(tail: Tail, trains: Sequence[Bank], device: torch.device) -> list[Tail]:
    """Return a copy of the tail for each of `trains`, parts of one bank, with its classifier trained alone on it.

    What enters the classifier is computed once.
    """
    names = [f"network.{name}" for name in classifiers(tail.network)]
    parts = split_network(tail, names, next(trains[0].plain(4, device))[0])
    whole = trains[0].whole()
    views = []
    for view in range(len(whole.views)):
        rows = [parts.features(features).cpu().numpy() for features, _ in whole.plain(64, device, view)]
        views.append(np.concatenate(rows))
    fitted = []
    for train in trains:
        head = copy.deepcopy(parts.tail).requires_grad_(False)
        for name in names:
            head.network.get_submodule(name).requires_grad_(True)
        inputs = replace(train, views=tuple(views))
        train_(
            head, inputs, inputs.spread(1), rate=HEAD_RATE, updates=HEAD_UPDATES, batch=HEAD_BATCH,
            seed=0, device=device, follows=False,
        )  # fmt: skip
        copied = copy.deepcopy(tail)
        for name in names:
            copied.get_submodule(name).load_state_dict(head.network.get_submodule(name).state_dict())
        fitted.append(copied)
    return fitted
