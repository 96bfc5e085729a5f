"""`evaluate`: suites of the same images share one pass over them; an interrupted pass continues."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

from recast.config import typed
from recast.errors import RecastError
from recast.lab.config.evaluation import Options
from recast.lab.data import Data
from recast.lab.data.device import choose_device
from recast.lab.data.seeding import choose_stratified
from recast.lab.evaluation.cache import Cache, Scores
from recast.lab.evaluation.context import Batch, Context, NotMeasured, PixelModel, Score, Source
from recast.lab.evaluation.evaluators import check_data, check_suites, evaluator
from recast.lab.evaluation.image_values import ImageValues, Key
from recast.lab.evaluation.stats import Compared
from recast.lab.evaluation.suites import PER_CORRUPTION, SUITES
from recast.lab.folder.records import Difference, Row
from recast.lab.folder.tables import Table
from recast.lab.training.distributed import ReportedByFirst, gathered_objects, on_first
from recast.modes import in_eval
from recast.tracing.examples import check_weights

SAVE_EVERY = 30.0
"""Seconds between two saves of the scores."""


@typed("models", "data")
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
    cache: str | Path | None = None,
    progress: bool = True,
) -> list[Row]:
    """Measure a model, or several by name, with every suite; all models see the same pixels.

    Args:
        models: map normalised images (B, 3, H, W) to logits (B, classes), also as `output.logits` or the first of a
            tuple. A `PixelModel` has its own normalisation, other models that of `data`. Training flags and devices are
            restored; threads that evaluate one network at once must use one device.
        suites: names of `recast.lab.evaluation.suites.SUITES`.
        data: its validation images are measured.
        run: name in the rows.
        cache: folder of per-image scores by weights, images and options, which are not computed again.

    Returns:
        One row for each model and metric.

    Raises:
        RecastError: before any measurement, for an unknown suite, no images, a bad option or a missing device.
        NotMeasured: if a suite's data set is missing, after the other suites (with a cache nothing is lost).

    Example:
        >>> data = recast.lab.data.load_data(recast.lab.config.DataConfig("digits", num_val=20, img_size=16))
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 10))
        >>> [row.metric for row in recast.lab.evaluation.evaluate(model, "clean", data, progress=False)]
        ['top1', 'top5', 'loss']
    """
    suites = [suites] if isinstance(suites, str) else suites
    check_suites(suites)
    context = open_context(
        models if isinstance(models, Mapping) else {"model": models}, data, batch_size, device, options, workers
    )
    results = measure(context, suites, run=run, cache=None if cache is None else Path(cache), progress=progress)
    if results.not_measured:
        raise results.not_measured[0]
    return results.rows


def open_context(
    models: Mapping[str, nn.Module],
    data: Data,
    batch_size: int = 256,
    device: str | torch.device = "cpu",
    options: Options = Options(),
    workers: int = 0,
) -> Context:
    """Return models and images as suites take them. Raises RecastError as `evaluate` does."""
    if not models:
        raise RecastError("no model to evaluate")
    if batch_size < 1:
        raise RecastError(f"batch_size must be at least 1, got {batch_size}")
    if len(data.val) == 0:
        raise RecastError(f"{data.name} has no validation images to evaluate on")
    wrapped = {
        name: model if isinstance(model, PixelModel) else PixelModel(model, data.mean, data.std)
        for name, model in models.items()
    }
    for model in models.values():
        check_weights(model)
    if options.num_images is not None:
        indices = choose_stratified(data.val.labels, options.num_images, "num_images")
        data = replace(data, val=data.val.subset(indices))
    return Context(wrapped, data, batch_size, choose_device(device), options, workers)


@dataclass
class Results:
    """Results of an evaluation."""

    rows: list[Row] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    tables: dict[str, Table] = field(default_factory=dict)
    """By suite."""
    not_measured: list[NotMeasured] = field(default_factory=list)
    """Reasons of suites that could not be measured."""
    images: dict[Key, ImageValues] = field(default_factory=dict)
    """What each image contributes to each value."""

    def extend(self, other: Results) -> None:
        """Add the results of another evaluation."""
        self.rows += other.rows
        self.differences += other.differences
        self.tables |= other.tables
        self.images |= other.images
        self.not_measured += other.not_measured


def measure(
    context: Context, suites: Iterable[str], *, run: str = "", cache: Path | None = None, progress: bool = True
) -> Results:
    """Evaluate as `evaluate`, with tables and paired differences; suites that cannot be measured do not raise."""
    suites = list(dict.fromkeys(suites))
    check_data(suites, context.data)
    results = Results()
    models = context.models.values()
    # batches of attacks take minutes: Rich forgets the speed after 30 seconds, and shows no remaining time
    bar = Progress(console=Console(stderr=True), transient=True, disable=not progress, speed_estimate_period=3600.0)
    with in_eval(*models), ExitStack() as devices, bar:
        for model in models:
            devices.callback(model.to, next(model.parameters(), torch.empty(0)).device)
            model.to(context.device)
        scored, results.not_measured = score_suites(context, suites, cache, bar)
        for name in suites:
            suite, dataset = evaluator(name), context.dataset(name)
            try:
                if scores := scored.get(name):
                    pool = suite.pool and partial(suite.pool, context)
                    compared = Compared(scores, suite.statistics, pool)
                    results.rows += compared.rows(run, name, dataset)
                    results.differences += compared.differences(run, name, dataset)
                    for (arm, metric), values in compared.images.items():
                        if not PER_CORRUPTION.match(metric):
                            results.images[name, metric, arm] = values
                elif context.process:
                    continue  # what follows has no batches to share
                elif suite.measure is not None:
                    for model_name, metric, value, n in suite.measure(context):
                        results.rows.append(Row(run, model_name, name, dataset, metric, float(value), n))
                elif suite.tabulate is not None:
                    results.tables[name] = suite.tabulate(context)
            except NotMeasured as error:
                results.not_measured.append(error)
    return results


@dataclass(frozen=True)
class Job:
    """A suite on one of its sources, with the scores of each model."""

    suite: str
    score: Callable[[Batch], Iterator[Score]]
    source: Source
    scores: dict[str, Scores]

    @property
    def done(self) -> int:
        """Return the number of images that all models have scores for."""
        return min(scores.done for scores in self.scores.values())


def score_suites(
    context: Context, suites: Iterable[str], folder: Path | None = None, bar: Progress | None = None
) -> tuple[dict[str, dict[tuple[str, str], np.ndarray]], list[NotMeasured]]:
    """Return per-image scores {suite: {(model, metric): (n, k)}} of suites that have them, and errors of the others.

    folder: of the scores; None: in memory. Scores of an interrupted pass are saved.
    """
    cache, jobs, missing = Cache(folder, context), list[Job](), list[NotMeasured]()
    for name in suites:
        suite = evaluator(name)
        if suite.score is None:
            continue
        try:
            if SUITES[name].needs_rgb and context.data.in_chans is not None:
                raise NotMeasured(f"{name} requires RGB images, but {context.data.name} is read with in_chans")
            sources = [context.validation] if suite.sources is None else suite.sources(context)
        except NotMeasured as error:
            missing.append(error)
            continue
        jobs += [Job(name, suite.score, s, cache.open(name, suite.uses, s)) for s in sources]
    stored = [each for job in jobs for each in job.scores.values()]
    if context.processes > 1:  # a machine without the first process's folder takes the same share
        for each_scores, done in zip(stored, on_first(lambda: [each.done for each in stored]), strict=True):
            each_scores.done = done
    shared: dict[tuple[int, int], list[Job]] = {}
    for job in jobs:
        shared.setdefault((id(job.source.images), id(job.source.columns)), []).append(job)
    bar, total = bar or Progress(disable=True), sum(len(group[0].source.images) for group in shared.values())
    task = bar.add_task("", total=total, visible=bool(jobs))
    for group in shared.values():
        bar.update(task, description=", ".join(f"{job.suite} {job.source.part}".strip() for job in group))
        _pass(context, group, partial(bar.advance, task))
    scores: dict[str, dict[tuple[str, str], np.ndarray]] = {job.suite: {} for job in jobs}
    if context.process:  # the first process has all
        return {}, missing
    for name, model in product(scores, context.models):
        arrays = {metric: a for job in jobs if job.suite == name for metric, a in job.scores[model].arrays.items()}
        if derive := evaluator(name).derive:
            arrays |= derive(arrays)
        scores[name] |= {(model, metric): array for metric, array in arrays.items()}
    return scores, missing


@dataclass
class Part:
    """A process's batch: the places of its images, the scores of its jobs, and the error that ended them."""

    first: int = 0
    end: int = 0
    scores: list[tuple[int, list[Score]]] = field(default_factory=list)
    """With the numbers of the jobs."""
    error: str = ""


def _pass(context: Context, jobs: Sequence[Job], advance: Callable[[float], None]) -> None:
    """Score the images of one source once, for all unfinished suites and models; processes take turns at batches."""
    images = jobs[0].source.images
    todo = [job for job in jobs if job.done < len(images)]
    start = min((job.done for job in todo), default=len(images)) // context.batch_size
    advance(start * context.batch_size)
    if not todo:
        return
    saved, batches = time.monotonic(), context.batches(jobs[0].source, start + context.process, context.processes)
    try:
        for _ in range(start, math.ceil(len(images) / context.batch_size), context.processes):
            mine, error = _scored(context, todo, batches)
            for process, part in enumerate(gathered_objects(mine) if context.processes > 1 else [mine]):
                for job, scores in part.scores:
                    for score in scores:
                        todo[job].scores[score.model].put(part.first, score)
                    for model in {score.model for score in scores}:  # one that the suite skips is measured again
                        todo[job].scores[model].done = part.end
                if part.error:
                    raise error if error and process == context.process else ReportedByFirst(part.error)
                advance(part.end - part.first)
            if time.monotonic() - saved > SAVE_EVERY:
                _save(context, todo)
                saved = time.monotonic()
    finally:
        _save(context, todo)


def _scored(context: Context, jobs: Sequence[Job], batches: Iterator[Batch]) -> tuple[Part, BaseException | None]:
    """Score the next batch, if there is one. The error is returned: with the scores before it, which are stored."""
    part = Part()
    try:
        if (batch := next(batches, None)) is None:
            return part, None
        part.first, part.end = batch.first, batch.first + len(batch)
        attacks = (job.scores.items() for job in jobs if SUITES[job.suite].kind == "attack")
        batch.attacked = frozenset(name for items in attacks for name, scores in items if scores.done < part.end)
        for number, job in enumerate(jobs):
            unfinished = {name for name, scores in job.scores.items() if scores.done < part.end}
            batch.models = {name: model for name, model in context.models.items() if name in unfinished}
            batch.source = job.source
            scores = list(job.score(batch) if batch.models else ())
            part.scores.append((number, [s._replace(values=s.values.detach().float().cpu()) for s in scores]))
    except BaseException as error:
        if context.processes > 1 and not isinstance(error, Exception):
            raise  # the other processes were told to stop, too
        part.error = str(error) or type(error).__name__
        return part, error
    return part, None


def _save(context: Context, jobs: Sequence[Job]) -> None:
    for job in () if context.process else jobs:
        for scores in job.scores.values():
            scores.save()
