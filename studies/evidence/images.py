"""CIFAR in memory and the augmentation of a batch, all on one device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from recast.lab.config import DataConfig
from recast.lab.data import load_data
from recast.lab.data.datasets import ImageTensors

PAD = 4


def read(folder: Path) -> tuple[ImageTensors, ImageTensors]:
    """Return the training and the test images of a folder called cifar10 or cifar100, (N, 3, 32, 32) uint8."""
    data = load_data(DataConfig(folder.name, str(folder)))
    return data.train.plain(), data.val  # type: ignore[return-value]


def moved(images: ImageTensors, device: torch.device) -> ImageTensors:
    """Return the same images on a device."""
    return replace(images, pixels=images.pixels.to(device), labels=images.labels.to(device))


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
