"""A run folder as plain data.

    RUN/recipe.yaml plan.json metrics.jsonl            needed
    RUN/verify.json environment.json rows.csv attention.npz    what is missing is left out of the page
    RUN/finetuned/metrics.jsonl                        the control arm: the parent trained the same way

A file that is there must be whole: a truncated one is an error that names it.
"""

from __future__ import annotations

import json
import math
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml

from recast.errors import RecastError
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

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def model(self) -> str:
        return str(_mapping(self.recipe.get("model")).get("name") or self.plan.get("model") or "model")

    @property
    def dataset(self) -> str:
        return str(_mapping(self.recipe.get("data")).get("name") or "data")

    @property
    def gate(self) -> str:
        return str(_mapping(self.recipe.get("recast")).get("gate") or "linear")

    @property
    def epochs(self) -> int:
        """Epochs trained so far."""
        return int(self.metrics[-1]["epoch"])

    def value(self, model: str, suite: str, metric: str) -> float:
        """One number of rows.csv, NaN where it was not measured."""
        found = [row.value for row in self.rows if (row.model, row.suite, row.metric) == (model, suite, metric)]
        return found[-1] if found else math.nan


def number(value: object) -> float:
    """A float, NaN for what is not a number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def read_run(path: Path) -> Run:
    """Read a run folder.

    Raises:
        RecastError: no such folder, a needed file is missing, or a file is truncated or of another format.
    """
    if not path.is_dir():
        raise RecastError(f"not a run folder: {path} (expected the folder that `recast train` wrote)")
    recipe_text = _text(path / "recipe.yaml")
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
        environment=_optional(path / "environment.json", _json) or {},
        rows=_optional(path / "rows.csv", read_rows) or [],
        attention=_optional(path / "attention.npz", _attention),
    )


def _optional(path: Path, read: Callable[[Path], T]) -> T | None:
    return read(path) if path.is_file() else None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecastError(f"{path} is missing: {path.parent} is not a complete run folder") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecastError(f"cannot read {path}: {error}") from None


def _require(where: str, found: object, keys: Iterable[str]) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise RecastError(f"{where} must be a JSON object, got {type(found).__name__}")
    missing = [key for key in keys if key not in found]
    if missing:
        raise RecastError(f"{where} lacks {', '.join(missing)}")
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise RecastError(f"{path} is truncated or not JSON: line {error.lineno}, {error.msg}") from None
    return _require(str(path), found, ())


def _plan(path: Path) -> dict[str, Any]:
    plan = _require(str(path), _json(path), ("steps", "left"))
    for step in plan["steps"]:
        _require(f"a step of {path}", step, ("name", "before", "after"))
        _require(f"the cost before {step['name']} in {path}", step["before"], ())
        _require(f"the cost after {step['name']} in {path}", step["after"], ())
    for left in plan["left"]:
        _require(f"a layer left in {path}", left, ("name", "reason"))
    return plan


def _verify(path: Path) -> dict[str, Any]:
    return _require(str(path), _json(path), ("images", "max_relative_error", "bitwise", "argmax_agreement"))


def _metrics(path: Path) -> list[dict[str, Any]]:
    by_epoch: dict[int, dict[str, Any]] = {}
    for index, line in enumerate(_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            raise RecastError(
                f"{path} line {index} is truncated or not JSON: remove that line, or resume the run, and try again"
            ) from None
        row = _require(f"{path} line {index}", found, ("epoch", "val_loss", "val_top1"))
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
