"""A run folder as plain data.

    RUN/recipe.yaml plan.json metrics.jsonl            needed
    RUN/verify.json environment.json rows.csv attention.npz    what is missing is left out of the page
    RUN/schedule.json                                  where layers became attention during training
    RUN/differences.csv evaluation.json analysis/*.csv what `recast evaluate` adds to rows.csv
    RUN/finetuned/metrics.jsonl                        the control arm: the parent trained the same way

A file that is there must be whole: a truncated one is an error that names it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import yaml

from recast.errors import RecastError
from recast.report.read.analysis import Analysis, read_analysis
from recast.report.read.attention import Attention, read_attention
from recast.report.read.made import Made, read_made
from recast.report.read.schedule import Schedule, parse_schedule
from recast.run.files import mapping, read_json, read_names, read_text, require
from recast.run.records import Difference, Row, read_differences, read_rows

T = TypeVar("T")
ARMS = ("parent", "finetuned", "recast")


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
    classes: tuple[str, ...] = ()
    """Names of the classes, in the order of the logits."""
    schedule: Schedule | None = None
    """When layers became attention, of a run that is recast during training."""
    differences: list[Difference] = field(default_factory=list)
    """Paired on the same images, with intervals."""
    made: list[Made] = field(default_factory=list)
    analysis: Analysis = field(default_factory=Analysis)

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
        if self.is_plain:
            return "nothing recast"
        if not self.has_layers:
            return "attention pooling"
        return "C-MHSA" if self.gate == "bias" else f"{self.gate} gate"

    @property
    def is_plain(self) -> bool:
        """Nothing is recast: the one arm is a network that was trained, in rows.csv as `finetuned`."""
        return _is_plain(self.recipe)

    @property
    def pool_kind(self) -> str:
        """What the network's pooling became: single, per_class, or none."""
        return _pool_kind(self.recipe)

    @property
    def has_layers(self) -> bool:
        """Convolutions became attention, not the pooling alone."""
        return bool(self.recipe.get("where") != ["none"])

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

    @property
    def data_key(self) -> tuple[str, ...]:
        """Runs with the same key were measured on the same images: folders are told apart by name and classes."""
        data = mapping(self.recipe.get("data"))
        folder = Path(str(data.get("data_dir") or "")).name if self.dataset in {"folder", "zip"} else ""
        return self.dataset, folder, *self.classes

    def row(self, model: str, suite: str, metric: str) -> Row | None:
        """One line of rows.csv, None where it was not measured."""
        return self._by_key.get((model, suite, metric))

    def value(self, model: str, suite: str, metric: str) -> float:
        """One number of rows.csv, NaN where it was not measured."""
        row = self.row(model, suite, metric)
        return row.value if row else math.nan

    def difference(self, model: str, against: str, suite: str, metric: str) -> Difference | None:
        """One line of differences.csv."""
        return self._differences_by_key.get((model, against, suite, metric))

    @cached_property
    def _by_key(self) -> dict[tuple[str, str, str], Row]:
        return {(row.model, row.suite, row.metric): row for row in self.rows}

    @cached_property
    def _differences_by_key(self) -> dict[tuple[str, str, str, str], Difference]:
        return {(line.model, line.against, line.suite, line.metric): line for line in self.differences}


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
    control = path / "finetuned" / "metrics.jsonl"
    return Run(
        path=path,
        recipe=recipe,
        recipe_text=recipe_text,
        plan={"steps": [], "left": []} if _is_plain(recipe) else _plan(path / "plan.json"),
        metrics=_metrics(path / "metrics.jsonl"),
        control=_metrics(control) if control.is_file() else [],
        verify=_optional(path / "verify.json", _verify),
        environment=_optional(path / "environment.json", read_json) or {},
        rows=_optional(path / "rows.csv", read_rows) or [],
        attention=_optional(path / "attention.npz", read_attention),
        classes=tuple(_optional(path / "classes.json", read_names) or ()),
        schedule=_optional(path / "schedule.json", lambda file: parse_schedule(read_json(file), str(file))),
        differences=_optional(path / "differences.csv", read_differences) or [],
        made=_optional(path / "evaluation.json", read_made) or [],
        analysis=read_analysis(path / "analysis"),
    )


def _pool_kind(recipe: dict[str, Any]) -> str:
    return str(mapping(recipe.get("pool")).get("kind") or "none")


def _is_plain(recipe: dict[str, Any]) -> bool:
    return recipe.get("where") == ["none"] and _pool_kind(recipe) == "none"


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
