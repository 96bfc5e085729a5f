"""How each suite is measured, and `evaluate`, which measures them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from recast.analysis.agreement import tabulate_agreement
from recast.analysis.cka import tabulate_cka
from recast.analysis.fourier import tabulate_fourier
from recast.analysis.head_statistics import tabulate_heads
from recast.data import Data
from recast.data.seeding import choose_balanced
from recast.data.shards import ImageStream
from recast.device import choose_device
from recast.errors import RecastError, suggest
from recast.evaluation import accuracy, attacks
from recast.evaluation.basic_corruptions import mean_over_corruptions, score_basic
from recast.evaluation.context import Context, Evaluator, NotMeasured, PixelModel, Source
from recast.evaluation.cost import measure_cost
from recast.evaluation.imagenet_corruptions import means_over_corruptions, sources_corruptions
from recast.evaluation.imagenet_sets import sources_imagenet_c, sources_of_set, sources_real
from recast.evaluation.knn import score_knn, sources_knn
from recast.evaluation.runner import Scored, score_suites
from recast.evaluation.stats import Resampled, plain_mean
from recast.layers.cmhsa import recast_layers
from recast.run.config.evaluation import Options
from recast.run.records import Difference, Row
from recast.run.suites import SUITES
from recast.run.tables import Table
from recast.tracing.hooks import in_eval

IMAGES, HEAD_IMAGES = 500, 200
"""Validation images that an analysis looks at, unless num_samples says otherwise: curves change little with more, and
the maps of all heads take their time."""


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
    if context.options.num_samples is None and len(images) > most and not is_stream:
        images = images.subset(choose_balanced(images.labels, most, "num_samples"))
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
    "knn": Evaluator(score_knn, sources=sources_knn, uses=("neighbours",)),
    "frequency": Evaluator(accuracy.score_frequency),
    "cost": Evaluator(measure=measure_cost),
    "fourier": Evaluator(tabulate=partial(analyse, tabulate_fourier)),
    "heads": Evaluator(tabulate=analyse_heads),
    "cka": Evaluator(tabulate=partial(analyse, tabulate_cka)),
    "agreement": Evaluator(tabulate=analyse_agreement),
}
"""By the names of `recast.run.suites`."""

COMPARED = (("recast", "finetuned"), ("recast", "parent"), ("finetuned", "parent"))
"""Which arms are subtracted from which."""


@dataclass
class Results:
    """What an evaluation found."""

    rows: list[Row] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    tables: dict[str, Table] = field(default_factory=dict)
    """By suite."""
    not_measured: list[NotMeasured] = field(default_factory=list)
    """Why suites that were asked for could not be measured."""

    def extend(self, other: Results) -> None:
        self.rows += other.rows
        self.differences += other.differences
        self.tables |= other.tables
        self.not_measured += other.not_measured


def evaluate(
    models: nn.Module | Mapping[str, nn.Module],
    suites: str | Sequence[str],
    data: Data,
    *,
    run: str = "",
    batch_size: int = 256,
    device: str | torch.device = "cpu",
    options: Options = Options(),
    workers: int = 0,
    cache: Path | None = None,
    progress: bool = True,
) -> list[Row]:
    """Measure a model, or several by name, with every suite; all models see the same pixels.

    models: take normalised images (B, 3, H, W) and give logits (B, classes); `data` says how images are normalised (a
    `PixelModel` brings its own normalisation). Their training flags and devices are restored.
    cache: a folder that keeps per-image scores, by weights, images and options. What is there is not measured again.
    Raises RecastError before anything is measured for an unknown suite, no images, a bad option or an absent device;
    `NotMeasured` where a suite's data set is missing, after the others are measured (with a cache nothing is lost).
    """
    suites = [suites] if isinstance(suites, str) else suites
    check_suites(suites)
    context = open_context(
        models if isinstance(models, Mapping) else {"model": models}, data, batch_size, device, options, workers
    )
    results = measure(context, suites, run=run, cache=cache, progress=progress)
    if results.not_measured:
        raise results.not_measured[0]
    return results.rows


def check_suites(suites: Sequence[str]) -> None:
    """Raise RecastError for a suite that is not there, or where none is asked for."""
    for name in suites:
        if name not in SUITES:
            raise RecastError(f"unknown suite {name!r}: expected {', '.join(SUITES)}.{suggest(name, SUITES)}")
    if not suites:
        raise RecastError(f"nothing to evaluate: expected suites ({', '.join(SUITES)}), got none")


def open_context(
    models: Mapping[str, nn.Module],
    data: Data,
    batch_size: int = 256,
    device: str | torch.device = "cpu",
    options: Options = Options(),
    workers: int = 0,
) -> Context:
    """Models and images as suites take them. Raises RecastError as `evaluate` does."""
    if not models:
        raise RecastError("nothing to evaluate: expected at least one model, got none")
    if batch_size < 1:
        raise RecastError(f"batch_size must be at least 1, got {batch_size}")
    if len(data.val) == 0:
        raise RecastError(f"{data.name} has no validation images to evaluate on")
    wrapped = {
        name: model if isinstance(model, PixelModel) else PixelModel(model, data.mean, data.std)
        for name, model in models.items()
    }
    if options.num_samples is not None:
        kept = choose_balanced(data.val.labels, options.num_samples, "num_samples")
        data = replace(data, val=data.val.subset(kept))
    return Context(wrapped, data, batch_size, choose_device(device), options, workers)


def measure(
    context: Context, suites: Sequence[str], *, run: str = "", cache: Path | None = None, progress: bool = True
) -> Results:
    """`evaluate` with tables and paired differences; what could not be measured is named in the results."""
    chosen = {name: EVALUATORS[name] for name in suites}
    results = Results()
    with _progress(progress) as bar, _ready(context.models.values(), context.device):
        tasks = {name: bar.add_task(name, total=None) for name in chosen}
        scored, results.not_measured = score_suites(
            context, chosen, cache, lambda name, images, total: bar.update(tasks[name], advance=images, total=total)
        )
        for name, evaluator in chosen.items():
            if evaluator.tabulate is not None:
                try:
                    results.tables[name] = evaluator.tabulate(context)
                except NotMeasured as error:
                    results.not_measured.append(error)
                bar.update(tasks[name], advance=1, total=1)
            elif evaluator.measure is not None:
                for model, metric, value, n in evaluator.measure(context):
                    results.rows.append(Row(run, model, name, context.data.name, metric, float(value), n))
            elif name in scored:
                rows, differences = summarise(run, name, context.dataset(name), scored[name], context.options.seed)
                results.rows += rows
                results.differences += differences
    return results


def groups(suites: Sequence[str]) -> list[list[str]]:
    """The suites in groups that are measured in one go: those that score the validation images share one pass."""
    shared = [name for name in dict.fromkeys(suites) if EVALUATORS[name].score and EVALUATORS[name].sources is None]
    alone = [[name] for name in dict.fromkeys(suites) if name not in shared]
    return [shared, *alone] if shared else alone


def summarise(run: str, name: str, dataset: str, scored: Scored, seed: int) -> tuple[list[Row], list[Difference]]:
    """Rows with 95 % intervals, and paired differences between arms."""
    scores = {(model, metric): a for model, arrays in scored.items() for metric, a in arrays.items()}
    if not scores:
        return [], []
    found = Resampled(scores, EVALUATORS[name].statistics, seed)
    rows = [
        Row(run, model, name, dataset, metric, value, found.n, *found.interval(model, metric))
        for (model, metric), value in found.values.items()
    ]
    differences = [
        Difference(run, model, other, name, dataset, metric, *found.difference(model, other, metric), found.n)
        for model, other in COMPARED
        for metric in dict.fromkeys(metric for _, metric in scores)
        if (model, metric) in scores and (other, metric) in scores
    ]
    return rows, differences


@contextmanager
def _ready(models: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Eval mode, on `device`; afterwards every module's training flag and the models' devices are as before."""
    devices = [(model, next(model.parameters(), torch.empty(0)).device) for model in models]
    with in_eval(*(model for model, _ in devices)):
        try:
            for model, _ in devices:
                model.to(device)
            yield
        finally:
            for model, before in devices:
                model.to(before)


def _progress(shown: bool) -> Progress:
    columns = TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown)
