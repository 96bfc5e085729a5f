"""Batches whose images, order and augmentation depend on (seed, epoch, position) and on nothing else.

An epoch is numbered batches, each of which can be made by itself, in any process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from recast.data.datasets import LabelledImages
from recast.data.seeding import mix_seed
from recast.errors import RecastError

T = TypeVar("T")
Batch = tuple[Tensor, Tensor]
BadImage = Literal["stop", "skip"]

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

    def seeds(self, positions: Sequence[int], dataset: LabelledImages) -> list[int]:
        """A seed for the augmentation of each image, by its position alone; zeros where there is none."""
        if dataset.augment is None:
            return [0] * len(positions)
        return [mix_seed("augment", self.seed, self.epoch, position) for position in positions]

    def read_singly(
        self,
        choices: Iterable[Sequence[T]],
        seeds: Sequence[int],
        read: Callable[[T, int], Batch],
        name: Callable[[T], str],
        failure: str,
    ) -> Loaded:
        """Of the choices for each image the first one, or in training the next that can be read (`skip`).

        In evaluation an image that cannot be read is left out. Raises RecastError, with `failure` before the reason,
        where none of the choices can be read.
        """
        found, bad = [], []
        for candidates, seed in zip(choices, seeds, strict=True):
            for candidate in candidates if self.skip and self.seed is not None else candidates[:1]:
                try:
                    found.append(read(candidate, seed))
                    break
                except RecastError as error:
                    if not self.skip:
                        raise
                    reason = error
                    bad.append(name(candidate))
            else:
                if self.seed is not None:
                    raise RecastError(f"{failure}; the last: {reason}")
        images, labels = zip(*(found or [NOTHING]), strict=True)
        return Loaded(torch.cat(images), torch.cat(labels), tuple(bad))


@dataclass(frozen=True, eq=False)
class MapBatches(Dataset[Any]):
    """Item i is this part's share of the i-th batch of the epoch, or the RecastError that it ended in."""

    dataset: LabelledImages
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
                size = len(self.order)
                tries = min(size, MAX_BAD)
                return self.plan.read_singly(
                    [[i % size for i in range(index, index + tries)] for index in indices],
                    seeds,
                    lambda index, seed: self._read([index], [seed]),
                    self.dataset.image_name,
                    f"{tries} images in a row cannot be read",
                )
        except RecastError as error:
            return error

    def _read(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        return self.dataset.batch(indices, seeds) if indices else NOTHING


def loader(
    dataset: LabelledImages,
    batch_size: int,
    *,
    shuffle_seed: int | None = None,
    epoch: int = 0,
    start: int = 0,
    workers: int = 0,
    repeats: int = 1,
    drop_last: bool = False,
    part: int = 0,
    parts: int = 1,
    pin_memory: bool = False,
    bad_image: BadImage = "stop",
) -> Loader:
    """Batches (images (B, C, S, S), labels (B,)) of one epoch, or this part's share of each.

    batch_size: images of a batch over all parts. The last batch of an epoch may be smaller; `drop_last` leaves it out.
    shuffle_seed: None keeps the order of the data set (evaluation); a number shuffles by (shuffle_seed, epoch).
    start: number of the first batch. The batches before it are not loaded, those after it are the same as without it.
    repeats: repeated augmentation (Hoffer et al. 2020, as in DeiT): the order is each shuffled image so many times,
    side by side, cut to the images of the data set; an epoch stays as long.
    part, parts: of each batch's indices this loader gives `indices[part::parts]`. Together the parts give the whole
    batch; a share without an image is passed over.
    bad_image: "stop" raises RecastError with the name of an image that cannot be read. "skip" puts the next readable
    image of the data set in its place, with that one's label; in evaluation it is left out. `bad_images` names them.

    An image's pixels follow from (shuffle_seed, epoch, its position in the order): bit for bit the same for any batch
    size, start, workers and parts. Raises RecastError for numbers out of range, for a training set that is empty or
    (drop_last) smaller than a batch, and when a loader process dies.
    """
    for name, value, least in (("batch_size", batch_size, 1), ("repeats", repeats, 1), ("workers", workers, 0)):
        if value < least:
            raise RecastError(f"{name} must be at least {least}, got {value}")
    if not 0 <= part < parts:
        raise RecastError(f"part must be one of 0 to {parts - 1}, got {part}")
    size = len(dataset)
    plan = Epoch(size, batch_size, shuffle_seed, epoch, drop_last, part, parts, bad_image == "skip")
    if shuffle_seed is not None:
        if size == 0:
            raise RecastError("the data set has no training images: it can be evaluated on, not trained on")
        if len(plan) == 0:
            raise RecastError(
                f"a batch of {batch_size} is larger than the training set of {size} images, and an incomplete batch is "
                f"dropped: set data.batch_size to {size} or less"
            )
        if batch_size < parts:
            raise RecastError(f"a batch of {batch_size} leaves some of {parts} processes without an image: raise it")
    if not 0 <= start <= len(plan):
        raise RecastError(f"start must be between 0 and {len(plan)} (the batches of an epoch), got {start}")
    streamed = getattr(dataset, "batches", None)
    batches: MapBatches | IterableDataset[Any] = (
        MapBatches(dataset, epoch_order(size, shuffle_seed, epoch, repeats), plan)
        if streamed is None
        else streamed(plan, start, repeats)
    )
    return Loader(batches, plan, start, workers, pin_memory)


class Loader:
    """One epoch of batches; iterate over it once. `len` is the number of batches, over all parts, from `start` on."""

    def __init__(
        self, batches: MapBatches | IterableDataset[Any], plan: Epoch, start: int, workers: int, pin_memory: bool
    ) -> None:
        self.batches, self.plan, self.start, self.workers = batches, plan, start, workers
        self.pin_memory = pin_memory and torch.cuda.is_available()  # without a GPU torch would warn
        self.bad_images: list[str] = []
        """Names of the images that could not be read so far, each once."""

    def __len__(self) -> int:
        return len(self.plan) - self.start

    def __iter__(self) -> Iterator[Batch]:
        given = 0
        with worker_errors():
            for item in self._source():
                if isinstance(item, RecastError):  # raised here: torch would wrap it in the worker's traceback
                    raise item
                self.bad_images += [name for name in dict.fromkeys(item.bad) if name not in self.bad_images]
                if len(item.labels):
                    given += 1
                    yield item.images, item.labels
        if not given and len(self.bad_images) >= min(MAX_BAD, max(1, self.plan.size)):
            raise RecastError(f"not one image could be read; the first is {self.bad_images[0]}. Are the files there?")

    def _source(self) -> Iterable[Loaded | RecastError]:
        in_order = range(self.start, len(self.plan)) if isinstance(self.batches, MapBatches) else None
        if not (self.workers or self.pin_memory):
            return iter(self.batches) if in_order is None else map(self.batches.__getitem__, in_order)
        return _from_processes(
            DataLoader(
                self.batches,
                batch_size=None,  # an item is a batch already
                sampler=in_order,
                num_workers=self.workers,
                collate_fn=_unchanged,
                pin_memory=self.pin_memory,
                worker_init_fn=_ignore_signals,
                generator=torch.Generator(),  # else every epoch would draw a number from the global generator
            )
        )


def _ignore_signals(_worker: int) -> None:
    """Ctrl-C and a queue's SIGTERM reach every process of a run: only the main one decides, and it still needs data."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _unchanged(item: Any) -> Any:
    return item


_PROCESSES: list[BaseProcess] = []
"""Loader processes that may be running."""


def _from_processes(source: DataLoader[Any]) -> Iterator[Loaded | RecastError]:
    iterator: Any = iter(source)
    _PROCESSES[:] = [process for process in _PROCESSES if process.exitcode is None]
    _PROCESSES.extend(getattr(iterator, "_workers", ()))
    try:
        yield from iterator
        return
    except (RuntimeError, OSError, EOFError) as error:
        if (died := _death(error)) is None:
            raise
    del iterator  # ends the other processes now, not when the exception is forgotten
    raise died


@contextmanager
def worker_errors() -> Iterator[None]:
    """Turns what torch raises when a loader process has died into a RecastError that says what can be done.

    torch raises it from a signal handler, wherever the main process happens to be: put this around the loop too.
    """
    try:
        yield
    except RuntimeError as error:
        if (died := _death(error)) is None:
            raise
        raise died from None


def _death(error: Exception) -> RecastError | None:
    """The error about the first loader process that ended badly, as soon as that is seen; None if none did.

    Meanwhile torch's handler of the signal that a child has ended raises its RuntimeError, if it still has to. Where
    that cuts off the question for the exit code, the code is lost: the process is then one that no longer exists.
    """
    # A tensor that could not be fetched from the dead is an OSError or EOFError, and may be the first sign.
    until = time.monotonic() + (0.2 if isinstance(error, RuntimeError) else 2.0)
    while time.monotonic() < until:
        with suppress(RuntimeError):
            for process in _PROCESSES:
                if how := _bad_end(process):
                    _PROCESSES.clear()
                    return RecastError(
                        f"a loader process died (pid {process.pid}: {how}). Most often memory ran out: use fewer "
                        "workers (--workers) or smaller batches, or in a container more shared memory (--shm-size). "
                        "--workers 0 shows the error itself"
                    )
            time.sleep(0.01)
    return None


def _bad_end(process: BaseProcess) -> str:
    """How a process ended that should not have; empty: it runs, or has done its work."""
    if code := process.exitcode:
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    try:
        if code is None:
            os.kill(process.pid or 0, 0)  # asks, and does nothing
    except ProcessLookupError:
        return "exit code unknown"
    return ""
