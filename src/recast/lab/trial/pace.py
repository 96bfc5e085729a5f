"""How many images and updates fit into the time of a trial, by measured rates."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recast.config import Count, Positive
from recast.errors import RecastError
from recast.lab.data import Data, Loader
from recast.lab.trial import arms
from recast.lab.trial.answer import ENOUGH_EPOCHS, ENOUGH_UPDATES, RATES, is_steady, offers
from recast.lab.trial.arms import RATED, TRAINED, Arm
from recast.lab.trial.features import PART, Bank, dtype_of
from recast.lab.trial.split import Split
from recast.surgery.plan import Plan
from recast.tracing.examples import run_example
from recast.tracing.outputs import logits_of

FEWEST = 20
"""Training and validation images."""
MOST_VIEWS, MOST_EPOCHS, LEAST_UPDATES = 4, 20, 20
FEATURE_SHARE, MOST_BYTES = 0.4, 16 * 2**30
"""Features take at most this share of the time, and so many bytes."""
RATE_PART, RATE_SHARE = 4, 0.2
"""A rate is tried for a quarter of the updates, and judged by this share of the training images."""
BLOCKS = 3
"""How often the times of the steps are measured before the trainings; once more after them."""
LIMIT, SPARE = 60.0, 1.2
"""`auto` takes at most so many minutes; an answer's time is stated with a fifth to spare."""
SIZES, TIMED = (224, 160, 128, 96), 8
"""Sides of images that are offered for a shorter trial, and the number of images whose time they are compared by."""
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
    ways: Mapping[str, Count]
    """Options with which a trial gives an answer here → its minutes; the first keeps the images as they are."""

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
        return max(ENOUGH_UPDATES, MOST_EPOCHS * self.train // self.batch) * self.batch / self.train

    @property
    def is_shortest(self) -> bool:
        """Return True if every arm has the fewest updates: the trial may take longer than was asked for."""
        return self.updates["recast"] == LEAST_UPDATES

    def seconds(self, seeds: int) -> float:
        """Return an estimate for the whole trial, without validation."""
        runs = seeds * sum(self.updates[arm] * self.step[arm] for arm in TRAINED)
        rates = len(RATES) * (self.updates["recast"] // RATE_PART) * sum(self.step[arm] for arm in RATED)
        return (self.train * self.views + self.val) * self.image + runs + rates


@dataclass(frozen=True)
class Speed:
    """Measured seconds of an image's features, and of an update of every arm."""

    image: float
    step: Mapping[Arm, float]
    batch: int

    def seconds(self, train: int, val: int, views: int, updates: int, seeds: int) -> float:
        """Return the duration of a trial of all arms and seeds."""
        per_seed = self.step["finetuned"] + self.step["added"] + 2 * self.step["recast"]  # `longer` takes as long
        trained = updates * (seeds * per_seed + len(RATES) / RATE_PART * sum(self.step.values()))
        forward = {arm: seconds / 3 for arm, seconds in self.step.items()}  # without gradients
        of_runs = val / self.batch * seeds * (2 * forward["finetuned"] + forward["added"] + forward["recast"])
        of_rates = RATE_SHARE * train / self.batch * len(RATES) * sum(forward.values())
        return (train * views + val) * self.image + trained + of_runs + of_rates

    def least(self, train: int, val: int) -> tuple[int, int]:
        """Return how many of these training and validation images the shortest trial that can decide has."""
        train = min(train, ENOUGH_UPDATES * self.batch)
        return train, min(val, train)

    def minutes(self, images: tuple[int, int], seeds: int) -> float:
        """Return the duration of the shortest trial that can decide."""
        train, val = self.least(*images)
        updates = max(ENOUGH_UPDATES, math.ceil(ENOUGH_EPOCHS * train / self.batch))
        return SPARE * self.seconds(train, val, 1, updates, seeds) / 60


def measure_pace(
    parts: Split, data: Data, plan: Plan, minutes: float | Literal["auto"], seeds: int, device: torch.device
) -> Pace:
    """Measure the seconds of an image's features and of an update of every arm, and fill the time with them.

    Raises RecastError if an answer takes more than `LIMIT` minutes, for `auto`.
    """
    bank, image, are_augmented, shares = _sample(parts, data, device)
    features = torch.from_numpy(bank.views[0])
    dtype = dtype_of(features)
    image_bytes = math.prod(features.shape[1:]) * np.dtype(dtype).itemsize
    batch = min(BATCHES[data.img_size < SMALL], len(data.train))
    bank = bank.subset(torch.arange(batch) % len(bank))  # images repeat to fill the batch
    tails = {arm: arms.make(arm, parts.tail, plan, bank, 0, device) for arm in RATED}
    blocks = arms.step_seconds(tails, bank, batch, device, BLOCKS)
    speed = Speed(image, {arm: median(turn[arm] for block in blocks for turn in block) for arm in tails}, batch)
    longest, images = LIMIT if minutes == "auto" else minutes, (len(data.train), len(data.val))
    ways = _ways(speed, images, seeds, longest, shares)
    if minutes == "auto" and (longest := next(iter(ways.values()))) > LIMIT:
        raise RecastError(f"--minutes auto takes at most {LIMIT:g} minutes; {offers(ways)}")
    budget = 60 * longest
    most_images = min(FEATURE_SHARE * budget / image, MOST_BYTES / image_bytes)
    least_train, least_val = speed.least(*images)
    val = min(least_val if minutes == "auto" else images[1], max(FEWEST, int(most_images / 2)))
    train = min(len(data.train), max(FEWEST, int(most_images) - val))
    views = max(1, min(MOST_VIEWS if are_augmented else 1, int((most_images - val) / train)))
    while True:
        rest = budget - speed.seconds(train, val, views, 0, seeds)
        most = max(ENOUGH_UPDATES, MOST_EPOCHS * train // batch)
        updates = max(LEAST_UPDATES, min(int(rest / speed.seconds(0, 0, 0, 1, seeds)), most))
        is_short = updates < ENOUGH_UPDATES
        if views > 1 and (is_short or views > updates * batch / train):  # no update would use the last one
            views -= 1
        elif is_short and (train > least_train or val > least_val):
            train, val = min(train, least_train), min(val, least_val)
        elif updates * batch < train:  # nor the rest of the images
            train = updates * batch
        else:
            break
    ratios = [arms.ratio_of(block) for block in blocks]
    longer = max(1, round(updates * (median(ratios) if is_steady(ratios) else max(ratios))))
    updates_of = dict.fromkeys(TRAINED, updates) | {"longer": longer}
    steps = {**speed.step, "longer": speed.step["finetuned"]}
    return Pace(train, val, views, batch, updates_of, steps, image, image_bytes, dtype, ratios, ways)


def _ways(
    speed: Speed, images: tuple[int, int], seeds: int, minutes: float, shares: Mapping[int, float]
) -> dict[str, int]:
    """Return options → minutes of trials that can decide: of these seeds (two or more), of two, of smaller images.

    images: numbers of training and validation images. shares: side of images → seconds of one, relative to the present
    size. Of the sides it is the largest that fits into `minutes`, else the smallest.
    """
    all_seeds = speed.minutes(images, max(2, seeds))
    times = {"--seeds 2 " * (seeds == 1): all_seeds}
    if seeds > 2:
        times["--seeds 2 "] = speed.minutes(images, 2)
    if shares:
        side = next((side for side, share in shares.items() if share * all_seeds <= minutes), min(shares))
        times[f"--img-size {side} "] = shares[side] * all_seeds
    return {f"{options}--minutes {math.ceil(each)}": math.ceil(each) for options, each in times.items()}


def _sample(parts: Split, data: Data, device: torch.device) -> tuple[Bank, float, bool, dict[int, float]]:
    """Return features of a few training images, the seconds of one, True if two views of an image differ, and `shares`.

    shares: side of smaller images → seconds of one in the whole network, relative to the present size.
    """
    count, views = min(PART, len(data.train)), []
    for view in range(2):  # the first one warms up
        begin = time.perf_counter()
        pixels, labels = next(iter(Loader(data.train, count, epoch=view)))
        views.append(pixels)
        images = data.normalised(pixels, device)
        features = parts.features(images)
        seconds = (time.perf_counter() - begin) / count
    bank = Bank((features.cpu().numpy(),), labels, torch.arange(count))
    shares, whole = dict[int, float](), _forward_seconds(parts.network, images)
    for side in (side for side in SIZES if side < data.img_size):
        with suppress(RuntimeError, ValueError, AssertionError, RecastError):  # a network of one size
            shares[side] = _forward_seconds(parts.network, F.interpolate(images[:TIMED], (side, side))) / whole
    shares = {side: share for side, share in shares.items() if share < 1}
    return bank, seconds, not torch.equal(*views), shares


def _forward_seconds(network: nn.Module, images: Tensor) -> float:
    """Return the seconds of a few images, the shorter of two measurements."""
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        with torch.no_grad():
            float(logits_of(run_example(network, images[:TIMED]), network, "a trial").sum())  # waits for the device
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
