"""One epoch as numbered batches, each of which can be made by itself, in any process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from recast.data.datasets import LabelledImages
from recast.data.seeding import image_seeds, mix_seed, seeded
from recast.errors import RecastError

Batch = tuple[Tensor, Tensor]

MAX_BAD = 100
"""So many unreadable images in a row are not a few bad files but a disk that is gone."""


class Loaded(NamedTuple):
    """A part's share of a batch; the names of unreadable images travel with it out of a loader process."""

    images: Tensor
    labels: Tensor
    bad: tuple[str, ...] = ()


NOTHING: Batch = torch.empty(0), torch.empty(0, dtype=torch.long)
"""A share without an image."""


def epoch_order(size: int, seed: int | None, epoch: int, repeats: int = 1) -> Tensor:
    """Indices of an epoch in their order, (size,) int64: shuffled by (seed, epoch), each `repeats` times side by side.

    seed None: 0, 1, 2, ... As in DeiT's sampler (repeated augmentation) the order is cut to `size`: an epoch shows
    ⌈size / repeats⌉ images.
    """
    order = torch.arange(size)
    if seed is not None:
        generator = torch.Generator().manual_seed(mix_seed("order", seed, epoch))
        order = torch.randperm(size, generator=generator)
    return order if repeats == 1 else order[: -(-size // repeats)].repeat_interleave(repeats)[:size]


@dataclass(frozen=True)
class Epoch:
    """Which positions of an epoch's order belong to which batch, and to which part's share of it."""

    size: int
    """Images of the epoch."""
    batch_size: int
    seed: int | None
    """None: evaluation, in the order of the data set."""
    epoch: int
    drop_last: bool
    part: int
    parts: int
    skip: bool
    """Do without images that cannot be read."""

    def __len__(self) -> int:
        return (self.size if self.drop_last else self.size + self.batch_size - 1) // self.batch_size

    def positions(self, number: int) -> range:
        """Positions of the whole batch; a share is `[part::parts]` of it."""
        first = number * self.batch_size
        return range(first, min(first + self.batch_size, self.size))

    def seeds(self, positions: Sequence[int], dataset: object) -> Sequence[int]:
        """Seeds of the images' augmentation; zeros where there is none."""
        if isinstance(dataset, LabelledImages) and dataset.augment is None:
            return [0] * len(positions)
        return image_seeds(self.seed, self.epoch, positions)


@dataclass(frozen=True, eq=False)
class MapBatches(Dataset[Any]):
    """Item i is this part's share of the i-th batch of the epoch, or the RecastError that it ended in."""

    dataset: Dataset[tuple[Tensor, int]]
    order: Tensor
    plan: Epoch

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, number: int) -> Loaded | RecastError:
        positions = self.plan.positions(number)[self.plan.part :: self.plan.parts]
        indices = self.order[positions.start : positions.stop : positions.step].tolist()
        seeds = self.plan.seeds(positions, self.dataset)
        try:
            try:
                return Loaded(*self._read(indices, seeds))
            except RecastError:
                if not self.plan.skip:
                    raise
                return self._read_one_by_one(indices, seeds)
        except RecastError as error:
            return error

    def _read(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        if not indices:
            return NOTHING
        if isinstance(self.dataset, LabelledImages):
            return self.dataset.batch(indices, seeds)
        items = []
        for index, seed in zip(indices, seeds, strict=True):
            with seeded(seed):
                items.append(self.dataset[index])
        images, labels = default_collate(items)
        return images, labels

    def _read_one_by_one(self, indices: Sequence[int], seeds: Sequence[int]) -> Loaded:
        bad: list[str] = []
        read = [self._read_next(index, seed, bad) for index, seed in zip(indices, seeds, strict=True)]
        return joined([item for item in read if item is not None], bad)

    def _read_next(self, index: int, seed: int, bad: list[str]) -> Batch | None:
        """The image, or in training the next one that can be read; unreadable ones are added to `bad`."""
        size = len(self.order)
        tries = min(size, MAX_BAD) if self.plan.seed is not None else 1
        for candidate in (i % size for i in range(index, index + tries)):
            try:
                return self._read([candidate], [seed])
            except RecastError as error:
                reason = error
                bad.append(getattr(self.dataset, "image_name", "image {}".format)(candidate))
        if self.plan.seed is None:
            return None
        raise RecastError(f"{tries} images in a row cannot be read; the last: {reason}")


def joined(read: Sequence[Batch], bad: Sequence[str]) -> Loaded:
    """Batches of one image as one batch."""
    if not read:
        return Loaded(*NOTHING, tuple(bad))
    return Loaded(torch.cat([images for images, _ in read]), torch.cat([labels for _, labels in read]), tuple(bad))
