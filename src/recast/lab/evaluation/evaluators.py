"""The functions that measure suites: each registers itself, in the module that its `Suite` names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, TypeVar

import numpy as np

from recast.errors import RecastError, suggest
from recast.lab.data import Data
from recast.lab.evaluation.context import Batch, Context, Score, Source
from recast.lab.evaluation.stats import Statistic
from recast.lab.evaluation.suites import SUITES
from recast.lab.folder.tables import Table
from recast.lab.task import suites_of, task_named

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Evaluator:
    """Functions of a suite: per-image scores, numbers that are not a mean over images, or a table.

    The value of a metric is statistic(mean over images of its scores), by default 100 times the mean, a percentage.
    Every suite of scores gets intervals, paired differences, a cache and resumption.
    """

    score: Callable[[Batch], Iterator[Score]] | None = None
    """Yield scores of `batch.models`."""
    measure: Callable[[Context], Iterator[tuple[str, str, float, int]]] | None = None
    """Yield (model, metric, value, number of images)."""
    tabulate: Callable[[Context], Table] | None = None
    sources: Callable[[Context], Sequence[Source]] | None = None
    """Return the images. None: the validation images, in one pass for all such suites."""
    derive: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Return further metrics from the scores of a model over all sources, {metric: array (n, k)}."""
    statistics: dict[str, Statistic] = field(default_factory=dict)
    pool: Callable[[Context, str, np.ndarray, np.ndarray], dict[str, np.ndarray]] | None = None
    """`recast.lab.evaluation.stats.Pool` of a context, for metrics that are not functions of a mean over images."""
    uses: tuple[str, ...] = ()
    """Fields of `Options` that change its scores."""
    takes_other_labels: bool = False
    """True if it can be measured with other labels than those of the training."""
    check: Callable[[Data], object] = lambda data: None
    """Raise RecastError for data that it cannot be measured on."""


EVALUATORS: dict[str, Evaluator] = {}


def evaluates(suite: str, how: Literal["score", "measure", "tabulate"] = "score", **options: Any) -> Callable[[F], F]:
    """Register the decorated function, and other fields of its `Evaluator`, as what measures a suite of `SUITES`."""

    def register(function: F) -> F:
        EVALUATORS[suite] = Evaluator(**options | {how: function})
        return function

    return register


def evaluator(suite: str) -> Evaluator:
    """Return the evaluator of a suite."""
    if suite not in EVALUATORS:
        import_module(SUITES[suite].module)
    return EVALUATORS[suite]


def check_suites(suites: Sequence[str]) -> None:
    """Raise RecastError for an unknown suite, or if there is none."""
    for name in suites:
        if name not in SUITES:
            raise RecastError(f"unknown suite {name!r}: expected {', '.join(SUITES)}.{suggest(name, SUITES)}")
    if not suites:
        raise RecastError(f"no suites to evaluate: expected one of {', '.join(SUITES)}")


def check_data(suites: Sequence[str], data: Data) -> None:
    """Raise RecastError for a suite of another task or of other classes than those of the data."""
    task = task_named(data.val.task)
    fitting = suites_of(task)
    if others := [name for name in suites if name not in fitting]:
        raise RecastError(
            f"{others[0]} cannot be measured on {data.name}, which is for {task.title}: expected {', '.join(fitting)}"
        )
    for name in suites:
        evaluator(name).check(data)


def passes(suites: Sequence[str]) -> list[list[str]]:
    """Return the suites in groups: those that score the same images share a pass; the validation images come first."""
    by_images: dict[object, list[str]] = {None: []}
    for name in dict.fromkeys(suites):
        suite = evaluator(name)
        by_images.setdefault(suite.sources if suite.score else name, []).append(name)
    return [group for group in by_images.values() if group]
