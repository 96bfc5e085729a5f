"""CIFAR in memory: images, their split and the augmentation of a batch, all on one device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from recast.lab.config import DataConfig
from recast.lab.data import load_data
from recast.lab.data.seeding import hold_out

HOLD_OUT = 0.1
PAD = 4


@dataclass(frozen=True)
class Labelled:
    """Images (N, 3, 32, 32) uint8 and their classes (N,)."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: Tensor) -> Labelled:
        """Return the images of an index."""
        return Labelled(self.pixels[index], self.labels[index])

    def to(self, device: torch.device) -> Labelled:
        """Return the same images on a device."""
        return Labelled(self.pixels.to(device), self.labels.to(device))


def read(folder: Path) -> tuple[Labelled, Labelled]:
    """Return the training and the test images of a folder called cifar10 or cifar100."""
    data = load_data(DataConfig(folder.name, str(folder)))
    train, test = (Labelled(part.pixels, part.labels) for part in (data.train, data.val))  # type: ignore[attr-defined]
    return train, test


def split(train: Labelled) -> tuple[Labelled, Labelled]:
    """Return 90 % to train on and 10 % to choose rates on, the same for every run."""
    kept, held_out = hold_out(train.labels, HOLD_OUT)
    return train.take(kept), train.take(held_out)


def crop_and_flip(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Pad each image by 4, crop it at a random position and mirror half of the images."""
    count, _, height, width = pixels.shape
    shifts = torch.randint(0, 2 * PAD + 1, (2, count), generator=generator).to(pixels.device)
    flip = (torch.rand(count, generator=generator) < 0.5).to(pixels.device)
    padded = F.pad(pixels, [PAD] * 4)
    rows = shifts[0][:, None] + torch.arange(height, device=pixels.device)
    columns = torch.arange(width, device=pixels.device).expand(count, -1)
    columns = shifts[1][:, None] + torch.where(flip[:, None], width - 1 - columns, columns)
    image = torch.arange(count, device=pixels.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
