"""A run folder as plain data.

    RUN/recipe.yaml plan.json metrics.jsonl            needed
    RUN/verify.json environment.json rows.csv attention.npz neighbours.json    what is missing is left out of the page
    RUN/schedule.json                                  where layers became attention during training
    RUN/differences.csv evaluation.json analysis/*.csv what `recast evaluate` adds to rows.csv
    RUN/finetuned/metrics.jsonl                        the control arm: the parent trained the same way

A file that is needed must be whole: a truncated one is an error that names it. Of the others, and of the lines of
metrics.jsonl, what is damaged is told and left out.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from recast.analysis.records import FourierLine, HeadLine, SimilarityLine
from recast.config import read
from recast.errors import RecastError, shown
from recast.files import number, read_json, read_lines, read_names, read_text, require
from recast.lab.config import Recipe
from recast.lab.recipe import SEAL, load_recipe, why_untaught
from recast.lab.records import Difference, Epoch, Evaluation, FrontierLine, PlaneLine, Provenance, Row, Switching
from recast.lab.report.maps import Attention, read_attention
from recast.lab.report.neighbours import FILE, Neighbours, read_neighbours
from recast.lab.suites import METRICS, PER_CORRUPTION
from recast.lab.tasks import Task, task_of_data
from recast.tables import read_records, read_table

T = TypeVar("T")
SIZES, COUNTS = ("input", "output", "kernel", "stride", "dilation"), ("heads", "queries", "keys", "groups")
COSTS = ("parameters", "macs", "activation_bytes")
"""Lists of numbers, and numbers, of a plan's step."""


@dataclass(frozen=True)
class Run:
    """Everything a report says about one run."""

    path: Path
    recipe: Recipe
    recipe_text: str
    plan: dict[str, Any]
    metrics: list[Epoch]
    """Of the recast arm; empty where every line is damaged."""
    control: list[Epoch]
    """The same for the parent trained the same way; empty without a control arm."""
    verify: dict[str, Any] | None
    environment: dict[str, Any]
    rows: list[Row]
    differences: list[Difference]
    """Paired on the same images, with intervals."""
    provenance: dict[str, Provenance]
    """By suite."""
    fourier: list[FourierLine]
    heads: list[HeadLine]
    cka: list[SimilarityLine]
    frontier: list[FrontierLine]
    plane: list[PlaneLine]
    agreement: list[dict[str, str]]
    """What every arm says to an image: index, image, label, and a class name by arm."""
    attention: Attention | None
    classes: tuple[str, ...]
    """In the order of the logits."""
    neighbours: Neighbours | None
    """Images and the training images nearest to them."""
    switching: Switching | None
    """When layers became attention, of a run that is recast during training."""
    named_by: int = 1
    """Folders at the end of its path that are its name: more than one where another run has the same."""

    @property
    def name(self) -> str:
        return "/".join(self.path.resolve().parts[-self.named_by :])

    @property
    def title(self) -> str:
        """The network, its data, and what the recast layers are, in a few words."""
        recipe = self.recipe
        kind = "C-MHSA" if recipe.recast.gate == "bias" else f"{recipe.recast.gate} gate"
        if not recipe.has_layers:
            kind = "nothing recast" if recipe.is_plain else "attention pooling"
        return f"{recipe.model.name} on {recipe.data.name}, {kind}"

    @property
    def is_plain(self) -> bool:
        """Nothing is recast: the one arm is a network that was trained, in rows.csv as `finetuned`."""
        return self.recipe.is_plain

    @property
    def is_scheduled(self) -> bool:
        """Layers become attention during training, not before it."""
        return self.switching is not None or self.recipe.schedule.is_during

    @cached_property
    def untaught(self) -> str:
        """Why the parent as it was is nothing to compare with; empty where it is."""
        return "" if self.is_plain else why_untaught(self.recipe, self.path, len(self.classes), self.rows)

    @property
    def main(self) -> tuple[str, str]:
        """Suite and metric that the run is judged by."""
        return self.task.main

    @property
    def judged(self) -> str:
        """What that metric is called."""
        return METRICS[self.main[1]].label

    @property
    def task(self) -> Task:
        """What is asked of its images."""
        return task_of_data(self.recipe.data)

    @property
    def epochs(self) -> int:
        """Epochs trained so far; those of the recipe where no line of metrics.jsonl can be read."""
        return self.metrics[-1].epoch if self.metrics else self.recipe.epochs

    @property
    def data_key(self) -> tuple[str, ...]:
        """Runs with the same key were measured on the same images: folders are told apart by name and classes."""
        data = self.recipe.data
        folder = Path(data.data_dir or "").name if data.name in {"folder", "zip"} else ""
        return data.name, folder, *self.classes

    def row(self, model: str, suite: str, metric: str) -> Row | None:
        """One line of rows.csv, None where it was not measured."""
        return self._rows_by_key.get((model, suite, metric))

    def value(self, model: str, suite: str, metric: str) -> float:
        """One number of rows.csv, NaN where it was not measured."""
        row = self.row(model, suite, metric)
        return row.value if row else math.nan

    def difference(self, against: str, suite: str, metric: str) -> Difference | None:
        """What recast has more than another arm; None where it was not measured or has no finite interval."""
        return self._differences_by_key.get((against, suite, metric))

    @cached_property
    def corruptions(self) -> dict[str, dict[str, dict[str, str]]]:
        """Suite → kind of corruption, "mean" among them → severity → metric of rows.csv."""
        found: dict[str, dict[str, dict[str, str]]] = {}
        for row in self.rows:
            if match := PER_CORRUPTION.match(row.metric):
                found.setdefault(row.suite, {}).setdefault(match["kind"], {})[match["severity"]] = row.metric
        return found

    @cached_property
    def _rows_by_key(self) -> dict[tuple[str, str, str], Row]:
        return {(row.model, row.suite, row.metric): row for row in self.rows}

    @cached_property
    def _differences_by_key(self) -> dict[tuple[str, str, str], Difference]:
        return {
            (line.against, line.suite, line.metric): line
            for line in self.differences
            if line.model == "recast" and math.isfinite(line.low) and math.isfinite(line.high)
        }


def read_run(path: Path) -> Run:
    """Read a run folder.

    Raises:
        RecastError: no such folder, a needed file is missing, or a file is truncated or of another format.
    """
    if not path.is_dir():
        raise RecastError(f"not a run folder: {path} (expected the folder that `recast train` wrote)")
    recipe_text = read_text(path / "recipe.yaml").partition(SEAL)[0]
    recipe = load_recipe(path / "recipe.yaml", complete=True)

    def optional(name: str, read: Callable[[Path], T]) -> T | None:
        try:
            return read(path / name) if (path / name).is_file() else None
        except RecastError as error:
            warnings.warn(f"the report goes without {error}", stacklevel=3)
            return None

    def records(name: str, kind: type[T]) -> list[T]:
        return optional(name, lambda file: read_records(file, kind)) or []

    return Run(
        path=path,
        recipe=recipe,
        recipe_text=recipe_text,
        plan={"steps": [], "left": [], "edits": []} if recipe.is_plain else _plan(path / "plan.json"),
        metrics=_metrics(path / "metrics.jsonl"),
        control=optional("finetuned/metrics.jsonl", _metrics) or [],
        verify=optional("verify.json", _verify),
        environment=optional("environment.json", read_json) or {},
        rows=records("rows.csv", Row),
        differences=records("differences.csv", Difference),
        provenance=optional("evaluation.json", _provenance) or {},
        fourier=records("analysis/fourier.csv", FourierLine),
        heads=records("analysis/heads.csv", HeadLine),
        cka=records("analysis/cka.csv", SimilarityLine),
        plane=records("analysis/tsne.csv", PlaneLine),
        frontier=records("analysis/frontier.csv", FrontierLine),
        agreement=optional("analysis/agreement.csv", _agreement) or [],
        attention=optional("attention.npz", read_attention),
        classes=tuple(optional("classes.json", read_names) or ()),
        neighbours=optional(FILE, read_neighbours),
        switching=optional("schedule.json", _schedule),
    )


def _verify(path: Path) -> dict[str, Any]:
    found = read_json(path, "images", "max_relative_error", "bitwise", "argmax_agreement")
    if not math.isfinite(number(found["images"])):
        raise RecastError(f"images of {path} must be a number, got {shown(found['images'])}")
    return found


def _provenance(path: Path) -> dict[str, Provenance]:
    return read(Evaluation, read_json(path), str(path)).suites


def _schedule(path: Path) -> Switching:
    return Switching.from_dict(read_json(path, "version", "name", "layers", "dates"), str(path))


def _plan(path: Path) -> dict[str, Any]:
    plan = read_json(path, "steps", "left", "edits", "totals")
    for key in ("steps", "left", "edits"):
        if not isinstance(plan[key], list):
            raise RecastError(f"{key} of {path} must be a list, got {shown(plan[key])}")
    for step in plan["steps"]:
        require(f"a step of {path}", step, ("name", "before", "after", "exact", *SIZES, *COUNTS))
        for key in (*SIZES, *COUNTS):
            numbers = step[key] if key in SIZES else [step[key]]
            if not isinstance(numbers, list) or any(type(found) is not int for found in numbers):
                raise RecastError(f"{key} of a step of {path} must be whole numbers, got {shown(step[key])}")
        _check_costs(step, f"{shown(step['name'])} in {path}")
    _check_costs(require(f"totals of {path}", plan["totals"], ("before", "after")), f"the model in {path}")
    for left in plan["left"]:
        require(f"a layer left in {path}", left, ("name", "reason"))
    return plan


def _check_costs(found: Mapping[str, Any], whose: str) -> None:
    """RecastError unless the costs before and after are numbers, and none is missing."""
    for when in ("before", "after"):
        where = f"the cost {when} of {whose}"
        if wrong := [v for v in require(where, found[when], COSTS).values() if math.isnan(number(v))]:
            raise RecastError(f"{where} must be numbers, got {shown(wrong[0])}")


def _metrics(path: Path) -> list[Epoch]:
    by_epoch: dict[int, Epoch] = {}
    lines, damaged = read_lines(path)
    wrong = [f"{path} line {at} is truncated or not JSON, or damaged" for at in damaged]
    for at, line in lines:
        try:
            row = Epoch.from_dict(line, f"{path} line {at}")
            by_epoch[row.epoch] = row  # a resumed run may repeat an epoch: the later row counts
        except RecastError as error:
            wrong.append(str(error))
    if not (by_epoch or wrong):
        raise RecastError(f"{path} is empty: expected one line per epoch, the first measured before training")
    if wrong:
        warnings.warn(f"the report goes without {'; '.join(wrong[:3])}{' ...' * (len(wrong) > 3)}", stacklevel=4)
    return [by_epoch[epoch] for epoch in sorted(by_epoch)]


def _agreement(path: Path) -> list[dict[str, str]]:
    table = read_table(path)
    if missing := {"index", "image", "label"} - set(table.columns):
        raise RecastError(f"{path} lacks the column {', '.join(sorted(missing))}: write it again with recast evaluate")
    return [dict(zip(table.columns, map(str, row), strict=True)) for row in table.rows]
