"""Images with any number of labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from recast.errors import RecastError
from recast.lab.config import DataConfig
from recast.lab.data.datasets import ImageFiles, RawData
from recast.lab.data.images import PHOTO
from recast.lab.data.seeding import hold_out
from recast.lab.data.table import find_images, read_labels


@dataclass(eq=False)
class MultiLabelImages(ImageFiles):
    """Image files with labels `hot`; `labels` is one class of each, by which subsets are balanced."""

    hot: Tensor = field(kw_only=True)
    """(N, C) float32 of 0 and 1."""
    task = "multilabel"

    def load(self, indices: Sequence[int], seeds: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        return super().load(indices, seeds)[0], self.hot[torch.as_tensor(indices, dtype=torch.long)]

    def targets(self) -> list[str]:
        return ["".join(map(str, row)) for row in self.hot.int().tolist()]

    def subset(self, indices: Tensor) -> Self:
        return replace(super().subset(indices), hot=self.hot[indices])

    def relabelled(self, labels: Tensor) -> Self:
        raise RecastError("images with several labels have no groups of classes")


def rarest(hot: Tensor) -> Tensor:
    """Return the rarest class of every image (N,), C for an image without a class."""
    sizes = torch.where(hot > 0, hot.sum(0), torch.inf)
    return torch.where(hot.any(1), sizes.argmin(1), hot.shape[1])


def find_multilabel(config: DataConfig) -> RawData:
    """Read a table of labels; without a validation part a share of the images of every rarest class is held out."""
    table = read_labels(config, is_multi=True)
    places = {name: number for number, name in enumerate(table.classes)}
    hot = torch.zeros(len(table.labels), len(places))
    for row, names in enumerate(table.labels):
        hot[row, [places[name] for name in names]] = 1
    labels = rarest(hot).clamp(max=len(places) - 1)
    raw = find_images(config, table, lambda items, rows: MultiLabelImages(labels[rows], PHOTO, items, hot=hot[rows]))
    if isinstance(raw.train, MultiLabelImages) and raw.val is None:
        train, val = hold_out(rarest(raw.train.hot), config.val_fraction)
        raw.train, raw.val, raw.is_held_out = raw.train.subset(train), raw.train.subset(val), True
    return raw
