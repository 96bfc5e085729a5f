"""Read a run folder as plain data.

    RUN/recipe.yaml plan.json metrics.jsonl                  required
    RUN/classes.json verify.json environment.json rows.csv   optional
    RUN/schedule.json                                        if layers became attention during training
    RUN/differences.csv analysis/*.csv scores/images.npz     written by `recast evaluate` beside rows.csv
    RUN/finetuned/metrics.jsonl                              the control arm: the parent trained the same way

A damaged file is an error that names it. Damaged lines of metrics.jsonl, as a killed process may leave them, are
skipped with a warning.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from recast.errors import RecastError
from recast.lab.config import Recipe
from recast.lab.config.text import SEAL
from recast.lab.evaluation.image_values import ImageValues, Key, read_images
from recast.lab.evaluation.suites import METRICS
from recast.lab.folder.files import read_existing, read_json, read_lines, read_names, read_text
from recast.lab.folder.records import Difference, Epoch, FourierLine, FrontierLine, Row, SimilarityLine, Switching
from recast.lab.folder.run import RunFolder, follow_up
from recast.lab.folder.tables import existing_records, read_table
from recast.lab.task import task_of_data
from recast.surgery.plan import Plan
from recast.surgery.records import Step

T = TypeVar("T")
VERIFY = ("images", "max_relative_error", "bitwise", "argmax_agreement")
SCHEDULE = ("version", "name", "layers", "dates")


@dataclass(frozen=True)
class Run:
    """The content of a run folder."""

    path: Path
    recipe: Recipe
    recipe_text: str
    plan: Plan | None  # None if nothing is recast
    metrics: list[Epoch]  # of the recast arm
    control: list[Epoch]  # of the parent trained the same way; empty without a control arm
    verify: dict[str, Any] | None
    environment: dict[str, Any]
    rows: list[Row]
    differences: list[Difference]  # paired on the same images, with intervals
    fourier: list[FourierLine]
    cka: list[SimilarityLine]
    frontier: list[FrontierLine]
    agreement: list[dict[str, str]]  # predictions of every arm: index, image, label, and a class name by arm
    classes: tuple[str, ...]  # in the order of the logits
    switching: Switching | None  # of a run that is recast during training
    name: str

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.plan.steps if self.plan else ()

    @property
    def title(self) -> str:
        """Network, data, and kind of attention."""
        recipe = self.recipe
        kind = "nothing recast" if recipe.is_plain else "attention pooling"
        kind = recipe.attention if recipe.has_layers else kind
        return f"{recipe.model.name} on {recipe.data.title}, {kind}"

    @property
    def is_plain(self) -> bool:
        """True if nothing is recast: the only arm is a trained network, `finetuned` in rows.csv."""
        return self.recipe.is_plain

    @property
    def is_scheduled(self) -> bool:
        """True if layers become attention during training, not before it."""
        return self.switching is not None or self.recipe.schedule.is_during

    @cached_property
    def why_no_baseline(self) -> str:
        """Reason why the parent before fine-tuning is no baseline; empty if it is one."""
        run, parent = RunFolder(self.path), self.recipe.model
        return "" if self.is_plain else run.why_no_baseline(parent, len(self.classes), self.rows)

    @property
    def main(self) -> tuple[str, str]:
        """Suite and metric by which the run is judged."""
        return task_of_data(self.recipe.data).main

    @property
    def judged(self) -> str:
        """Label of the metric by which the run is judged."""
        return METRICS[self.main[1]].label

    @property
    def epochs(self) -> int:
        """Epochs trained so far."""
        return self.metrics[-1].epoch

    @cached_property
    def unfinished(self) -> str:
        """Progress of a run that did not end, `7 of 30 epochs`; empty for a finished run."""
        planned, measured = self.recipe.epochs, {row.model for row in self.rows}  # only finished arms are measured
        if self.epochs < planned and ("finetuned" if self.is_plain else "recast") not in measured:
            return f"{self.epochs} of {planned} epochs"
        if self.is_plain or not self.recipe.control or "finetuned" in measured:
            return ""
        trained = self.control[-1].epoch if self.control else 0  # the control arm is trained after the recast one
        return f"{trained} of {planned} epochs of the control arm" if trained < planned else ""

    @property
    def resume_command(self) -> str:
        """Command that finishes the run."""
        return follow_up("train", "--resume", str(self.path), functions=self.recipe.functions)

    def row(self, model: str, suite: str, metric: str) -> Row | None:
        """Return a row of rows.csv; None if it was not measured."""
        return self._rows_by_key.get((model, suite, metric))

    def value(self, model: str, suite: str, metric: str) -> float:
        """Return a value of rows.csv; NaN if it was not measured."""
        row = self.row(model, suite, metric)
        return row.value if row else math.nan

    def difference(self, against: str, suite: str, metric: str) -> Difference | None:
        """Return recast minus another arm; None if it was not measured or has no finite interval."""
        return self._differences_by_key.get((against, suite, metric))

    @cached_property
    def images(self) -> dict[Key, ImageValues]:
        """What each image contributes to the values of rows.csv; empty if the run has no file of it."""
        images = read_images(RunFolder(self.path).image_values)
        return {
            (suite, metric, model): each
            for (suite, metric, model), each in images.items()
            if math.isclose(each.values.mean(), self.value(model, suite, metric), rel_tol=1e-4, abs_tol=1e-3)
        }

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
        RecastError: the folder or a required file is missing, or a file is truncated or has another format.
    """
    if not path.is_dir():
        raise RecastError(f"not a run folder: {path} (expected a folder written by `recast train`)")
    run = RunFolder(path)
    recipe_text = read_text(run.recipe_file).partition(SEAL)[0]
    recipe = run.recipe()
    return Run(
        path=path,
        recipe=recipe,
        recipe_text=recipe_text,
        plan=None if recipe.is_plain else run.plan(),
        metrics=read_epochs(run.metrics),
        control=read_existing(RunFolder(run.control).metrics, read_epochs) or [],
        verify=read_existing(run.verify, lambda file: read_json(file, *VERIFY)),
        environment=read_existing(run.environment, read_json) or {},
        rows=run.rows(),
        differences=run.differences(),
        fourier=existing_records(run.table("fourier"), FourierLine),
        cka=existing_records(run.table("cka"), SimilarityLine),
        frontier=existing_records(run.table("frontier"), FrontierLine),
        agreement=read_existing(run.table("agreement"), _agreement) or [],
        classes=tuple(read_existing(run.classes_file, read_names) or ()),
        switching=read_existing(run.schedule, lambda file: Switching.from_dict(read_json(file, *SCHEDULE), f"{file}")),
        name=run.name,
    )


def read_epochs(path: Path) -> list[Epoch]:
    """Read metrics.jsonl, sorted by epoch. Damaged lines are skipped with a warning.

    Raises RecastError if no line can be read.
    """
    by_epoch: dict[int, Epoch] = {}
    lines, damaged = read_lines(path)
    problems = [f"{path} line {index}, which is truncated or damaged" for index in damaged]
    for index, line in lines:
        try:
            row = Epoch.from_dict(line, f"{path} line {index}")
            by_epoch[row.epoch] = row  # a resumed run may repeat an epoch: the later row counts
        except RecastError as error:
            problems.append(str(error))
    if not by_epoch:
        raise RecastError(f"{path} has no line that can be read: expected one per epoch, starting with epoch 0")
    if problems:
        warnings.warn(f"the report goes without {'; '.join(problems[:3])}{' ...' * (len(problems) > 3)}", stacklevel=4)
    return [by_epoch[epoch] for epoch in sorted(by_epoch)]


def _agreement(path: Path) -> list[dict[str, str]]:
    table = read_table(path)
    if missing := {"index", "image", "label"} - set(table.columns):
        raise RecastError(f"{path} lacks the column {', '.join(sorted(missing))}: write it again with recast evaluate")
    return [dict(zip(table.columns, map(str, row), strict=True)) for row in table.rows]
