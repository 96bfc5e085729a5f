"""Functions that measure each suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recast.errors import RecastError, suggest
from recast.lab.analysis.cka import tabulate_cka
from recast.lab.analysis.fourier import tabulate_fourier
from recast.lab.data import Data
from recast.lab.evaluation import accuracy, attacks
from recast.lab.evaluation.basic_corruptions import mean_over_corruptions, score_basic
from recast.lab.evaluation.class_metrics import pool_classes, score_classes, sources_classes
from recast.lab.evaluation.context import Batch, Context, Score, Source, sampled
from recast.lab.evaluation.cost import measure_cost
from recast.lab.evaluation.frontier import tabulate_frontier
from recast.lab.evaluation.imagenet_corruptions import means_over_corruptions, sources_corruptions
from recast.lab.evaluation.imagenet_sets import (
    SETS,
    imagenet_wnids,
    outputs_of,
    sources_imagenet_c,
    sources_of_set,
    sources_real,
)
from recast.lab.evaluation.knn import score_knn, sources_knn
from recast.lab.evaluation.stats import Statistic, plain_mean
from recast.lab.evaluation.suites import SUITES
from recast.lab.folder.tables import Table
from recast.lab.task import suites_of, task_named

IMAGES = 500
"""Default number of validation images of an analysis: curves change little with more."""


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


def analyse(tabulate: Callable[..., Table], context: Context) -> Table:
    """Return the table of all models on `IMAGES` images, or on options.num_images."""
    images = context.data.val
    if context.options.num_images is None:
        images = sampled(images, IMAGES)
    return tabulate(context.models, (batch.images for batch in context.batches(Source(images))))


def analyse_agreement(context: Context) -> Table:
    """Return the prediction of every model for every validation image."""
    data, columns = context.data, {name: list[Tensor]() for name in ("label", *context.models)}
    for batch in context.batches():
        columns["label"].append(batch.labels)
        for name in context.models:
            columns[name].append(batch.logits(name).argmax(1))
    names = [data.val.image_name(index) for index in range(len(data.val))]
    predictions = [[data.classes[value] for value in torch.cat(parts).tolist()] for parts in columns.values()]
    rows = tuple(zip(range(len(names)), names, *predictions, strict=True))
    return Table("agreement", ("index", "image", *columns), rows)


EVALUATORS = {
    "clean": Evaluator(accuracy.score_clean, statistics={"loss": plain_mean}),
    "classes": Evaluator(score_classes, sources=sources_classes, pool=pool_classes),
    "fgsm": Evaluator(attacks.score_fgsm, uses=("eps",)),
    "pgd": Evaluator(attacks.score_pgd, uses=("eps", "steps")),
    "basic": Evaluator(score_basic, derive=mean_over_corruptions),
    "corruptions": Evaluator(
        accuracy.score_part, sources=sources_corruptions, derive=means_over_corruptions, uses=("seed",)
    ),
    "imagenet-c": Evaluator(
        accuracy.score_part, sources=sources_imagenet_c, derive=partial(means_over_corruptions, with_mce=True)
    ),
    **{
        name: Evaluator(accuracy.score_top, sources=partial(sources_of_set, suite=name))
        for name in ("imagenet-a", "imagenet-r", "imagenet-v2")
    },
    "imagenet-real": Evaluator(accuracy.score_top, sources=sources_real),
    "resolution": Evaluator(accuracy.score_resolution, sources=accuracy.sources_resolution),
    "knn": Evaluator(score_knn, sources=sources_knn, uses=("neighbours",), takes_other_labels=True),
    "cost": Evaluator(measure=measure_cost),
    "fourier": Evaluator(tabulate=partial(analyse, tabulate_fourier)),
    "cka": Evaluator(tabulate=partial(analyse, tabulate_cka)),
    "agreement": Evaluator(tabulate=analyse_agreement),
    "frontier": Evaluator(tabulate=tabulate_frontier),
}
"""Evaluators by the names of `recast.lab.evaluation.suites`, without those of other tasks; papers add theirs."""


def evaluator(suite: str) -> Evaluator:
    """Return the evaluator of a suite."""
    return EVALUATORS[suite] if suite in EVALUATORS else task_named(SUITES[suite].task).evaluators()[suite]


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
        if SUITES[name].needs:
            outputs_of(data, imagenet_wnids(*SETS.get(name, ())[:1]), name)


def passes(suites: Sequence[str]) -> list[list[str]]:
    """Return the suites in groups: those that score the same images share a pass; the validation images come first."""
    by_images: dict[object, list[str]] = {None: []}
    for name in dict.fromkeys(suites):
        suite = evaluator(name)
        by_images.setdefault(suite.sources if suite.score else name, []).append(name)
    return [group for group in by_images.values() if group]
