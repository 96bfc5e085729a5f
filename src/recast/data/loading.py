"""Batches in an order, and with an augmentation, that depend on (seed, epoch, batch number) and on nothing else."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from recast.data.datasets import LabelledImages
from recast.errors import RecastError

Batch = tuple[Tensor, Tensor]


def loader(
    dataset: Dataset[tuple[Tensor, int]],
    batch_size: int,
    *,
    shuffle_seed: int | None = None,
    epoch: int = 0,
    start: int = 0,
    workers: int = 0,
) -> DataLoader[Batch]:
    """Batches (images (B, C, S, S), labels (B,)) of one epoch; the last one may be smaller.

    shuffle_seed: None keeps the order of the data set; a number shuffles by (shuffle_seed, epoch).
    start: number of the first batch. The batches before it are not loaded, those after it are the same as without it,
    bit for bit and for any number of workers: an interrupted epoch goes on where it stopped.
    """
    if batch_size < 1 or workers < 0:
        raise RecastError(f"batch_size must be at least 1 and workers at least 0, got {batch_size=} {workers=}")
    batches = _Batches(dataset, batch_size, shuffle_seed, epoch)
    if shuffle_seed is not None and len(batches) == 0:
        raise RecastError("the data set has no training images: it can be evaluated on, not trained on")
    if not 0 <= start <= len(batches):
        raise RecastError(f"start must be between 0 and {len(batches)} (the batches of an epoch), got {start}")
    return _Loader(
        batches,
        batch_size=None,  # an item of `_Batches` is a batch already
        sampler=range(start, len(batches)),
        num_workers=workers,
        generator=torch.Generator(),  # else every epoch would draw a number from the global generator
    )


class _Batches(Dataset[Any]):
    """Item i is the i-th batch of the epoch."""

    def __init__(self, dataset: Dataset[tuple[Tensor, int]], batch_size: int, seed: int | None, epoch: int) -> None:
        self.dataset, self.batch_size, self.key = dataset, batch_size, (seed, epoch)
        self.size = len(dataset)  # type: ignore[arg-type]
        if seed is None:
            self.order = torch.arange(self.size)
        else:
            generator = torch.Generator().manual_seed(mix_seed("order", *self.key))
            self.order = torch.randperm(self.size, generator=generator)

    def __len__(self) -> int:
        return -(-self.size // self.batch_size)

    def __getitem__(self, number: int) -> Batch | RecastError:
        indices = self.order[number * self.batch_size : (number + 1) * self.batch_size].tolist()
        try:
            with seeded(mix_seed("augment", *self.key, number)):
                if isinstance(self.dataset, LabelledImages):
                    return self.dataset.batch(indices)
                return tuple(default_collate([self.dataset[index] for index in indices]))
        except RecastError as error:
            return error


class _Loader(DataLoader[Batch]):
    """Raises here what a worker process could not read: torch would wrap the message in the worker's traceback."""

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        for batch in super().__iter__():
            if isinstance(batch, RecastError):
                raise batch
            yield batch


def mix_seed(*parts: object) -> int:
    """A seed below 2^63 for any mix of numbers and words; neighbouring numbers give unrelated seeds."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global CPU generators of torch, numpy and random (timm's transforms draw from all), and restore them."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
