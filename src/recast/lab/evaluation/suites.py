"""How each suite is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from recast.analysis.cka import tabulate_cka
from recast.analysis.fourier import tabulate_fourier
from recast.analysis.head_statistics import tabulate_heads
from recast.errors import RecastError, suggest
from recast.lab.data.shards import ImageStream
from recast.lab.evaluation import accuracy, attacks
from recast.lab.evaluation.agreement import tabulate_agreement
from recast.lab.evaluation.basic_corruptions import mean_over_corruptions, score_basic
from recast.lab.evaluation.context import Batch, Context, NotMeasured, Score, Source, sampled
from recast.lab.evaluation.cost import measure_cost
from recast.lab.evaluation.frontier import tabulate_frontier
from recast.lab.evaluation.imagenet_corruptions import means_over_corruptions, sources_corruptions
from recast.lab.evaluation.imagenet_sets import sources_imagenet_c, sources_of_set, sources_real
from recast.lab.evaluation.knn import score_knn, score_linear, sources_knn
from recast.lab.evaluation.retrieval import measure_separability, score_retrieval, tabulate_tsne
from recast.lab.evaluation.stats import Statistic, plain_mean
from recast.lab.suites import SUITES
from recast.lab.tasks import TASKS, Task, suites_of
from recast.layers.cmhsa import recast_layers
from recast.tables import Table

IMAGES, HEAD_IMAGES = 500, 200
"""Validation images that an analysis looks at, unless num_images says otherwise: curves change little with more, and
the maps of all heads take their time."""


@dataclass(frozen=True)
class Evaluator:
    """How a suite is measured: by per-image scores, by numbers that are no mean over images, or into a table.

    A metric's value is statistic(mean over images of its scores); the statistic is 100 times the mean, a percentage,
    where `statistics` names no other. So every suite gets intervals, paired differences, a cache and resumption alike.
    """

    score: Callable[[Batch], Iterator[Score]] | None = None
    """Scores of `batch.models`."""
    measure: Callable[[Context], Iterator[tuple[str, str, float, int]]] | None = None
    """(model, metric, value, images behind it)."""
    tabulate: Callable[[Context], Table] | None = None
    sources: Callable[[Context], Sequence[Source]] | None = None
    """The images. None: the validation images, in a pass that all such suites share."""
    derive: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """More metrics from the scores of a model over all sources: {metric: array (n, k)} → the further ones."""
    statistics: dict[str, Statistic] = field(default_factory=dict)
    pool: Callable[[Context, str, np.ndarray, np.ndarray], dict[str, np.ndarray]] | None = None
    """`recast.lab.evaluation.stats.Pool` of a context, for metrics that are no function of a mean over images."""
    uses: tuple[str, ...] = ()
    """The fields of `Options` that change its scores."""


def analyse(tabulate: Callable[..., Table], context: Context) -> Table:
    """What `tabulate` finds in all models on some of the images."""
    return tabulate(context.models, lambda: _some(context, IMAGES))


def analyse_heads(context: Context) -> Table:
    """Gate, span, distance, non-locality and entropy of every head; of kept weights too."""
    if not any(recast_layers(model) for model in context.models.values()):
        raise NotMeasured("heads looks at recast layers, and no model here has one")
    return tabulate_heads(context.models, lambda: _some(context, HEAD_IMAGES), epochs=context.epochs)


def analyse_agreement(context: Context) -> Table:
    """Every model's prediction for every validation image."""
    names = [context.data.val.image_name(index) for index in range(len(context.data.val))]
    batches = lambda: ((batch.images, batch.labels) for batch in context.batches())  # noqa: E731
    return tabulate_agreement(context.models, batches, context.data.classes, names=names)


def _some(context: Context, most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of the images that are looked at; of shards, which cannot be chosen from, the first ones."""
    images = context.data.val
    is_stream = isinstance(images, ImageStream)
    if context.options.num_images is None and not is_stream:
        images = sampled(images, most)
    for batch in context.batches(Source(images)):
        if is_stream and batch.first >= most:
            return
        yield batch.images, batch.labels


EVALUATORS = {
    "clean": Evaluator(
        accuracy.score_clean, statistics={"loss": plain_mean, "ece": accuracy.expected_calibration_error}
    ),
    "fgsm": Evaluator(attacks.score_fgsm, uses=("eps",)),
    "pgd": Evaluator(attacks.score_pgd, uses=("eps", "steps", "step_size", "restarts", "random_start", "seed")),
    "autoattack": Evaluator(attacks.score_autoattack, sources=attacks.sources_autoattack, uses=("eps", "seed")),
    "basic": Evaluator(score_basic, derive=mean_over_corruptions),
    "corruptions": Evaluator(
        accuracy.score_part, sources=sources_corruptions, derive=means_over_corruptions, uses=("seed",)
    ),
    "imagenet-c": Evaluator(
        accuracy.score_part, sources=sources_imagenet_c, derive=partial(means_over_corruptions, with_mce=True)
    ),
    **{
        name: Evaluator(accuracy.score_top, sources=partial(sources_of_set, suite=name))
        for name in ("imagenet-a", "imagenet-r", "imagenet-v2", "imagenet-sketch")
    },
    "imagenet-real": Evaluator(accuracy.score_top, sources=sources_real),
    "resolution": Evaluator(accuracy.score_resolution, sources=accuracy.sources_resolution),
    "knn": Evaluator(score_knn, sources=sources_knn, uses=("neighbours", "labels")),
    "retrieval": Evaluator(
        score_retrieval, sources=sources_knn, statistics={"neighbours": plain_mean}, uses=("labels",)
    ),
    "linear": Evaluator(score_linear, sources=sources_knn, statistics={"weight_decay": plain_mean}, uses=("labels",)),
    "separability": Evaluator(measure=measure_separability, uses=("labels", "seed")),
    "frequency": Evaluator(accuracy.score_frequency),
    "cost": Evaluator(measure=measure_cost),
    "fourier": Evaluator(tabulate=partial(analyse, tabulate_fourier)),
    "heads": Evaluator(tabulate=analyse_heads),
    "cka": Evaluator(tabulate=partial(analyse, tabulate_cka)),
    "agreement": Evaluator(tabulate=analyse_agreement),
    "tsne": Evaluator(tabulate=tabulate_tsne, uses=("labels", "seed")),
    "frontier": Evaluator(tabulate=tabulate_frontier),
}
"""By the names of `recast.lab.suites`, but for those of other tasks."""


def evaluator(suite: str) -> Evaluator:
    """Return how a suite is measured."""
    return EVALUATORS[suite] if suite in EVALUATORS else TASKS[SUITES[suite].task].evaluators()[suite]


def check_suites(suites: Sequence[str]) -> None:
    """Raise RecastError for a suite that is not there, or where none is asked for."""
    for name in suites:
        if name not in SUITES:
            raise RecastError(f"unknown suite {name!r}: expected {', '.join(SUITES)}.{suggest(name, SUITES)}")
    if not suites:
        raise RecastError(f"nothing to evaluate: expected suites ({', '.join(SUITES)}), got none")


def check_task(suites: Sequence[str], task: Task, dataset: str) -> None:
    """Raise RecastError for a suite that is of another task than the data."""
    fitting = suites_of(task)
    if others := [name for name in suites if name not in fitting]:
        raise RecastError(
            f"{others[0]} cannot be measured on {dataset}, which is for {task.title}: expected {', '.join(fitting)}"
        )


def passes(suites: Sequence[str]) -> list[list[str]]:
    """The suites in groups that are measured in one go: those that score the same images share one pass."""
    found: dict[object, list[str]] = {None: []}  # first those of the validation images, whatever was asked first
    for name in dict.fromkeys(suites):
        how = evaluator(name)
        found.setdefault(how.sources if how.score else name, []).append(name)
    return [together for together in found.values() if together]
