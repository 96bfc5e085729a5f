"""From a batch of pixels to what the network sees: normalised, erased, mixed, on its device."""

from __future__ import annotations

import random

import numpy as np
import torch
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from recast.data import Data
from recast.data.seeding import mix_seed
from recast.run.config import Recipe


class Inputs:
    """Pixels (B, 3, H, W) in [0, 1] and labels (B,) → images and targets: labels (B,), or (B, classes) when mixed.

    Random erasing, Mixup and CutMix are timm's. They draw from the global generators, which `seed_step` sets.
    """

    def __init__(self, data: Data, recipe: Recipe, device: torch.device) -> None:
        self.device, augment = device, recipe.augment
        self.mean, self.std = (torch.tensor(v, device=device).view(-1, 1, 1) for v in (data.mean, data.std))
        self.memory_format = torch.channels_last if recipe.channels_last else torch.contiguous_format
        self.erase = RandomErasing(augment.erasing, mode="pixel", device=device) if augment.erasing else None
        self.mix: Mixup | None = None
        if augment.mixup or augment.cutmix:
            self.mix = Mixup(
                augment.mixup, augment.cutmix, prob=augment.mix_prob, switch_prob=augment.mix_switch_prob,
                mode=augment.mix_mode, label_smoothing=recipe.regularization.label_smoothing,
                num_classes=len(data.classes),
            )  # fmt: skip

    def plain(self, pixels: Tensor) -> Tensor:
        """(x − mean) / std, as in validation."""
        pixels = pixels.to(self.device, non_blocking=True, memory_format=self.memory_format)
        return (pixels - self.mean) / self.std

    def __call__(self, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """What the training step sees."""
        images, labels = self.plain(pixels), labels.to(self.device, non_blocking=True)
        if self.erase is not None:
            images = self.erase(images)
        if self.mix is None:
            return images, labels
        mixed: tuple[Tensor, Tensor] = self.mix(images, labels)
        return mixed


def seed_step(seed: int, epoch: int, step: int, part: int) -> None:
    """Seed the global generators (torch on every device, numpy, random) for one part of one batch.

    Erasing, mixing, dropout and stochastic depth follow from (seed, epoch, step, part) alone: a run that goes on draws
    what it would have drawn, and no state of a generator is ever saved.
    """
    number = mix_seed("step", seed, epoch, step, part)
    torch.manual_seed(number)
    # not the same bits: torch and numpy share mt19937 and would draw the same numbers
    np.random.seed((number >> 31) % 2**32)
    random.seed(number)
