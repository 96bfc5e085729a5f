"""Validation, metrics.jsonl, and a line per epoch on the terminal."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from threading import Event
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from recast.analysis.wakefulness import wakefulness
from recast.errors import RecastError, listed
from recast.files import write_text
from recast.lab.config import DataConfig, Recipe
from recast.lab.data import Data, Loader
from recast.lab.evaluation.suites import METRICS
from recast.lab.folder.files import json_line, read_lines
from recast.lab.folder.records import Epoch, Wakefulness
from recast.lab.task import task_named, task_of
from recast.lab.training.checkpoint import Position
from recast.lab.training.distributed import Stopped, is_first, process_count, process_number, sum_over_processes_
from recast.layers.cmhsa import GatedLayer, recast_layers
from recast.layers.gpsa import GPSA


@torch.no_grad()
def validate(
    model: nn.Module,
    data: Data,
    config: DataConfig,
    device: torch.device,
    skipped: list[str] | None = None,
    stop: Event | None = None,
) -> tuple[float, ...]:
    """Return the mean loss over `data.val` and the metrics of `Task.validation`, in full precision.

    The model is left in eval mode. The names of unreadable images go to `skipped`. Several processes share the images,
    each is counted once.

    Raises:
        RecastError: for outputs that do not fit the task, and if no image is left.
        Stopped: if `stop` is set, unless several processes share the validation.
    """
    model.eval()
    meter = task_named(data.val.task).meter(data)
    totals = torch.zeros(2, dtype=torch.float64)  # loss, images
    workers, part, parts = config.workers, process_number(), process_count()
    loader = Loader(data.val, config.batch_size, workers=workers, part=part, parts=parts, bad_image=config.bad_image)
    for pixels, labels in loader:
        if stop is not None and stop.is_set() and process_count() == 1:
            raise Stopped
        loss = meter.add(model, data.normalised(pixels, device), labels)
        totals += torch.tensor([loss, len(labels)], dtype=torch.float64)
    for name in loader.bad_images:
        warnings.warn(f"{name} cannot be read: skipped in validation", stacklevel=2)
    if skipped is not None:
        skipped += loader.bad_images
    loss, images = sum_over_processes_(totals, device).tolist()
    if images == 0:
        raise RecastError(f"{data.name} has no readable validation images")
    return loss / images, *meter.values(sum_over_processes_(meter.sums, device))


@torch.no_grad()
def heads_of(model: nn.Module, images: list[Tensor]) -> dict[str, dict[str, Any]]:
    """Return gate, backend and wakefulness of the heads of every recast layer, its gates, and the spans of GPSA."""
    awake = wakefulness(model, images) if recast_layers(model) else {}
    rows: dict[str, dict[str, Any]] = {}
    for name, layer in recast_layers(model).items():
        rows[name] = {"gate": layer.config.gate, "backend": layer.chosen_backend(), **awake.get(name, {})}
        if isinstance(layer, GatedLayer):
            rows[name] |= {gate: values.tolist() for gate, values in layer.gates().items()}
        if isinstance(layer, GPSA):
            rows[name]["span"] = layer.spans().tolist()
    return rows


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl; damaged lines are skipped."""
    lines = read_lines(path)[0] if path.is_file() else []
    return [row for _, row in lines if isinstance(row.get("epoch"), int)]


class Journal:
    """Rows of metrics.jsonl, and a line per epoch on stderr with a bar on a terminal; `shown=False` shows nothing.

    Only the first process writes and shows.
    """

    def __init__(self, recipe: Recipe, path: Path, name: str, batches: int, shown: bool) -> None:
        self.recipe, self.name, self.path, self.batches = recipe, name, path, batches
        self.shown, self.console = shown and is_first(), Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        disable = not (self.shown and self.console.is_terminal)
        self.bar = Progress(
            *columns, TextColumn("{task.fields[note]}"), console=self.console, transient=True, disable=disable
        )
        self.progress = self.bar.add_task(name, total=recipe.epochs * batches, note="", visible=False)

    def open(self, epoch: int) -> Progress:
        """Drop the rows from `epoch` on, which the run writes again; returns the bar, a context manager."""
        if is_first():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            rows = [row for row in read_metrics(self.path) if row["epoch"] < epoch]
            if self.path.exists():  # else the first row makes it: a refused network leaves nothing
                write_text(self.path, "".join(map(json_line, rows)))
            if missing := sorted(set(range(epoch)) - {row["epoch"] for row in rows}):
                warnings.warn(f"{self.path} lacks epoch {listed([*map(str, missing)], 5)}", stacklevel=3)
        return self.bar

    def start_epoch(self, position: Position) -> None:
        """Show the epoch and the batches that were trained before."""
        description = f"{self.name} epoch {position.epoch}/{self.recipe.epochs}"
        done = (position.epoch - 1) * self.batches + position.step
        self.bar.reset(self.progress, description=description, completed=done, visible=True)

    def step(self, loss: float, lr: float, position: Position) -> None:
        """Count a batch."""
        speed = self.recipe.data.batch_size * position.step / max(position.seconds, 1e-9)
        note = f"loss {loss:.3f}  lr {lr:.1e}  {speed:,.0f} images/s  data {position.wait:.0%}"
        self.bar.update(self.progress, advance=1, note=note)

    def write(self, row: Epoch) -> None:
        """Append the row of an epoch, flush it to the disk, and show a line."""
        if not is_first():
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json_line(row.to_dict()))
            file.flush()
            os.fsync(file.fileno())
        train = "before training  " if row.train_loss is None else f"train loss {row.train_loss:.3f} "
        text = f"{self.name:>9}  epoch {row.epoch:>3}/{self.recipe.epochs}  {train} "
        metric = task_of(self.recipe.task).main[1]
        text += (
            f"val loss {row.val_loss:.3f}  {METRICS[metric].in_text} {row.metrics[metric]:.2f} %  {row.seconds:.1f} s"
        )
        if row.train_loss is not None:
            text += f"  {row.images_per_second:,.0f} images/s  data {row.data_wait:.0%}{self._left(row)}"
        self.say(text)
        attention = Wakefulness.of(row.layers)
        if attention is not None and row.epoch == self.recipe.epochs > 0:
            remedy = attention.remedy(self.recipe.recast.query_key)
            self.say(f"note: {attention}" + (f": {remedy}" if remedy else ""))

    def _left(self, row: Epoch) -> str:
        """Return the time left for a log, in which no bar shows it: that of this arm and of a control arm after it."""
        has_control = self.recipe.control and self.name == "recast"
        seconds = (row.seconds or 0) * (self.recipe.epochs * (1 + has_control) - row.epoch)
        if self.console.is_terminal or not seconds:
            return ""
        time = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
        return f"  about {time} left" + " with the control arm" * has_control

    def say(self, text: str) -> None:
        """Show a line above the bar."""
        if self.shown:
            self.console.print(text, highlight=False, soft_wrap=True)
