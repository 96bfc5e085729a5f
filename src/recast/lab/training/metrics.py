"""What a training measures and tells: validation, metrics.jsonl, the terminal, TensorBoard and Weights & Biases."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from threading import Event
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from recast.analysis.records import Wakefulness
from recast.analysis.wakefulness import wakefulness
from recast.errors import RecastError, optional_package
from recast.files import read_lines, sealed, write_text
from recast.lab.config import Recipe
from recast.lab.data import Data, Loader
from recast.lab.device import peak_bytes
from recast.lab.recipe import recipe_to_dict
from recast.lab.records import Epoch
from recast.lab.report.formats import duration, memory
from recast.lab.suites import METRICS
from recast.lab.tasks import task_of
from recast.lab.training.checkpoint import Position
from recast.lab.training.distributed import Stopped, is_first, process_count, process_number, sum_over_processes_
from recast.layers.cmhsa import recast_layers
from recast.layers.gpsa import GPSA

MUCH_WAITING = 0.2
"""Share of an epoch's time, spent waiting for data, from which on it is worth a word."""
WORTH_SECONDS = 5.0
"""Epochs shorter than this are not worth it."""
TIMED_STEPS = 20
"""Steps after which an arm's time and memory are told."""
LONG = 300.0
"""Seconds: of a shorter training they are not."""
SCALARS = (
    "train_loss", "val_loss", "lr", "gate_lr", "seconds", "images_per_second", "data_wait", "bad_images",
)  # fmt: skip
"""What of a row trackers are sent, with the metrics."""

Tracker = Callable[[int, dict[str, float]], object]
"""(epoch, numbers of that epoch)."""


@torch.no_grad()
def validate(
    model: nn.Module, data: Data, recipe: Recipe, device: torch.device, left_out: list[str] | None = None,
    stop: Event | None = None,
) -> tuple[float, ...]:  # fmt: skip
    """Mean loss over `data.val` and the metrics of `Task.validation`, in full precision; leaves the model in eval mode.

    `recipe.data` says in which batches, with how many workers, and what becomes of images that cannot be read; the
    names of those that are left out go to `left_out`. Several processes share the images, each is counted once.
    Raises RecastError if the model does not give what the task asks for, or there is nothing to measure on; Stopped
    where `stop` is set, but for a validation that several processes share.
    """
    model.eval()
    config, meter = recipe.data, data.task.meter(data)
    totals = torch.zeros(2, dtype=torch.float64)  # loss, images
    source = Loader(
        data.val, config.batch_size, workers=config.workers, part=process_number(), parts=process_count(),
        bad_image=config.bad_image,
    )  # fmt: skip
    for pixels, labels in source:
        if stop is not None and stop.is_set() and process_count() == 1:
            raise Stopped
        loss = meter.add(model, data.normalised(pixels, device), labels)
        totals += torch.tensor([loss, len(labels)], dtype=torch.float64)
    for name in source.bad_images:
        warnings.warn(f"{name} cannot be read: it is left out of the validation", stacklevel=2)
    if left_out is not None:
        left_out += source.bad_images
    loss, images = sum_over_processes_(totals, device).tolist()
    if images == 0:
        raise RecastError(f"{data.name} has no validation images: nothing could be measured")
    return loss / images, *meter.values(sum_over_processes_(meter.sums, device))


@torch.no_grad()
def heads_of(model: nn.Module, images: list[Tensor]) -> dict[str, dict[str, Any]]:
    """Per recast layer: its gate, which code runs, and of every head how awake it is on the images, its gates
    (`GPSA.gates`) and its span 1/α; C-MHSA has neither gates nor spans."""
    awake = wakefulness(model, images) if recast_layers(model) else {}
    found: dict[str, dict[str, Any]] = {}
    for name, layer in recast_layers(model).items():
        found[name] = {"gate": layer.config.gate, "backend": layer.chosen_backend(), **awake.get(name, {})}
        if isinstance(layer, GPSA):
            gates = {gate: values.tolist() for gate, values in layer.gates().items()}
            found[name] |= {**gates, "span": layer.spans().tolist()}
    return found


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole rows of a metrics.jsonl; a line that a crash cut off, or that was damaged, is left out."""
    lines = read_lines(path)[0] if path.is_file() else []
    return [row for _, row in lines if isinstance(row.get("epoch"), int)]


class Journal:
    """What the first process writes and shows: metrics.jsonl with a row per epoch, the same rows to trackers, and on
    stderr a line per epoch, on a terminal a bar too. The other processes do nothing here.

    `shown=False` shows nothing.
    """

    def __init__(self, recipe: Recipe, out: Path, name: str, batches: int, shown: bool, device: torch.device) -> None:
        for kind in recipe.trackers:
            module = "torch.utils.tensorboard" if kind == "tensorboard" else kind
            optional_package(module, kind, f"trackers={kind} needs it")
        self.recipe, self.out, self.name, self.path = recipe, out, name, out / "metrics.jsonl"
        self.shown, self.warned = shown and is_first(), False
        self.batches, self.device, self.steps, self.validation = batches, device, 0, 0.0
        self.trackers: list[Tracker] = []
        self.resumed, self.step_before = Position(), 0.0
        """Where this epoch goes on, and the seconds of a step before the run was interrupted; 0: it was not."""
        self.console, self.closing = Console(stderr=True), ExitStack()
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        disable = not (self.shown and self.console.is_terminal)
        self.bar = Progress(
            *columns, TextColumn("{task.fields[note]}"), console=self.console, transient=True, disable=disable
        )
        self.progress = self.bar.add_task(name, total=batches, note="", visible=False)

    def open(self, position: Position) -> ExitStack:
        """Begin: drop the row of its epoch and later ones, which a resumed run writes again; close with the result."""
        if is_first():
            self.out.mkdir(parents=True, exist_ok=True)
            epoch = position.epoch
            rows = [row for row in read_metrics(self.path) if row["epoch"] < epoch]
            write_text(self.path, "".join(map(sealed, rows)))
            self.validation = next((row["seconds"] or 0.0 for row in rows if row["epoch"] == 0), 0.0)
            speeds = [row["images_per_second"] for row in rows if row.get("images_per_second")]
            self.step_before = self.recipe.data.batch_size / speeds[0] if speeds else self._step_seconds(position)
            opening = (TRACKERS[kind] for kind in self.recipe.trackers)
            self.trackers = [open_tracker(self.out, self.recipe, epoch, self.closing) for open_tracker in opening]
        self.closing.enter_context(self.bar)
        return self.closing

    def start_epoch(self, position: Position) -> None:
        """Empty the bar for a new epoch, some batches of which may have been trained before."""
        self.resumed = replace(position)
        description = f"{self.name} epoch {position.epoch}/{self.recipe.epochs}"
        self.bar.reset(self.progress, description=description, completed=position.step, visible=True)

    def step(self, loss: float, lr: float, position: Position) -> None:
        """One more batch."""
        speed = self.recipe.data.batch_size / max(self._step_seconds(position), 1e-9)
        waiting = f"  waiting for data {position.wait:.0%}" if position.wait >= MUCH_WAITING else ""
        self.steps += 1
        if self.steps == min(TIMED_STEPS, self.batches):
            self._tell_cost(position)
        self.bar.update(self.progress, advance=1, note=f"loss {loss:.3f}  lr {lr:.1e}  {speed:,.0f} images/s{waiting}")

    def _step_seconds(self, position: Position) -> float:
        """Of a step of this epoch since this start; 0 where there was none."""
        steps = position.step - self.resumed.step
        return (position.seconds - self.resumed.seconds) / steps if steps else 0.0

    def _tell_cost(self, position: Position) -> None:
        """What is left of this arm, by the steps since this start and the validation before training: where the run
        goes on, with the machine as busy as it is now."""
        step = self._step_seconds(position)
        if self.step_before:
            self.validation *= step / self.step_before
        done = (position.epoch - 1) * self.batches + position.step
        left = (self.recipe.epochs * self.batches - done) * step
        left += (self.recipe.epochs + 1 - position.epoch) * self.validation
        if left >= LONG:
            costs = f"{step:.2g} s a step, {self.validation:.2g} s a validation, {memory(peak_bytes(self.device))}"
            self.say(f"note: {self.name}: about {duration(left)} to go ({costs} of memory)")

    def write(self, row: Epoch) -> None:
        """Append the row of an epoch, on the disk when this returns, send its numbers on, and show a line."""
        if not is_first():
            return
        if row.epoch == 0:
            self.validation = row.seconds or 0.0
        with self.path.open("a", encoding="utf-8") as file:
            file.write(sealed(row.to_dict()))
            file.flush()
            os.fsync(file.fileno())
        values = {name: float(value) for name in SCALARS if (value := getattr(row, name)) is not None}
        values |= {f"val_{metric}": value for metric, value in row.metrics.items()}
        for layer, gates in row.layers.items():
            for gate, per_head in gates.items():
                if isinstance(per_head, list) and per_head:
                    values[f"gates/{layer}/{gate}"] = fmean(per_head)
        for tracker in self.trackers:
            tracker(row.epoch, values)
        train = "before training  " if row.train_loss is None else f"train loss {row.train_loss:.3f} "
        text = f"{self.name:>9}  epoch {row.epoch:>3}/{self.recipe.epochs}  {train} "
        metric = task_of(self.recipe).main[1]
        reached = f"{METRICS[metric].in_text} {row.metrics[metric]:.2f} %"
        text += f"val loss {row.val_loss:.3f}  {reached}  {row.seconds:.1f} s"
        if row.train_loss is not None:
            text += f"  {row.images_per_second:,.0f} images/s  data {row.data_wait:.0%}"
        self.say(text)
        attention = Wakefulness.of(row.layers)
        if attention is not None and row.epoch == self.recipe.epochs > 0:
            self.say(f"note: {attention}" + (f": {attention.remedy}" if attention.slept else ""))
        if row.bad_images or row.bad_val_images:
            self.say(
                f"note: {row.bad_images} training images could not be read, others took their places; "
                f"{row.bad_val_images} of validation are left out"
            )
        waiting = row.data_wait or 0.0
        if waiting >= MUCH_WAITING and (row.seconds or 0.0) > WORTH_SECONDS and not self.warned:
            self.warned = True
            self.say(
                f"note: {waiting:.0%} of the time went into waiting for data: set data.workers (now "
                f"{self.recipe.data.workers}; this machine has {os.cpu_count()} cores), or store the images smaller"
            )

    def say(self, text: str) -> None:
        """One line above the bar."""
        if self.shown:
            self.console.print(text, highlight=False, soft_wrap=True)


def _tensorboard(out: Path, _recipe: Recipe, start: int, closing: ExitStack) -> Tracker:
    """Event files in `out/tensorboard`: tensorboard --logdir RUN."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(out / "tensorboard"), purge_step=start)  # what a crash left is not shown twice
    closing.callback(writer.close)

    def add(epoch: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, epoch)
        writer.flush()

    return add


def _wandb(out: Path, recipe: Recipe, _start: int, closing: ExitStack) -> Tracker:
    """A run of wandb named as the folder, the same for every start of it; WANDB_MODE=offline keeps it here."""
    import wandb

    path = out / "wandb.id"
    if not path.is_file():
        write_text(path, wandb.util.generate_id())
    run = wandb.init(
        project="recast", name=out.resolve().name, dir=str(out), config=recipe_to_dict(recipe), resume="allow",
        id=path.read_text(encoding="utf-8").strip(),
    )  # fmt: skip
    closing.callback(run.finish)
    return lambda epoch, values: run.log(values, step=epoch)


TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb}
