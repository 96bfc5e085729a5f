"""Records in the files of a run, defined once for writing and reading. `recast.lab.folder.tables` reads and writes CSV.

metrics.jsonl           Epoch, one a line
schedule.json           Switching, with a Switch for every swap
evaluation.json         how each suite was measured (`evaluation.run_folder`)
rows.csv                Row                     differences.csv     Difference
analysis/fourier.csv    FourierLine
analysis/cka.csv        SimilarityLine          analysis/agreement.csv  a column for every arm
analysis/frontier.csv   FrontierLine
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from recast.analysis.thresholds import AWAKE, UNIFORM
from recast.config import read
from recast.errors import RecastError
from recast.lab.folder.tables import columns_of, existing_records, write_rows
from recast.surgery.schedule import Schedule

ARMS = {"parent": "Parent", "finetuned": "Parent, fine-tuned", "recast": "Recast"}
"""The networks of a run and their names."""
SLEPT = 0.1
"""With a smaller share of its heads awake, a network's attention slept."""


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """Measurements after an epoch of training. Epoch 0 is measured before training."""

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
    layers: dict[str, dict[str, str | list[float | None]]] = field(default_factory=dict)
    """Of every recast layer: gate, backend, how awake its heads are (`analysis.wakefulness`), the gates of every
    head, and of GPSA layers their spans 1/α."""

    def to_dict(self) -> dict[str, Any]:
        """Return the content of its line."""
        line: dict[str, Any] = {}
        for name, value in asdict(self).items():
            line |= {f"val_{metric}": x for metric, x in value.items()} if name == "metrics" else {name: value}
        return line

    @classmethod
    def from_dict(cls, line: Mapping[str, Any], source: str) -> Epoch:
        """Read the result of `to_dict`. Raises RecastError that names `source` and the wrong or missing key."""
        metrics = {key[4:]: value for key, value in line.items() if key.startswith("val_") and key != "val_loss"}
        return read(cls, {**line, "metrics": metrics}, source)


def is_at_chance(share: float, classes: int, images: int) -> bool:
    """Return True if a share of right answers is less than three standard deviations above that of guessing.

    Of few images less is required: the middle between guessing and all right. A single class is not guessed.
    """
    if classes < 2:
        return False
    chance = 1 / classes
    return share < min(chance + 3 * math.sqrt(chance * (1 - chance) / images), (1 + chance) / 2)


@dataclass(frozen=True)
class Wakefulness:
    """Share of a network's attention that was at work after an epoch."""

    heads: int
    """Heads that have a content map."""
    awake: int
    """Heads whose content makes at least AWAKE of their layer's output beyond the global mean."""
    entropy: float
    """Of the content maps over its maximum, in the mean over the heads."""

    @classmethod
    def of(cls, layers: Mapping[str, Mapping[str, Any]]) -> Wakefulness | None:
        """Sum up `Epoch.layers`; None where nothing was measured."""
        shares, entropies = (
            [value for layer in layers.values() for value in layer.get(name, ()) if value is not None]
            for name in ("attention_share", "entropy")
        )
        if not shares:
            return None
        return cls(len(shares), sum(share >= AWAKE for share in shares), sum(entropies) / len(entropies))

    @property
    def slept(self) -> bool:
        """True if a run that ended so is no evidence about attention."""
        return self.awake < SLEPT * self.heads

    def __str__(self) -> str:
        if not self.slept:
            return f"attention is awake in {self.awake} of {self.heads} heads"
        how = f"attention slept: {self.awake} of {self.heads} heads do more than average the image"
        if self.entropy >= UNIFORM:
            return f"{how}; the maps are uniform (entropy {self.entropy:.3f} of its maximum)"
        return f"{how}; the gates stayed nearly closed"

    def remedy(self, query_key: str) -> str:
        """Return a setting to try where attention slept, after a start of queries and keys; else an empty text."""
        if not self.slept:
            return ""
        if self.entropy < UNIFORM:
            return "raise --gate-lr, or train for more updates"
        return "raise --qk-lr" if query_key == "images" else "start with --query-key images, or raise --qk-lr"


@dataclass(frozen=True)
class Measured:
    """The network on the validation images."""

    val_loss: float
    val_top1: float
    """The first metric of `Task.validation`, in percent."""


@dataclass
class Switch:
    """Layers that became attention before `epoch`, and the validation right before and right after the switch."""

    epoch: int
    layers: tuple[str, ...]
    before: Measured
    after: Measured | None = None
    """None: not measured yet."""


SWITCHING_VERSION = 1
"""Version of schedule.json."""


@dataclass(kw_only=True)
class Switching:
    """A schedule and its switches so far. Epochs count from 1. A date is the first epoch of a layer as attention."""

    schedule: Schedule
    epochs: int
    """Epochs of the whole training."""
    switches: list[Switch]
    """Switches so far."""

    def to_dict(self) -> dict[str, Any]:
        """Return the content of schedule.json, in which the fields of the schedule stand beside the others."""
        others = asdict(self)
        del others["schedule"]
        return {"version": SWITCHING_VERSION, **self.schedule.to_dict(), **others}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], source: str) -> Switching:
        """Read the result of `to_dict`. Raises RecastError that names `source` and the wrong or missing key."""
        if content["version"] != SWITCHING_VERSION:
            raise RecastError(
                f"{source} has version {content['version']}, this recast reads version {SWITCHING_VERSION}"
            )
        keys = {field.name for field in fields(Schedule)}
        schedule = {key: value for key, value in content.items() if key in keys}
        read(Schedule, schedule, source)  # names its keys as the file does
        others = {key: value for key, value in content.items() if key not in keys and key != "version"}
        return read(cls, {**others, "schedule": schedule}, source)

    @property
    def switched(self) -> list[str]:
        """The layers that have become attention, in the order of their switches."""
        return [layer for switch in self.switches for layer in switch.layers]


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
    """95 % interval of the value over images, from `low` to `high`; None without an interval."""
    high: float | None = None


@dataclass(frozen=True)
class Difference:
    """value = `model` − `against` on the same images, with its paired 95 % interval."""

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
class FourierLine:
    """One point of a block's curve (PRS, Fig. 2)."""

    model: str
    block: str
    index: int
    depth: float
    """0 for the first map, before any block; 1 for the last."""
    frequency: float
    """In units of π: 1 is the fastest change that the feature map can hold."""
    delta_log_amplitude: float
    """Minus that of the constant part."""
    n: int


@dataclass(frozen=True)
class SimilarityLine:
    """Linear CKA between a layer of one model and one of another; None where one is the same for all images."""

    model_a: str
    layer_a: str
    model_b: str
    layer_b: str
    cka: float | None
    n: int


@dataclass(frozen=True)
class FrontierLine:
    """Accuracy and time of a network while its heads are closed one by one."""

    model: str
    heads: int
    """Open heads; 0 for a network without recast layers."""
    layer: str
    """Layer of the head that was closed last; "" if none was."""
    head: int | None
    loss: float | None
    """Loss on the training images by which heads are chosen."""
    top1: float
    noise: float
    """Top-1 under Gaussian noise, in percent as `top1`."""
    ms: float
    """Milliseconds per image of the folded network, in batches."""
    chosen_on: int
    """Number of those training images."""
    n: int


def write_records(path: str | Path, kind: type[Row] | type[Difference], records: Iterable[Row | Difference]) -> None:
    """Write rows or differences to a run's CSV file. They replace all older ones of their suites.

    The rows of a suite are thus measured together. Older rows of other suites get the run's name from the new ones,
    as the folder may have been renamed.

    Raises:
        RecastError: the existing file is no table of this kind. It is not changed.
    """
    path, new = Path(path), list(records)
    measured = {record.suite for record in new}
    older = [record for record in existing_records(path, kind) if record.suite not in measured]
    if new:
        older = [replace(record, run=new[0].run) for record in older]
    write_rows(path, columns_of(kind), map(astuple, (*older, *new)))
