"""Batches whose images, order and augmentation depend only on (seed, epoch, position).

Batches of an epoch are numbered. Each process loads its share of every batch.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from recast.errors import RecastError, first_line
from recast.lab.data.datasets import MAX_BAD, LabelledImages
from recast.lab.data.seeding import balanced_epoch, epoch_order, mix_seed


class Loaded(NamedTuple):
    """A process's share of a batch, with the names of unreadable images."""

    images: Tensor
    labels: Any
    """A tensor, or the labels of another task."""
    bad: Sequence[str] = ()


NOTHING = Loaded(torch.empty(0), torch.empty(0, dtype=torch.long))
"""An empty share."""


@dataclass(eq=False)
class Loader:
    """Batches (images (B, C, S, S), labels (B,)) of one epoch, or one process's share of each; iterate over it once.

    Images are those of `LabelledImages.load`, mostly bytes: convert them with `in_unit` on the device that uses them.

    `len` is the number of batches over all processes from `start` on. The pixels of an image depend on (shuffle_seed,
    epoch, position in the order): they are bitwise equal for any batch size, start, workers and parts. Raises
    RecastError for an empty training set or one smaller than a batch (drop_last), an unreadable image, and a dead
    loader process.
    """

    dataset: LabelledImages
    batch_size: int
    """Images of a batch over all processes; the last batch of an epoch may be smaller."""
    _: KW_ONLY
    shuffle_seed: int | None = None
    """None keeps the order of the data set (evaluation); a number shuffles by (shuffle_seed, epoch)."""
    epoch: int = 0
    start: int = 0
    """Number of the first batch. Batches before it are not loaded, batches after it do not change."""
    every: int = 1
    """Load every N-th batch only, from `start` on."""
    workers: int = 0
    """Number of loader processes, at most one for each core; 0: images are read in this process."""
    repeats: int = 1
    """Repeated augmentation (Hoffer et al. 2020, as in DeiT): number of copies of each shuffled image, in a row; the
    epoch is cut to the size of the data set."""
    balanced: bool = False
    """Show every class equally often: images of rare ones several times in an epoch, of others some."""
    drop_last: bool = False
    """Drop the last batch of an epoch if it is smaller."""
    part: int = 0
    parts: int = 1
    """This loader yields images `[part::parts]` of each batch, and skips empty shares."""
    pin_memory: bool = False
    bad_image: Literal["stop", "skip"] = "stop"
    """An unreadable image raises RecastError ("stop"), or the next readable image and its label replace it ("skip"); in
    evaluation it is dropped."""
    bad_images: list[str] = field(default_factory=list, init=False)
    """Names of unreadable images so far, each once."""

    def __post_init__(self) -> None:
        size = len(self.dataset)
        self.batches = (size if self.drop_last else size + self.batch_size - 1) // self.batch_size
        if self.shuffle_seed is not None:
            if size == 0:
                raise RecastError("the data set has no training images; it can only be evaluated on")
            if self.batches == 0:
                raise RecastError(
                    f"batch_size {self.batch_size} is larger than the training set of {size} images, and incomplete "
                    f"batches are dropped: set data.batch_size to {size} or less"
                )
        self.numbers = range(self.start, self.batches, self.every)
        self.pin_memory = self.pin_memory and torch.cuda.is_available()  # without a GPU torch would warn

    def __len__(self) -> int:
        return self.batches - self.start

    def __iter__(self) -> Iterator[tuple[Tensor, Any]]:
        is_empty = True
        # twice: torch's report, which comes once, may also come while the inner one is left for another error
        with worker_errors(), worker_errors():
            is_here = not (self.workers or self.pin_memory)
            for item in map(self.__getitem__, self.numbers) if is_here else _from_processes(self):
                if isinstance(item, RecastError):
                    raise item
                self.bad_images += [name for name in dict.fromkeys(item.bad) if name not in self.bad_images]
                if len(item.labels):
                    is_empty = False
                    yield item.images, item.labels
        if is_empty and len(self.bad_images) >= min(MAX_BAD, max(1, len(self.dataset))):
            raise RecastError(f"no image could be read; the first is {self.bad_images[0]}. Check that the files exist")

    @cached_property
    def order(self) -> Tensor:
        """Return the indices of the epoch's images."""
        if self.balanced and self.shuffle_seed is not None:
            return balanced_epoch(self.dataset.labels, self.shuffle_seed, self.epoch, self.repeats)
        return epoch_order(len(self.dataset), self.shuffle_seed, self.epoch, self.repeats)

    def __getitem__(self, number: int) -> Loaded | RecastError:
        """Return this process's share of a batch, or its error: torch would wrap one that a loader process raises."""
        first = number * self.batch_size
        positions = range(len(self.dataset))[first : first + self.batch_size][self.part :: self.parts]
        try:
            return self._share(self.order[list(positions)].tolist(), positions)
        except RecastError as error:
            return error

    def _share(self, indices: Sequence[int], positions: range) -> Loaded:
        if not indices:
            return NOTHING
        seeds = [0] * len(indices)
        if self.dataset.augment is not None:
            seeds = [mix_seed("augment", self.shuffle_seed, self.epoch, position) for position in positions]
        try:
            return Loaded(*self.dataset.load(indices, seeds))
        except RecastError:
            if self.bad_image == "stop":
                raise
        readable, bad = [], []
        tries = min(len(self.dataset), MAX_BAD) if self.shuffle_seed is not None else 1
        for index, seed in zip(indices, seeds, strict=True):
            for candidate in range(index, index + tries):
                candidate %= len(self.dataset)
                try:
                    readable.append(self.dataset.load([candidate], [seed]))
                    break
                except RecastError as error:
                    reason = error
                    bad.append(self.dataset.image_name(candidate))
            else:
                if self.shuffle_seed is not None:
                    raise RecastError(f"{tries} images in a row cannot be read; the last: {reason}")
        images, labels = zip(*(readable or [NOTHING[:2]]), strict=True)
        return Loaded(torch.cat(images), self.dataset.joined(labels) if readable else labels[0], bad)


def _ignore_signals(_worker: int) -> None:
    """Ignore Ctrl-C, SIGTERM and SIGHUP, which reach every process of a run: only the main process handles them."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if number := getattr(signal, name, None):
            signal.signal(number, signal.SIG_IGN)


def _from_processes(source: Loader) -> Iterator[Loaded | RecastError]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        yield from DataLoader(
            source,  # type: ignore[arg-type]  # anything with items
            batch_size=None,  # an item is a batch
            sampler=source.numbers,
            num_workers=min(source.workers, cores),  # torch warns of more
            pin_memory=source.pin_memory,
            worker_init_fn=_ignore_signals,
            generator=torch.Generator(),  # else every epoch would draw a number from the global generator
        )
    except (RuntimeError, OSError, EOFError) as error:  # tensors of a dead process cannot be fetched
        if not source.workers or "DataLoader worker" in str(error):  # torch's report, or an error of the worker's code
            raise
        time.sleep(0.5)  # torch's signal handler may raise its report meanwhile
        raise _death(error) from None


_DIED = "DataLoader worker (pid"
"""Start of torch's reports about a dead loader process."""


@contextmanager
def worker_errors() -> Iterator[None]:
    """Turn torch's report about a dead loader process into a RecastError.

    torch raises it from a signal handler, anywhere in the main process: wrap the training loop too.
    """
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith(_DIED):
            raise
        traceback.clear_frames(error.__traceback__)  # ends the other processes now, not when the error is forgotten
        raise _death(error) from None


def _death(error: Exception) -> RecastError:
    return RecastError(
        f"a loader process died ({first_line(error).partition('. ')[0]}), usually out of memory: use fewer "
        "workers (--workers) or smaller batches, or in a container more shared memory (--shm-size). --workers 0 shows "
        "the error itself"
    )
