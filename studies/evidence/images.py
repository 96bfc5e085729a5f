"""CIFAR in memory: the images, their split, and what training does to a batch of them, all on one device."""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import v2

from recast.lab.data.seeding import hold_out

HOLD_OUT = 0.1
PAD = 4
GROUPS = 8
"""Groups of a batch that RandAugment treats alike: its operations take whole batches, a policy an image costs ten
times the training step."""


@dataclass(frozen=True)
class Labelled:
    """Images (N, 3, 32, 32) uint8 and their classes (N,)."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: Tensor) -> Labelled:
        """Some of the images."""
        return Labelled(self.pixels[index], self.labels[index])

    def to(self, device: torch.device) -> Labelled:
        """The same on a device."""
        return Labelled(self.pixels.to(device), self.labels.to(device))


def read(folder: Path, part: str) -> Labelled:
    """`folder/part.zip` of PNG files CLASS/NUMBER.png, in the order of classes.txt."""
    classes = {name: label for label, name in enumerate((folder / "classes.txt").read_text().split())}
    with zipfile.ZipFile(folder / f"{part}.zip") as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".png"))
        pixels = [np.asarray(Image.open(io.BytesIO(archive.read(name))).convert("RGB")) for name in names]
    labels = [classes[name.split("/")[0]] for name in names]
    return Labelled(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels))


def split(train: Labelled) -> tuple[Labelled, Labelled]:
    """90 % to train on, 10 % to choose rates on; the same for every run."""
    kept, held_out = hold_out(train.labels, HOLD_OUT)
    return train.take(kept), train.take(held_out)


def crop_and_flip(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Each image padded by 4, cut at a place of its own, half of them mirrored."""
    count, _, height, width = pixels.shape
    draw = torch.randint(0, 2 * PAD + 1, (2, count), generator=generator).to(pixels.device)
    flip = (torch.rand(count, generator=generator) < 0.5).to(pixels.device)
    padded = F.pad(pixels, [PAD] * 4)
    rows = draw[0][:, None] + torch.arange(height, device=pixels.device)
    columns = torch.arange(width, device=pixels.device).expand(count, -1)
    columns = draw[1][:, None] + torch.where(flip[:, None], width - 1 - columns, columns)
    image = torch.arange(count, device=pixels.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class Augment:
    """What training sees of a batch: crop and flip, or with `strength="deit"` RandAugment and erasing too."""

    def __init__(self, strength: str) -> None:
        self.rand = v2.RandAugment(2, 9) if strength == "deit" else None
        self.erase = v2.RandomErasing(0.25, value=0) if strength == "deit" else None

    def __call__(self, pixels: Tensor, generator: torch.Generator) -> Tensor:
        """uint8 (B, 3, H, W) → float in [0, 1]. Chance follows from `generator`; RandAugment's from torch's own."""
        pixels = crop_and_flip(pixels, generator)
        if self.rand is not None:
            pixels = torch.cat([self.rand(group) for group in pixels.chunk(GROUPS)])
        floats = pixels.float() / 255
        if self.erase is not None:
            floats = torch.cat([self.erase(group) for group in floats.chunk(GROUPS)])
        return floats
