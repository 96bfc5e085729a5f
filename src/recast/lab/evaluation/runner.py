"""`evaluate`: suites that look at the same images share a pass over them, and it goes on where it was stopped."""

from __future__ import annotations

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
from recast.lab.data.seeding import choose_balanced
from recast.lab.device import choose_device
from recast.lab.evaluation.cache import Cache, Scores
from recast.lab.evaluation.context import Batch, Context, NotMeasured, PixelModel, Score, Source
from recast.lab.evaluation.stats import Resampled
from recast.lab.evaluation.suites import check_suites, check_task, evaluator
from recast.lab.records import Difference, Row
from recast.lab.threads import stepped
from recast.tables import Table
from recast.tracing.examples import check_weights
from recast.tracing.hooks import in_eval

SAVE_EVERY = 30.0
"""Seconds between two savings of what was scored so far."""


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
    cache: Path | None = None,
    progress: bool = True,
) -> list[Row]:
    """Measure a model, or several by name, with every suite; all models see the same pixels.

    models: take normalised images (B, 3, H, W) and give logits (B, classes), also as `output.logits` or the first of a
    tuple; `data` says how images are normalised (a `PixelModel` brings its own normalisation). Their training flags and
    devices are restored; threads that evaluate one network at once use one device.
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
    for model in models.values():
        check_weights(model)
    if options.num_images is not None:
        kept = choose_balanced(data.val.labels, options.num_images, "num_images")
        data = replace(data, val=data.val.subset(kept))
    return Context(wrapped, data, batch_size, choose_device(device), options, workers)


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


def measure(
    context: Context, suites: Iterable[str], *, run: str = "", cache: Path | None = None, progress: bool = True
) -> Results:
    """`evaluate` with tables and paired differences; what could not be measured is named in the results."""
    suites = list(suites)
    check_task(suites, context.data.task, context.data.name)
    results = Results()
    models = context.models.values()
    # batches of attacks take minutes: Rich forgets the speed after 30 seconds, and shows no time that is left
    bar = Progress(console=Console(stderr=True), transient=True, disable=not progress, speed_estimate_period=3600.0)
    with in_eval(*models), ExitStack() as devices, bar:
        for model in models:
            devices.callback(model.to, next(model.parameters(), torch.empty(0)).device)
            model.to(context.device)
        scored, results.not_measured = score_suites(context, suites, cache, bar)
        for name in dict.fromkeys(suites):
            how, dataset = evaluator(name), context.dataset(name)
            if scores := scored.get(name):
                pool = how.pool and partial(how.pool, context)
                found = Resampled(scores, how.statistics, context.options.seed, pool)
                results.rows += found.rows(run, name, dataset)
                results.differences += found.differences(run, name, dataset)
            elif how.measure is not None:
                try:
                    for model_name, metric, value, n in how.measure(context):
                        results.rows.append(Row(run, model_name, name, dataset, metric, float(value), n))
                except NotMeasured as error:
                    results.not_measured.append(error)
            elif how.tabulate is not None:
                task = bar.add_task(name, total=1)
                try:
                    told = lambda share, task=task: bar.update(task, completed=share)  # noqa: E731
                    results.tables[name] = how.tabulate(replace(context, told=told))
                except NotMeasured as error:
                    results.not_measured.append(error)
                bar.update(task, completed=1)
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
        return min(scores.done for scores in self.scores.values())


def score_suites(
    context: Context, suites: Iterable[str], folder: Path | None = None, bar: Progress | None = None
) -> tuple[dict[str, dict[tuple[str, str], np.ndarray]], list[NotMeasured]]:
    """Per-image scores {suite: {(model, metric): (n, k)}} of the suites that have them, and what was missing.

    folder: where scores are kept. None: in memory only. What was scored is kept even if a pass is interrupted.
    """
    cache, jobs, missing = Cache(folder, context), list[Job](), list[NotMeasured]()
    for name in dict.fromkeys(suites):
        how = evaluator(name)
        if how.score is None:
            continue
        try:
            sources = [context.validation] if how.sources is None else how.sources(context)
        except NotMeasured as error:
            missing.append(error)
            continue
        opened = partial(cache.open, name, how.score, how.uses)
        jobs += [Job(name, how.score, source, opened(source)) for source in sources]
    shared: dict[tuple[int, int], list[Job]] = {}
    for job in jobs:
        shared.setdefault((id(job.source.images), id(job.source.columns)), []).append(job)
    bar, total = bar or Progress(disable=True), sum(len(together[0].source.images) for together in shared.values())
    task = bar.add_task("", total=total, visible=bool(jobs))
    for together in shared.values():
        bar.update(task, description=", ".join(f"{job.suite} {job.source.part}".strip() for job in together))
        _pass(context, together, partial(bar.advance, task))
    found: dict[str, dict[tuple[str, str], np.ndarray]] = {job.suite: {} for job in jobs}
    for name, model in product(found, context.models):
        arrays = {metric: a for job in jobs if job.suite == name for metric, a in job.scores[model].arrays.items()}
        if derive := evaluator(name).derive:
            arrays |= derive(arrays)
        found[name] |= {(model, metric): array for metric, array in arrays.items()}
    return found, missing


def _pass(context: Context, jobs: Sequence[Job], advance: Callable[[float], None]) -> None:
    """Go over the images of one source once, for all suites and models that are not done with them."""
    images = jobs[0].source.images
    todo = [job for job in jobs if job.done < len(images)]
    start = min((job.done for job in todo), default=len(images)) // context.batch_size
    advance(start * context.batch_size)
    saved = time.monotonic()
    try:
        for batch in context.batches(jobs[0].source, start) if todo else ():
            end, started = batch.first + len(batch), time.perf_counter()
            for job in todo:
                batch.models = {name: context.models[name] for name, kept in job.scores.items() if kept.done < end}
                if not batch.models:
                    continue
                batch.source = job.source
                scored = set()
                for score in job.score(batch):
                    job.scores[score.model].put(batch.first, score)
                    scored.add(score.model)
                for model in scored:  # a model that a suite leaves out is asked again the next time
                    job.scores[model].done = end
            advance(len(batch))
            if context.device.type == "cpu" and len(batch) == context.batch_size:
                stepped(time.perf_counter() - started, f"{jobs[0].suite} {jobs[0].source.part}")
            if time.monotonic() - saved > SAVE_EVERY:
                _save(todo)
                saved = time.monotonic()
    finally:
        _save(todo)


def _save(jobs: Sequence[Job]) -> None:
    for scores in (scores for job in jobs for scores in job.scores.values()):
        scores.save()
