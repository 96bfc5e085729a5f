"""Batches whose images, order and augmentation depend on (seed, epoch, position) and on nothing else.

An epoch is numbered batches. Every process gives its own share of each, and in it every loader worker its own batches.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice
from multiprocessing.process import BaseProcess
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from recast.errors import RecastError
from recast.lab.data.datasets import MAX_BAD, LabelledImages
from recast.lab.data.seeding import mix_seed

WHOLE_VIEWS = 2
"""Views of an image before those that are cut smaller, where there are such."""


class Loaded(NamedTuple):
    """A part's share of a batch; the names of unreadable images travel with it out of a loader process."""

    images: Tensor
    labels: Any
    """A tensor, or what the images' task takes."""
    bad: Sequence[str] = ()


NOTHING = Loaded(torch.empty(0), torch.empty(0, dtype=torch.long))
"""A share without an image."""


@dataclass(eq=False)
class Loader:
    """Batches (images (B, C, S, S), labels (B,)) of one epoch, or this part's share of each; iterate over it once.

    `len` is the number of batches, over all parts, from `start` on. An image's pixels follow from (shuffle_seed, epoch,
    its position in the order): bit for bit the same for any batch size, start, workers and parts. Raises RecastError
    for numbers out of range, for a training set that is empty or (drop_last) smaller than a batch, for an image that
    cannot be read, and when a loader process dies.
    """

    dataset: LabelledImages
    batch_size: int
    """Images of a batch over all parts; the last one of an epoch may be smaller."""
    _: KW_ONLY
    shuffle_seed: int | None = None
    """None keeps the order of the data set (evaluation); a number shuffles by (shuffle_seed, epoch)."""
    epoch: int = 0
    start: int = 0
    """Number of the first batch. Those before it are not loaded, those after it are the same as without it."""
    workers: int = 0
    """Loader processes; 0: images are read in this one."""
    repeats: int = 1
    """Repeated augmentation (Hoffer et al. 2020, as in DeiT): each shuffled image so many times, side by side, cut to
    the images of the data set; an epoch stays as long."""
    views: int = 1
    """Each image so many times, augmented anew: with more than one the images of a batch are (B, views, C, S, S)."""
    local: LabelledImages | None = None
    """What the views after the second are taken from: the same images, cut smaller (DINO's multi-crop)."""
    drop_last: bool = False
    """Leave the last batch of an epoch out if it is smaller."""
    part: int = 0
    parts: int = 1
    """Of the images of each batch this loader gives `[part::parts]`, passing over a share without any."""
    pin_memory: bool = False
    bad_image: Literal["stop", "skip"] = "stop"
    """An image that cannot be read is an error that names it ("stop"). "skip": the next readable image of the data set
    takes its place, with that one's label; in evaluation it is left out."""
    bad_images: list[str] = field(default_factory=list, init=False)
    """Names of the images that could not be read so far, each once."""

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
                raise RecastError("the data set has no training images: it can be evaluated on, not trained on")
            if self.batches == 0:
                raise RecastError(
                    f"a batch of {self.batch_size} is larger than the training set of {size} images, and an incomplete "
                    f"batch is dropped: set data.batch_size to {size} or less"
                )
            if self.batch_size < self.parts:
                raise RecastError(
                    f"a batch of {self.batch_size} leaves some of {self.parts} processes without an image: raise it"
                )
        if not 0 <= self.start <= self.batches:
            raise RecastError(f"start must be between 0 and {self.batches} (the batches of an epoch), got {self.start}")
        self.pin_memory = self.pin_memory and torch.cuda.is_available()  # without a GPU torch would warn

    def __len__(self) -> int:
        return self.batches - self.start

    def __iter__(self) -> Iterator[tuple[Tensor, Any]]:
        given = 0
        # Twice: torch's handler speaks once, and that may be while the inner one is being left for another error.
        with worker_errors(), worker_errors():
            for item in _from_processes(self) if self.workers or self.pin_memory else self.shares():
                if isinstance(item, RecastError):
                    raise item
                self.bad_images += [name for name in dict.fromkeys(item.bad) if name not in self.bad_images]
                if len(item.labels):
                    given += 1
                    yield item.images, item.labels
        if not given and len(self.bad_images) >= min(MAX_BAD, max(1, len(self.dataset))):
            raise RecastError(f"not one image could be read; the first is {self.bad_images[0]}. Are the files there?")

    def shares(self, worker: int = 0, workers: int = 1) -> Iterator[Loaded | RecastError]:
        """This part's share of every batch from `start` on; of several workers each gives every so manieth.

        An error comes as the last item: raised in a loader process, torch would wrap it in that one's traceback.
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
        found, bad = [], []
        for slot, seed in zip(slots, seeds, strict=True):
            candidates = self.dataset.candidates(items, slot)
            for candidate in candidates if self.shuffle_seed is not None else candidates[:1]:
                try:
                    found.append(self._load([candidate], [seed])[:2])
                    break
                except RecastError as error:
                    reason = error
                    bad.append(self.dataset.image_name(candidate))
            else:
                if self.shuffle_seed is not None:
                    raise RecastError(f"{len(candidates)} images in a row cannot be read; the last: {reason}")
        images, labels = zip(*(found or [NOTHING[:2]]), strict=True)
        return Loaded(torch.cat(images), self.dataset.joined(labels) if found else labels[0], bad)

    def _load(self, items: Sequence[Any], seeds: Sequence[int]) -> Loaded:
        """Images and labels of items; every view has seeds of its own, the first those of a single one."""
        images, labels = self.dataset.load(items, seeds)
        if self.views == 1:
            return Loaded(images, labels)
        found = [images]
        for view in range(1, self.views):
            source = self.dataset if view < WHOLE_VIEWS or self.local is None else self.local
            found.append(source.load(items, [mix_seed("view", view, seed) for seed in seeds])[0])
        return Loaded(torch.stack(found, 1), labels)


class _Shares(IterableDataset[Any]):
    """What a loader process iterates over."""

    def __init__(self, source: Loader) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Loaded | RecastError]:
        worker = get_worker_info()
        return self.source.shares(worker.id, worker.num_workers) if worker else self.source.shares()


def _ignore_signals(_worker: int) -> None:
    """Ctrl-C, a queue's SIGTERM and a terminal's SIGHUP reach every process of a run: only the main one decides, and it
    still needs data."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if number := getattr(signal, name, None):
            signal.signal(number, signal.SIG_IGN)


_PROCESSES: list[BaseProcess] = []
"""Loader processes that may be running."""


def _from_processes(source: Loader) -> Iterable[Loaded | RecastError]:
    iterator: Any = iter(
        DataLoader(
            _Shares(source),
            batch_size=None,  # an item is a batch already
            num_workers=source.workers,
            pin_memory=source.pin_memory,
            worker_init_fn=_ignore_signals,
            generator=torch.Generator(),  # else every epoch would draw a number from the global generator
        )
    )
    _PROCESSES[:] = [process for process in _PROCESSES if process.exitcode is None]
    _PROCESSES.extend(getattr(iterator, "_workers", ()))
    yield from iterator


@contextmanager
def worker_errors() -> Iterator[None]:
    """Turns what torch raises when a loader process has died into a RecastError that says what can be done.

    torch raises it from a signal handler, wherever the main process happens to be: put this around the loop too.
    """
    try:
        yield
    except (RuntimeError, OSError, EOFError) as error:
        try:
            died = _death(error)
        except RuntimeError:  # torch's handler, before `_death` had suppressed it; it speaks once
            died = _death(error)
        if died is None:
            raise error
        traceback.clear_frames(error.__traceback__)  # ends the other processes now, not when the error is forgotten
        raise died from None


def _death(error: Exception) -> RecastError | None:
    """The error about the first loader process that ended badly, as soon as that is seen; None if none did.

    Meanwhile torch's handler of the signal that a child has ended raises its RuntimeError, if it still has to. Where
    that cuts off the question for the exit code, the code is lost: the process is then one that no longer exists.
    """
    # A tensor that could not be fetched from the dead is an OSError or EOFError, and may be the first sign.
    until = time.monotonic() + (0.2 if isinstance(error, RuntimeError) else 2.0)
    while _PROCESSES and time.monotonic() < until:
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
