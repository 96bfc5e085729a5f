"""Batches whose images, order and augmentation depend on (seed, epoch, position) and on nothing else."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from recast.data.batches import MAX_BAD, Batch, Epoch, Loaded, MapBatches, epoch_order
from recast.data.seeding import mix_seed, seeded
from recast.data.streaming import ImageStream, StreamBatches
from recast.errors import RecastError

__all__ = ["Loader", "loader", "mix_seed", "seeded", "worker_errors"]

BadImage = Literal["stop", "skip"]


def loader(
    dataset: Dataset[tuple[Tensor, int]],
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
    size = len(dataset)  # type: ignore[arg-type]
    plan = Epoch(size, batch_size, shuffle_seed, epoch, drop_last, part, parts, bad_image == "skip")
    if shuffle_seed is not None:
        _check_training(size, len(plan), batch_size, parts)
    if not 0 <= start <= len(plan):
        raise RecastError(f"start must be between 0 and {len(plan)} (the batches of an epoch), got {start}")
    if isinstance(dataset, ImageStream):
        return Loader(StreamBatches(dataset, plan, start, repeats), plan, start, workers, pin_memory)
    batches = MapBatches(dataset, epoch_order(size, shuffle_seed, epoch, repeats), plan)
    return Loader(batches, plan, start, workers, pin_memory)


def _check_training(images: int, batches: int, batch_size: int, parts: int) -> None:
    if images == 0:
        raise RecastError("the data set has no training images: it can be evaluated on, not trained on")
    if batches == 0:
        raise RecastError(
            f"a batch of {batch_size} is larger than the training set of {images} images, and an incomplete batch is "
            f"dropped: set data.batch_size to {images} or less"
        )
    if batch_size < parts:
        raise RecastError(f"a batch of {batch_size} leaves some of {parts} processes without an image: set it higher")


class Loader:
    """One epoch of batches; iterate over it once. `len` is the number of batches, over all parts, from `start` on."""

    def __init__(
        self, batches: MapBatches | StreamBatches, plan: Epoch, start: int, workers: int, pin_memory: bool
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
        return _watched(
            DataLoader(
                self.batches,
                batch_size=None,  # an item is a batch already
                sampler=in_order,
                num_workers=self.workers,
                collate_fn=_unchanged,
                pin_memory=self.pin_memory,
                worker_init_fn=_hear_no_signal,
                generator=torch.Generator(),  # else every epoch would draw a number from the global generator
            )
        )


def _hear_no_signal(_worker: int) -> None:
    """Ctrl-C and a queue's SIGTERM reach every process of a run: only the main one decides, and it still needs data."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _unchanged(item: Any) -> Any:
    return item


def _watched(source: DataLoader[Any]) -> Iterator[Loaded | RecastError]:
    """The items of the loader processes; RecastError if one of these dies."""
    iterator = iter(source)
    try:
        yield from iterator
        return
    except (RuntimeError, OSError, EOFError) as error:  # the last two: a tensor could not be fetched from the dead
        died = _death(error)
        if died is not None or not isinstance(error, RuntimeError):
            died = _death_of(getattr(iterator, "_workers", ())) or died
        if died is None:
            raise
    del iterator  # ends the other processes now, not when the exception is forgotten
    raise died


def _death_of(processes: Sequence[BaseProcess], seconds: float = 2.0) -> RecastError | None:
    """The error about the first process that ended badly, as soon as that is seen.

    Meanwhile torch's handler of the signal that a child has ended raises its RuntimeError, if it still has to. Where
    that cuts off the question for the exit code, the code is lost, and torch's words have to do.
    """
    heard, until = None, time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            time.sleep(0.01)
            for process in processes:
                code = process.exitcode or 0
                if code:
                    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                    return _dead(str(process.pid), how)
        except RuntimeError as error:
            heard, until = _death(error) or heard, min(until, time.monotonic() + 0.2)
    return heard


@contextmanager
def worker_errors() -> Iterator[None]:
    """Turns torch's error about a dead loader process into a RecastError that says what can be done.

    torch raises it from a signal handler, wherever the main process happens to be: put this around the loop too.
    """
    try:
        yield
    except RuntimeError as error:
        if (died := _death(error)) is None:
            raise
        raise died from None


def _death(error: Exception) -> RecastError | None:
    """torch's message about a dead loader process in our words; None for any other error."""
    found = re.search(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) ([^.]*)", str(error))
    return None if found is None else _dead(found[1], found[2].strip())


def _dead(pid: str, how: str) -> RecastError:
    return RecastError(
        f"a loader process died (pid {pid}: {how}). Most often memory ran out: use fewer workers (--workers) or "
        "smaller batches, or in a container more shared memory (--shm-size). --workers 0 shows the error itself"
    )
