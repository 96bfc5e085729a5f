"""A run folder as plain data.

    RUN/recipe.yaml plan.json metrics.jsonl            needed
    RUN/verify.json environment.json rows.csv attention.npz    what is missing is left out of the page
    RUN/schedule.json                                  where layers became attention during training
    RUN/finetuned/metrics.jsonl                        the control arm: the parent trained the same way

A file that is there must be whole: a truncated one is an error that names it.
"""

from __future__ import annotations

import json
import math
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml

from recast.errors import RecastError
from recast.report.json_files import mapping, read_json, read_text, require
from recast.report.schedule_file import Schedule, parse_schedule
from recast.rows import Row, read_rows

T = TypeVar("T")
ARMS = ("parent", "finetuned", "recast")


@dataclass(frozen=True)
class AttentionLayer:
    """The mixed attention maps of one layer for one query pixel."""

    name: str
    mix: np.ndarray
    """(N, heads, h, w) over the layer's input grid; negative values are possible with the linear gate."""
    query: tuple[int, int]
    """Row and column of the query in that grid."""
    gate: np.ndarray
    """(heads,) share of content attention."""
    kernel: tuple[int, int]


@dataclass(frozen=True)
class Attention:
    """What a few images look like to every head."""

    images: np.ndarray
    """(N, H, W, 3) uint8."""
    labels: list[str]
    predictions: list[str]
    layers: list[AttentionLayer]


@dataclass(frozen=True)
class Run:
    """Everything a report says about one run."""

    path: Path
    recipe: dict[str, Any]
    recipe_text: str
    plan: dict[str, Any]
    metrics: list[dict[str, Any]]
    """One entry per epoch of the recast arm, epoch 0 before any training."""
    control: list[dict[str, Any]]
    """The same for the parent trained the same way; empty without a control arm."""
    verify: dict[str, Any] | None
    environment: dict[str, Any]
    rows: list[Row]
    attention: Attention | None
    schedule: Schedule | None = None
    """When layers became attention, of a run that is recast during training."""

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def model(self) -> str:
        return str(mapping(self.recipe.get("model")).get("name") or self.plan.get("model") or "model")

    @property
    def dataset(self) -> str:
        return str(mapping(self.recipe.get("data")).get("name") or "data")

    @property
    def gate(self) -> str:
        return str(mapping(self.recipe.get("recast")).get("gate") or "linear")

    @property
    def layer_kind(self) -> str:
        """What the recast layers are, in a few words."""
        return "C-MHSA" if self.gate == "bias" else f"{self.gate} gate"

    @property
    def is_scheduled(self) -> bool:
        """Layers become attention during training, not before it."""
        return self.schedule is not None or self.schedule_name != "before"

    @property
    def schedule_name(self) -> str:
        written = mapping(self.recipe.get("schedule")).get("name")
        return self.schedule.name if self.schedule is not None else str(written or "before")

    @property
    def epochs(self) -> int:
        """Epochs trained so far."""
        return int(self.metrics[-1]["epoch"])

    def value(self, model: str, suite: str, metric: str) -> float:
        """One number of rows.csv, NaN where it was not measured."""
        found = [row.value for row in self.rows if (row.model, row.suite, row.metric) == (model, suite, metric)]
        return found[-1] if found else math.nan


def read_run(path: Path) -> Run:
    """Read a run folder.

    Raises:
        RecastError: no such folder, a needed file is missing, or a file is truncated or of another format.
    """
    if not path.is_dir():
        raise RecastError(f"not a run folder: {path} (expected the folder that `recast train` wrote)")
    recipe_text = read_text(path / "recipe.yaml")
    try:
        recipe = yaml.safe_load(recipe_text)
    except yaml.YAMLError as error:
        raise RecastError(f"{path / 'recipe.yaml'} is not readable YAML: {' '.join(str(error).split())}") from None
    if not isinstance(recipe, dict):
        raise RecastError(f"{path / 'recipe.yaml'} must hold a mapping, got {type(recipe).__name__}")
    if recipe.get("where") == ["none"]:
        raise RecastError(f"{path} recast nothing: recast evaluate measures it, a report compares what was recast")
    control = path / "finetuned" / "metrics.jsonl"
    return Run(
        path=path,
        recipe=recipe,
        recipe_text=recipe_text,
        plan=_plan(path / "plan.json"),
        metrics=_metrics(path / "metrics.jsonl"),
        control=_metrics(control) if control.is_file() else [],
        verify=_optional(path / "verify.json", _verify),
        environment=_optional(path / "environment.json", read_json) or {},
        rows=_optional(path / "rows.csv", read_rows) or [],
        attention=_optional(path / "attention.npz", _attention),
        schedule=_optional(path / "schedule.json", lambda file: parse_schedule(read_json(file), str(file))),
    )


def _optional(path: Path, read: Callable[[Path], T]) -> T | None:
    return read(path) if path.is_file() else None


def _plan(path: Path) -> dict[str, Any]:
    plan = require(str(path), read_json(path), ("steps", "left"))
    for step in plan["steps"]:
        require(f"a step of {path}", step, ("name", "before", "after"))
        require(f"the cost before {step['name']} in {path}", step["before"], ())
        require(f"the cost after {step['name']} in {path}", step["after"], ())
    for left in plan["left"]:
        require(f"a layer left in {path}", left, ("name", "reason"))
    return plan


def _verify(path: Path) -> dict[str, Any]:
    return require(str(path), read_json(path), ("images", "max_relative_error", "bitwise", "argmax_agreement"))


def _metrics(path: Path) -> list[dict[str, Any]]:
    by_epoch: dict[int, dict[str, Any]] = {}
    for index, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            raise RecastError(
                f"{path} line {index} is truncated or not JSON: remove that line, or resume the run, and try again"
            ) from None
        row = require(f"{path} line {index}", found, ("epoch", "val_loss", "val_top1"))
        by_epoch[int(row["epoch"])] = row  # a resumed run may repeat an epoch: the later row counts
    if not by_epoch:
        raise RecastError(f"{path} is empty: expected one line per epoch, the first measured before training")
    return [by_epoch[epoch] for epoch in sorted(by_epoch)]


def _attention(path: Path) -> Attention:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        images = arrays["images"]
        if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != np.uint8:
            raise RecastError(f"{path}: images must be uint8 (N, H, W, 3), got {images.dtype} {images.shape}")
        classes = [str(name) for name in arrays["classes"]]
        layers = []
        for index, name in enumerate(arrays["layers"]):
            mix, gate = arrays[f"mix_{index}"], arrays[f"gate_{index}"]
            if mix.ndim != 4 or mix.shape[:2] != (len(images), len(gate)) or 0 in mix.shape:
                expected = f"(images, heads, h, w) = ({len(images)}, {len(gate)}, h, w)"
                raise RecastError(f"{path}: mix_{index} must be {expected}, got {mix.shape}")
            row, column = (int(value) for value in arrays[f"query_{index}"])
            kh, kw = (int(value) for value in arrays[f"kernel_{index}"])
            layers.append(AttentionLayer(str(name), mix.astype(np.float32), (row, column), gate, (kh, kw)))
        labels = [_class_name(classes, int(label)) for label in arrays["labels"]]
        predictions = [_class_name(classes, int(label)) for label in arrays["predictions"]]
        if not len(labels) == len(predictions) == len(images):
            raise RecastError(f"{path}: {len(images)} images, {len(labels)} labels, {len(predictions)} predictions")
    except KeyError as error:
        raise RecastError(f"{path} lacks the array {error.args[0]}") from None
    except RecastError:
        raise
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise RecastError(f"{path} is truncated or not an .npz of attention maps") from error
    return Attention(images, labels, predictions, layers)


def _class_name(classes: list[str], index: int) -> str:
    return classes[index] if 0 <= index < len(classes) else str(index)
