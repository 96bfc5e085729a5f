"""What training shows: a bar on a terminal, one line per epoch anywhere. On stderr, so that stdout is free for data."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from recast.training.checkpoint import Position

T = TypeVar("T")

MUCH_WAITING = 0.2
"""Share of an epoch's time, spent waiting for data, from which on it is worth a word."""

WORTH_SECONDS = 5.0
"""Epochs shorter than this are not worth it."""


class Display:
    """A bar with loss, learning rate and images/s for the current epoch; `shown=False` shows nothing at all."""

    def __init__(self, name: str, epochs: int, steps: int, batch_size: int, shown: bool) -> None:
        self.name, self.epochs, self.batch_size, self.shown = name, epochs, batch_size, shown
        self.warned = False
        self.console = Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        disable = not (shown and self.console.is_terminal)
        self.bar = Progress(
            *columns, TextColumn("{task.fields[note]}"), console=self.console, transient=True, disable=disable
        )
        self.task = self.bar.add_task(name, total=steps, note="", visible=False)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.bar.stop()

    def start_epoch(self, epoch: int, done: int) -> None:
        """Empty the bar for a new epoch, `done` batches of which were trained before."""
        self.bar.reset(self.task, description=f"{self.name} epoch {epoch}/{self.epochs}", completed=done, visible=True)

    def step(self, loss: float, lr: float, position: Position) -> None:
        """One more batch."""
        speed = position.step * self.batch_size / max(position.seconds, 1e-9)
        waiting = f"  waiting for data {share:.0%}" if (share := waited(position)) >= MUCH_WAITING else ""
        self.bar.update(self.task, advance=1, note=f"loss {loss:.3f}  lr {lr:.1e}  {speed:,.0f} images/s{waiting}")

    def row(self, row: dict[str, Any], workers: int) -> None:
        """A line for a finished epoch."""
        if not self.shown:
            return
        train = "before training  " if row["train_loss"] is None else f"train loss {row['train_loss']:.3f} "
        text = f"{self.name:>9}  epoch {row['epoch']:>3}/{self.epochs}  {train} "
        text += f"val loss {row['val_loss']:.3f}  top-1 {row['val_top1']:.2f} %  {row['seconds']:.1f} s"
        if row["train_loss"] is not None:
            text += f"  {row['images_per_second']:,.0f} images/s  data {row['data_wait']:.0%}"
        self.console.print(text, highlight=False, soft_wrap=True)
        if row["bad_images"] or row["bad_val_images"]:
            self.note(
                f"{row['bad_images']} training images could not be read, others took their places; "
                f"{row['bad_val_images']} of validation are left out"
            )
        waiting = row["data_wait"] or 0.0
        if waiting >= MUCH_WAITING and row["seconds"] > WORTH_SECONDS and not self.warned:
            self.warned = True
            self.note(
                f"{waiting:.0%} of the time went into waiting for data: set data.workers (now {workers}; this machine "
                f"has {os.cpu_count()} cores), or store the images smaller"
            )

    def note(self, text: str) -> None:
        """One line beside the bar."""
        if self.shown:
            self.console.print(f"note: {text}", highlight=False, soft_wrap=True)


def waited(position: Position) -> float:
    """Share of the epoch's time so far that was spent waiting for data."""
    return position.waited / position.seconds if position.seconds else 0.0


@dataclass(frozen=True)
class Timed(Generic[T]):
    """Something that was waited for."""

    item: T
    asked: float
    """When the item was asked for."""
    waited: float
    """Seconds until it came."""


def timed(source: Iterable[T]) -> Iterator[Timed[T]]:
    """The items of `source`, and how long each took to come."""
    items = iter(source)
    while True:
        asked = time.perf_counter()
        try:
            item = next(items)
        except StopIteration:
            return
        yield Timed(item, asked, time.perf_counter() - asked)
