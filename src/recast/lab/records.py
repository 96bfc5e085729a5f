"""What a run writes down, one definition for those who write and those who read it; `recast.lab.tables` has the CSV.

metrics.jsonl           Epoch, one a line
schedule.json           Switching, with a Switch for every swap
evaluation.json         Evaluation, with a Provenance for every suite
rows.csv                Row                     differences.csv     Difference
analysis/fourier.csv    FourierLine             analysis/heads.csv  HeadLine
analysis/cka.csv        SimilarityLine          analysis/agreement.csv  a column for every arm
analysis/frontier.csv   FrontierLine
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from recast.config import convert, read
from recast.errors import RecastError
from recast.lab.tables import columns_of, read_records, write_rows
from recast.surgery.schedule import Schedule

ARMS = {"parent": "Parent", "finetuned": "Parent, fine-tuned", "recast": "Recast"}
"""The networks of a run, and what they are called."""


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """What is known after an epoch of training; epoch 0 is measured before any."""

    epoch: int
    train_loss: float | None = None
    val_loss: float
    metrics: dict[str, float]
    """Those of `Task.validation`; in its line they are val_METRIC."""
    lr: float | None = None
    gate_lr: float | None = None
    seconds: float | None = None
    images_per_second: float | None = None
    data_wait: float | None = None
    """Share of the time that was spent waiting for data."""
    bad_images: int = 0
    """Images that could not be read."""
    bad_val_images: int = 0
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of every recast layer: gate, backend, how awake its heads are (`lab.analysis.wakefulness`), and of GPSA layers
    the gates of every head and their spans 1/α."""

    def __post_init__(self) -> None:
        convert(dict[str, dict[str, str | list[float | None]]], self.layers, "layers (texts and lists of numbers)")

    def to_dict(self) -> dict[str, Any]:
        """The content of its line."""
        found: dict[str, Any] = {}
        for name, value in asdict(self).items():
            found |= {f"val_{metric}": x for metric, x in value.items()} if name == "metrics" else {name: value}
        return found

    @classmethod
    def from_dict(cls, line: Mapping[str, Any], source: str) -> Epoch:
        """The inverse of `to_dict`. Raises RecastError that names `source` and the key that is wrong or missing."""
        metrics = {key[4:]: value for key, value in line.items() if key.startswith("val_") and key != "val_loss"}
        return read(cls, {**line, "metrics": metrics}, source)

    @property
    def measured(self) -> Measured:
        """Loss and first metric."""
        return Measured(self.val_loss, next(iter(self.metrics.values()), math.nan))


@dataclass(frozen=True)
class Measured:
    """The network on the validation images."""

    val_loss: float
    val_top1: float
    """The first metric of `Task.validation`, in percent."""


@dataclass
class Switch:
    """Layers that became attention before `epoch`; validation right before and right after it, before any training."""

    epoch: int
    layers: tuple[str, ...]
    before: Measured
    after: Measured | None = None
    """None: not measured yet."""


SWITCHING_VERSION = 1
"""Of schedule.json."""


@dataclass(kw_only=True)
class Switching:
    """A schedule and what came of it. Epochs count from 1; a date is the first epoch in which a layer is attention."""

    schedule: Schedule
    epochs: int
    """Of the whole training."""
    switches: list[Switch]
    """Those that have happened."""

    def to_dict(self) -> dict[str, Any]:
        """The content of schedule.json: the schedule's fields stand beside the others."""
        others = asdict(self)
        del others["schedule"]
        return {"version": SWITCHING_VERSION, **self.schedule.to_dict(), **others}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any], source: str) -> Switching:
        """The inverse of `to_dict`. Raises RecastError that names `source` and the key that is wrong or missing."""
        if found["version"] != SWITCHING_VERSION:
            raise RecastError(
                f"{source} is of version {found['version']}: this recast reads version {SWITCHING_VERSION}"
            )
        keys = {field.name for field in fields(Schedule)}
        schedule = {key: value for key, value in found.items() if key in keys}
        read(Schedule, schedule, source)  # names its keys as the file does
        others = {key: value for key, value in found.items() if key not in keys and key != "version"}
        return read(cls, {**others, "schedule": schedule}, source)

    @property
    def switched(self) -> list[str]:
        """The layers that have become attention, in that order."""
        return [layer for switch in self.switches for layer in switch.layers]


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """How the numbers of one suite were made."""

    command: str
    date: str
    seconds: float
    together_with: list[str] = field(default_factory=list)
    """Suites of the same pass over the images, which share its seconds."""
    dataset: str
    images: int
    options: dict[str, Any]
    device: str
    machine: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Evaluation:
    suites: dict[str, Provenance]


@dataclass(frozen=True)
class Row:
    """One measured number."""

    run: str
    model: str
    """parent, finetuned or recast."""
    suite: str
    """clean, fgsm, pgd, basic, cost, ..."""
    dataset: str
    metric: str
    """top1 and the like are in percent; `top1@E` is under an attack with ε = E/255."""
    value: float
    n: int
    """Images behind the number."""
    low: float | None = None
    """The 95 % interval of the value over images, from `low` to `high`. None: there is none."""
    high: float | None = None


@dataclass(frozen=True)
class Difference:
    """value = what `model` has more than `against`, measured on the same images, with its paired 95 % interval."""

    run: str
    model: str
    against: str
    suite: str
    dataset: str
    metric: str
    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class FrontierLine:
    """A network on the way from all heads open to none: what it reaches, and the time that it takes."""

    model: str
    heads: int
    """That are open; 0 for a network without recast layers."""
    layer: str
    """Of the head that was closed last; "" where none was."""
    head: int | None
    loss: float | None
    """On the training images that heads are chosen by."""
    top1: float
    noise: float
    """Top-1 under Gaussian noise, in percent as `top1`."""
    ms: float
    """An image takes, in batches, folded."""
    chosen_on: int
    """Training images."""
    n: int


def write_records(path: str | Path, kind: type[Row] | type[Difference], records: Iterable[Row | Difference]) -> None:
    """Put rows or differences into a run's CSV file: those of a suite replace all older ones of that suite.

    So what stands there of a suite was measured together. The records that stay get the new ones' name of the run: the
    folder may have been renamed. An existing file that is no table of this kind is left alone: RecastError.
    """
    path, new = Path(path), list(records)
    measured = {record.suite for record in new}
    older = [one for one in (read_records(path, kind) if path.exists() else []) if one.suite not in measured]
    kept = [replace(one, run=new[0].run) for one in older] if new else older
    write_rows(path, columns_of(kind), map(astuple, (*kept, *new)))
