"""What training shows: a bar on a terminal, one line per epoch anywhere. On stderr, so that stdout is free for data."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """A bar with loss and learning rate for the current epoch; `shown=False` shows nothing at all."""

    def __init__(self, name: str, epochs: int, steps: int, shown: bool) -> None:
        self.name, self.epochs, self.shown = name, epochs, shown
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

    def step(self, loss: float, lr: float) -> None:
        """One more batch."""
        self.bar.update(self.task, advance=1, note=f"loss {loss:.3f}  lr {lr:.1e}")

    def row(self, row: dict[str, Any]) -> None:
        """A line for a finished epoch."""
        if not self.shown:
            return
        train = "before training  " if row["train_loss"] is None else f"train loss {row['train_loss']:.3f} "
        text = f"{self.name:>9}  epoch {row['epoch']:>3}/{self.epochs}  {train} "
        text += f"val loss {row['val_loss']:.3f}  top-1 {row['val_top1']:.2f} %  {row['seconds']:.1f} s"
        self.console.print(text, highlight=False, soft_wrap=True)
