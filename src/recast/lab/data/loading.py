"""Batches whose images, order and augmentation depend only on (seed, epoch, position).

Batches of an epoch are numbered. Each process loads its share of every batch, each of its workers every N-th batch.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from recast.errors import RecastError, first_line
from recast.lab.data.datasets import MAX_BAD, LabelledImages
from recast.lab.data.seeding import mix_seed

WHOLE_VIEWS = 2
"""Number of views at full size, before the smaller ones of `Loader.local`."""


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

    `len` is the number of batches over all processes from `start` on. The pixels of an image depend on (shuffle_seed,
    epoch, position in the order): they are bitwise equal for any batch size, start, workers and parts. Raises
    RecastError for numbers out of range, an empty training set or one smaller than a batch (drop_last), an unreadable
    image, and a dead loader process.
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
    workers: int = 0
    """Number of loader processes; 0: images are read in this process."""
    repeats: int = 1
    """Repeated augmentation (Hoffer et al. 2020, as in DeiT): number of copies of each shuffled image, in a row; the
    epoch is cut to the size of the data set."""
    views: int = 1
    """Number of augmentations of each image; with more than one, batches are (B, views, C, S, S)."""
    local: LabelledImages | None = None
    """The same images, cut smaller: the source of views after the second (DINO's multi-crop)."""
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
        for name, least in (("batch_size", 1), ("repeats", 1), ("views", 1), ("workers", 0)):
            if (value := getattr(self, name)) < least:
                raise RecastError(f"{name} must be at least {least}, got {value}")
        if not 0 <= self.part < self.parts:
            raise RecastError(f"part must be one of 0 to {self.parts - 1}, got {self.part}")
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
            if self.batch_size < self.parts:
                raise RecastError(
                    f"batch_size {self.batch_size} is smaller than the number of processes ({self.parts}): raise it"
                )
        if not 0 <= self.start <= self.batches:
            raise RecastError(f"start must be between 0 and {self.batches} (batches of an epoch), got {self.start}")
        self.pin_memory = self.pin_memory and torch.cuda.is_available()  # without a GPU torch would warn

    def __len__(self) -> int:
        return self.batches - self.start

    def __iter__(self) -> Iterator[tuple[Tensor, Any]]:
        is_empty = True
        # twice: torch's report, which comes once, may also come while the inner one is left for another error
        with worker_errors(), worker_errors():
            for item in _from_processes(self) if self.workers or self.pin_memory else self.shares():
                if isinstance(item, RecastError):
                    raise item
                self.bad_images += [name for name in dict.fromkeys(item.bad) if name not in self.bad_images]
                if len(item.labels):
                    is_empty = False
                    yield item.images, item.labels
        if is_empty and len(self.bad_images) >= min(MAX_BAD, max(1, len(self.dataset))):
            raise RecastError(f"no image could be read; the first is {self.bad_images[0]}. Check that the files exist")

    def shares(self, worker: int = 0, workers: int = 1) -> Iterator[Loaded | RecastError]:
        """Yield this process's share of every batch from `start` on; with N workers, worker k yields every N-th batch.

        An error is yielded as the last item: torch would wrap one raised in a loader process in its traceback.
        """
        order = iter(self.dataset.order(self.shuffle_seed, self.epoch, self.repeats))
        positions = range(len(self.dataset))
        try:
            for number in range(self.batches):
                batch = positions[number * self.batch_size : (number + 1) * self.batch_size]
                items = list(islice(order, len(batch)))
                if number >= self.start and (number - self.start) % workers == worker:
                    yield self._share(items, batch)
        except RecastError as error:
            yield error

    def _share(self, items: Sequence[Any], positions: range) -> Loaded:
        slots = range(len(items))[self.part :: self.parts]
        if not slots:
            return NOTHING
        seeds = [0] * len(slots)
        if self.dataset.augment is not None:
            seeds = [mix_seed("augment", self.shuffle_seed, self.epoch, positions[slot]) for slot in slots]
        try:
            return self._load([items[slot] for slot in slots], seeds)
        except RecastError:
            if self.bad_image == "stop":
                raise
        readable, bad = [], []
        for slot, seed in zip(slots, seeds, strict=True):
            candidates = self.dataset.candidates(items, slot)
            for candidate in candidates if self.shuffle_seed is not None else candidates[:1]:
                try:
                    readable.append(self._load([candidate], [seed])[:2])
                    break
                except RecastError as error:
                    reason = error
                    bad.append(self.dataset.image_name(candidate))
            else:
                if self.shuffle_seed is not None:
                    raise RecastError(f"{len(candidates)} images in a row cannot be read; the last: {reason}")
        images, labels = zip(*(readable or [NOTHING[:2]]), strict=True)
        return Loaded(torch.cat(images), self.dataset.joined(labels) if readable else labels[0], bad)

    def _load(self, items: Sequence[Any], seeds: Sequence[int]) -> Loaded:
        """Load images and labels of items; every view has its own seeds, the first view those of a single one."""
        images, labels = self.dataset.load(items, seeds)
        if self.views == 1:
            return Loaded(images, labels)
        batches = [images]
        for view in range(1, self.views):
            source = self.dataset if view < WHOLE_VIEWS or self.local is None else self.local
            batches.append(source.load(items, [mix_seed("view", view, seed) for seed in seeds])[0])
        return Loaded(torch.stack(batches, 1), labels)


class _Shares(IterableDataset[Any]):
    """The data set of a loader process: its shares."""

    def __init__(self, source: Loader) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Loaded | RecastError]:
        worker = get_worker_info()
        return self.source.shares(worker.id, worker.num_workers) if worker else self.source.shares()


def _ignore_signals(_worker: int) -> None:
    """Ignore Ctrl-C, SIGTERM and SIGHUP, which reach every process of a run: only the main process handles them."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if number := getattr(signal, name, None):
            signal.signal(number, signal.SIG_IGN)


def _from_processes(source: Loader) -> Iterator[Loaded | RecastError]:
    try:
        yield from DataLoader(
            _Shares(source),
            batch_size=None,  # an item is a batch
            num_workers=source.workers,
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
        f"a loader process died ({first_line(error).partition('. ')[0]}), most often for lack of memory: use fewer "
        "workers (--workers) or smaller batches, or in a container more shared memory (--shm-size). --workers 0 shows "
        "the error itself"
    )
