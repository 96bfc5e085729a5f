"""How many images and updates fit into the time of a trial, by measured rates."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np
import torch

from recast.config import Count, Positive
from recast.lab.data import Data, Loader
from recast.lab.trial import arms
from recast.lab.trial.answer import RATES
from recast.lab.trial.arms import RATED, TRAINED, Arm
from recast.lab.trial.features import PART, Bank, dtype_of
from recast.lab.trial.split import Split
from recast.surgery.plan import Plan

FEWEST = 20
"""Training and validation images."""
MOST_VIEWS, MOST_EPOCHS, LEAST_UPDATES = 4, 20, 20
FEATURE_SHARE, MOST_BYTES = 0.4, 16 * 2**30
"""Features take at most this share of the time, and so many bytes."""
RATE_PART, HELD_OUT = 4, 0.2
"""A rate is tried for a quarter of the updates, and judged by this share of the training images."""
BLOCKS = 3
"""How often the times of the steps are measured before the trainings; once more after them."""
SMALL, BATCHES = 96, (32, 64)
"""Images of an update; the larger number for images with a side below 96."""


@dataclass(frozen=True)
class Pace:
    """Amounts that fit into the time, by measured rates. trial.json keeps them: a resumed trial does the same."""

    train: Count
    val: Count
    views: Count
    batch: Count
    updates: Mapping[Arm, Count]
    step: Mapping[Arm, Positive]
    """Seconds of an update."""
    image: Positive
    """Seconds of an image's features."""
    image_bytes: Count
    dtype: Literal["float16", "float32"]
    ratios: Sequence[Positive]
    """Seconds of a recast update relative to a fine-tuned one, `BLOCKS` times before the trainings and once after."""

    @property
    def bytes(self) -> int:
        """Return the size of the features on disk."""
        return (self.train * self.views + self.val) * self.image_bytes

    @property
    def epochs(self) -> float:
        """Return how often the recast arm sees every training image."""
        return self.updates["recast"] * self.batch / self.train

    @property
    def most_epochs(self) -> float:
        """Return how often it would see them in a trial of unlimited time."""
        return MOST_EPOCHS * self.train // self.batch * self.batch / self.train

    @property
    def is_shortest(self) -> bool:
        """Return True if every arm has the fewest updates: the trial may take longer than was asked for."""
        return self.updates["recast"] == LEAST_UPDATES

    def seconds(self, seeds: int) -> float:
        """Return an estimate for the whole trial, without validation."""
        runs = seeds * sum(self.updates[arm] * self.step[arm] for arm in TRAINED)
        rates = len(RATES) * (self.updates["recast"] // RATE_PART) * sum(self.step[arm] for arm in RATED)
        return (self.train * self.views + self.val) * self.image + runs + rates


def measure_pace(parts: Split, data: Data, plan: Plan, minutes: float, seeds: int, device: torch.device) -> Pace:
    """Measure the seconds of an image's features and of an update of every arm, and fill the time with them."""
    budget = 60 * minutes
    bank, image, are_augmented = _sample(parts, data, device)
    features = torch.from_numpy(bank.views[0])
    dtype = dtype_of(features)
    image_bytes = math.prod(features.shape[1:]) * np.dtype(dtype).itemsize
    most_images = min(FEATURE_SHARE * budget / image, MOST_BYTES / image_bytes)
    val = min(len(data.val), max(FEWEST, int(most_images / 2)))
    train = min(len(data.train), max(FEWEST, int(most_images) - val))
    batch = min(BATCHES[data.img_size < SMALL], train)
    bank = bank.subset(torch.arange(batch) % len(bank))  # images repeat to fill the batch
    tails = {arm: arms.make(arm, parts.tail, plan, bank, 0, device) for arm in RATED}
    blocks = arms.step_seconds(tails, bank, batch, device, BLOCKS)
    step = {arm: median(block[arm] for block in blocks) for arm in tails}
    validation = _validation_seconds(step, train, val, batch, seeds)
    per_seed = step["finetuned"] + step["added"] + 2 * step["recast"]  # `longer` takes as long as recast
    per_update = seeds * per_seed + len(RATES) / RATE_PART * sum(step.values())
    views = max(1, min(MOST_VIEWS if are_augmented else 1, int((most_images - val) / train)))
    while True:
        fitting = int((budget - (train * views + val) * image - validation) / per_update)
        updates = max(LEAST_UPDATES, min(fitting, MOST_EPOCHS * train // batch))
        if views <= max(1, updates * batch / train):
            break
        views -= 1  # no update would use the last one
    ratios = [block["recast"] / block["finetuned"] for block in blocks]
    longer = max(1, round(updates * median(ratios)))
    updates_of = dict.fromkeys(TRAINED, updates) | {"longer": longer}
    return Pace(
        train, val, views, batch, updates_of, step | {"longer": step["finetuned"]}, image, image_bytes, dtype, ratios
    )  # fmt: skip


def _sample(parts: Split, data: Data, device: torch.device) -> tuple[Bank, float, bool]:
    """Return features of a few training images, the seconds of one, and True if two views of an image differ."""
    count, views = min(PART, len(data.train)), []
    for view in range(2):  # the first one warms up
        begin = time.perf_counter()
        pixels, labels = next(iter(Loader(data.train, count, epoch=view)))
        views.append(pixels)
        features = parts.features(data.normalised(pixels, device))
        seconds = (time.perf_counter() - begin) / count
    bank = Bank((features.cpu().numpy(),), labels, torch.arange(count))
    return bank, seconds, not torch.equal(*views)


def _validation_seconds(step: Mapping[Arm, float], train: int, val: int, batch: int, seeds: int) -> float:
    """Return the seconds of all passes without gradients, which take a third of a step."""
    forward = {arm: seconds / 3 for arm, seconds in step.items()}
    of_runs = val / batch * seeds * (2 * forward["finetuned"] + forward["added"] + forward["recast"])
    return of_runs + HELD_OUT * train / batch * len(RATES) * sum(forward.values())
