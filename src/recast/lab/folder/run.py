"""A run folder: its files, its recipe, and what may be done with it. Imports no torch."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from recast.errors import RecastError
from recast.lab.config import Recipe
from recast.lab.config.inputs import EMBEDDED
from recast.lab.config.recipe import PAPERS
from recast.lab.config.text import load_recipe
from recast.lab.folder.files import ANALYSIS, CONTROL, EXPLAIN, LOCK, SCORES, STATES, read_names, read_text
from recast.lab.folder.records import Difference, Row, is_at_chance
from recast.lab.folder.tables import existing_records
from recast.models.config import ModelConfig
from recast.models.trust import is_function

if TYPE_CHECKING:
    from recast.surgery.plan import Plan


class RunFolder:
    """A folder that holds a run or its control arm, or that a run may start in. No other module spells its files."""

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        self.recipe_file = path / "recipe.yaml"  # complete; a folder with this file is a run
        self.classes_file = path / "classes.json"
        self.fingerprint = path / "data.json"  # `recast.lab.data.fingerprint`
        self.duplicates = path / "duplicates.csv"
        self.parent_weights = path / "parent.safetensors"  # if they are random or the classifier is new
        self.returned_weights = path / "returned.safetensors"  # the parent's, if a user's function returned them
        self.environment = path / "environment.json"
        self.plan_file = path / "plan.json"
        self.verify = path / "verify.json"
        self.schedule = path / "schedule.json"
        self.metrics = path / "metrics.jsonl"
        self.weights = path / "weights.safetensors"
        self.states = path / STATES
        self.control = path / CONTROL  # the control arm, with its own metrics, weights and states
        self.parent = path / "parent"  # the training of the parent, which may be there before the run
        self.rows_file = path / "rows.csv"
        self.differences_file = path / "differences.csv"
        self.provenance = path / "evaluation.json"
        self.scores = path / SCORES
        self.image_values = self.scores / "images.npz"
        self.analysis = path / ANALYSIS
        self.explain = path / EXPLAIN
        self.report = path / "report.html"

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """Return the name of the folder, also of "."."""
        return self.path.resolve().name

    @property
    def is_run(self) -> bool:
        """Return True if a run was started in the folder."""
        return self.recipe_file.is_file()

    def recipe(self) -> Recipe:
        """Return the recipe as the run wrote it."""
        return load_recipe(self.recipe_file, complete=True)

    def plan(self) -> Plan:
        """Return the plan of the run."""
        from recast.surgery.plan import Plan  # imports torch

        return Plan.from_json(read_text(self.plan_file), str(self.plan_file))

    def rows(self) -> list[Row]:
        """Return the rows of rows.csv; none if it is missing."""
        return existing_records(self.rows_file, Row)

    def differences(self) -> list[Difference]:
        """Return the rows of differences.csv; none if it is missing."""
        return existing_records(self.differences_file, Difference)

    def has_begun(self) -> bool:
        """Return True if a training saved a state or weights here."""
        return bool(self.saved_states()) or self.weights.exists()

    def saved_states(self) -> list[Path]:
        """Return the files of the states, oldest first."""
        return [path for path in sorted(self.states.glob("state-*.pt")) if path.is_file()]

    def table(self, name: str) -> Path:
        """Return the file of a table that `recast.lab.evaluation` writes."""
        return self.analysis / f"{name}.csv"

    def classes(self) -> list[str]:
        """Return the classes in the order of the logits."""
        return read_names(self.classes_file)

    def recipe_here(self, data_dir: str | None = None) -> Recipe:
        """Return the recipe `with_files_here`."""
        return self.with_files_here(self.recipe(), data_dir)

    def with_files_here(self, recipe: Recipe, data_dir: str | None = None) -> Recipe:
        """Return a recipe with the files that moved with the run; `data_dir` is the folder of its images if they did.

        Raises RecastError for files of a run from another machine that are not there.
        """
        data, checkpoint = recipe.data, recipe.model.checkpoint
        before, table = (path and Path(path).expanduser() for path in (data.data_dir, data.labels_file))
        if data_dir is None and before and not before.exists() and not data.name.startswith("hfds/"):
            raise RecastError(f"no such data folder: {before}, of the run {self}: give the folder with --data-dir")
        if data_dir is not None and data.name in EMBEDDED:
            raise RecastError(f"the run {self} has images of the package ({data.name}): drop --data-dir")
        if table and not table.exists():
            if before is None and data_dir is None:
                raise RecastError(f"no such file: {table}, of the run {self}: give its folder with --data-dir")
            images = before or table.parent
            names = os.path.relpath(table, images), table.name
            places = [*(Path(data_dir or images, name) for name in names), self.path / table.name]
            if (here := next(filter(Path.is_file, places), None)) is None:
                raise RecastError(f"no such file: {table}, the labels of the run {self}: copy it to {places[-1]}")
            recipe = recipe.replace(data=data.replace(labels_file=str(here)))
        if data_dir is not None:
            recipe = recipe.replace(data=recipe.data.replace(data_dir=data_dir))
        if checkpoint and not Path(checkpoint).exists():
            if not (beside := self.path / Path(checkpoint).name).is_file():
                raise RecastError(
                    f"no such checkpoint: {checkpoint}, the parent of the run {self}: copy it to {beside}"
                )
            recipe = recipe.replace(model=recipe.model.replace(checkpoint=str(beside)))
        return recipe

    def check(self) -> None:
        """Raise RecastError for a folder that is not a run."""
        if not self.is_run:
            reason = f"it has no {self.recipe_file.name} (recast train writes one)"
            if not self.path.is_dir():
                reason = f"it is a file of {self.path.parent}" if self.path.exists() else "there is no such folder"
            raise RecastError(f"{self} is not a run folder: {reason}")

    def check_finished(self) -> None:
        """Raise RecastError for a folder without a finished recast arm, before anything of it is loaded."""
        self.check()
        if not self.weights.is_file():
            functions = load_recipe(self.recipe_file).functions
            again = follow_up("train", "--resume", str(self), functions=functions)
            raise RecastError(f"the training in {self} is not finished: continue it with {again}")

    def check_unused(self) -> None:
        """Raise RecastError unless a new run may start here."""
        names = (path.name for path in self.path.iterdir()) if self.path.is_dir() else ()
        if self.recipe_file.name in (used := sorted({*names} - {self.parent.name, LOCK})):
            choose = f"choose another one with --out, or continue it with --resume {self}"
            raise RecastError(f"run folder {self} exists: {choose}")
        if used:
            raise RecastError(f"{self} is not empty ({used[0]}): choose another folder with --out")

    def remove_first_files(self) -> None:
        """Remove the files that a run wrote, if it failed before its first state."""
        first = [self.recipe_file, self.classes_file, self.fingerprint, self.duplicates, self.parent_weights]
        first += [self.returned_weights, self.environment, self.plan_file, self.verify, self.schedule, self.metrics]
        for path in (*first, *(self.path / file for paper in PAPERS.values() for file in paper.files.values())):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # missing
            self.states.rmdir()

    def has_new_parent(self, parent: ModelConfig) -> bool:
        """Return True if the parent of the run, `model` of its recipe, has a new classifier or random weights.

        The weights that a user's function returns count as trained: they may be.
        """
        if parent.checkpoint is None:
            return not (parent.pretrained or is_function(parent.name))
        return (self.path / parent.checkpoint).resolve() == self.parent_weights.resolve()

    def why_no_baseline(self, parent: ModelConfig, classes: int, rows: Iterable[Row]) -> str:
        """Return why the parent before fine-tuning is no baseline; empty if it is one.

        It is none if its classifier is new, or if its top-1 in `rows` is that of a guess among `classes`.
        """
        if self.has_new_parent(parent):
            return "its classifier was new"
        for row in rows:
            is_top1 = (row.model, row.suite, row.metric) == ("parent", "clean", "top1")
            if is_top1 and is_at_chance(row.value / 100, classes, row.n):
                top1, guess = f"{row.value:.1f}\u00a0%", f"{100 / classes:.1f}\u00a0%"
                return f"its top-1, {top1}, is not shown to be above a guess, {guess}"
        return ""


def is_kept_parent(checkpoint: str | None) -> bool:
    """Return True for a run's copy of its parent, which has a new classifier, random weights or those of a function."""
    path = Path(checkpoint or "")
    return path in ((run := RunFolder(path.parent)).parent_weights, run.returned_weights) and run.is_run


def follow_up(*words: str, functions: Iterable[str | None] = ()) -> str:
    """Return a command to type next, with the words it needs if a file names `functions` of the user."""
    named = any(map(is_function, functions))
    is_hidden = Path(sys.argv[0]).name == "recast" and shutil.which("recast") is None
    program = sys.argv[0] if is_hidden else "recast"
    return "PYTHONPATH=. " * named + shlex.join([program, *words]) + " --trust" * named
