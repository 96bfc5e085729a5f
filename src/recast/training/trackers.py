"""The rows of metrics.jsonl, sent on to TensorBoard or Weights & Biases where the recipe asks for it."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from recast.errors import RecastError
from recast.run.config import Recipe
from recast.run.recipe import recipe_to_dict

SCALARS = (
    "train_loss", "val_loss", "val_top1", "lr", "gate_lr", "seconds", "images_per_second", "data_wait", "bad_images",
)  # fmt: skip


class Tracker(Protocol):
    """Where numbers of an epoch go."""

    def add(self, epoch: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in `out/tensorboard`: tensorboard --logdir RUN."""

    def __init__(self, out: Path, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # what a crash left of later epochs is not shown twice
        self.writer = SummaryWriter(str(out / "tensorboard"), purge_step=start)

    def add(self, epoch: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, epoch)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of wandb named as the folder; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, out: Path, recipe: Recipe, start: int) -> None:
        import wandb

        name = out.resolve().name
        self.run = wandb.init(
            project="recast", name=name, dir=str(out), config=recipe_to_dict(recipe), id=_run_id(out), resume="allow"
        )
        self.start = start

    def add(self, epoch: int, values: dict[str, float]) -> None:
        self.run.log(values, step=epoch)

    def close(self) -> None:
        self.run.finish()


def check_trackers(recipe: Recipe) -> None:
    """Raise RecastError for a tracker that is not installed."""
    for kind in recipe.trackers:
        try:
            importlib.import_module("torch.utils.tensorboard" if kind == "tensorboard" else kind)
        except ImportError:
            raise RecastError(f'trackers={kind} needs it: pip install "recast-vision[{kind}]"') from None


def open_trackers(recipe: Recipe, out: Path, start: int) -> list[Tracker]:
    """The trackers of `recipe.trackers`; epochs from `start` on will come."""
    trackers: list[Tracker] = []
    for kind in recipe.trackers:
        trackers.append(TensorBoard(out, start) if kind == "tensorboard" else WeightsAndBiases(out, recipe, start))
    return trackers


def track(trackers: Iterable[Tracker], row: dict[str, Any]) -> None:
    """Send the numbers of a row, and the mean of every layer's gates, as `gates/LAYER/GATE`."""
    values = {name: float(row[name]) for name in SCALARS if row.get(name) is not None}
    for layer, gates in row["layers"].items():
        for gate, heads in gates.items():
            if isinstance(heads, list) and heads:
                values[f"gates/{layer}/{gate}"] = fmean(heads)
    for tracker in trackers:
        tracker.add(row["epoch"], values)


def _run_id(out: Path) -> str:
    """The same for every start of this run: a resumed one goes on in the same place."""
    path = out / "wandb.id"
    if not path.is_file():
        import wandb

        path.write_text(wandb.util.generate_id(), encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
