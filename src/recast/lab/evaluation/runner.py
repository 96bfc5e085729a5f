"""`evaluate`: suites of the same images share one pass over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

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
from recast.lab.evaluation.context import Batch, Context, NotMeasured, PixelModel, Score, Source
from recast.lab.evaluation.stats import Resampled
from recast.lab.evaluation.suites import check_suites, check_task, evaluator
from recast.lab.records import Difference, Row
from recast.lab.suites import SUITES
from recast.lab.tables import Table
from recast.modes import in_eval
from recast.tracing.examples import check_weights


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
    progress: bool = True,
) -> list[Row]:
    """Measure a model, or several by name, with every suite; all models see the same pixels.

    Args:
        models: map normalised images (B, 3, H, W) to logits (B, classes), also as `output.logits` or the first of a
            tuple. A `PixelModel` has its own normalisation, other models that of `data`. Training flags and devices are
            restored; threads that evaluate one network at once must use one device.
        suites: names of `recast.lab.suites.SUITES`.
        data: its validation images are measured.
        run: name in the rows.

    Returns:
        One row for each model and metric.

    Raises:
        RecastError: before anything is measured, for an unknown suite, no images, a bad option or a missing device.
        NotMeasured: if a suite's data set is missing, after the other suites.

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
    results = measure(context, suites, run=run, progress=progress)
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
        indices = choose_balanced(data.val.labels, options.num_images, "num_images")
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

    def extend(self, other: Results) -> None:
        """Add the results of another evaluation."""
        self.rows += other.rows
        self.differences += other.differences
        self.tables |= other.tables
        self.not_measured += other.not_measured


def measure(context: Context, suites: Iterable[str], *, run: str = "", progress: bool = True) -> Results:
    """Evaluate as `evaluate`, with tables and paired differences; suites that cannot be measured do not raise."""
    suites = list(dict.fromkeys(suites))
    check_task(suites, context.data.task, context.data.name)
    results = Results()
    models = context.models.values()
    # batches of attacks take minutes: Rich forgets the speed after 30 seconds, and shows no remaining time
    bar = Progress(console=Console(stderr=True), transient=True, disable=not progress, speed_estimate_period=3600.0)
    with in_eval(*models), ExitStack() as devices, bar:
        for model in models:
            devices.callback(model.to, next(model.parameters(), torch.empty(0)).device)
            model.to(context.device)
        scored, results.not_measured = score_suites(context, suites, bar)
        for name in suites:
            suite, dataset = evaluator(name), context.dataset(name)
            try:
                if scores := scored.get(name):
                    pool = suite.pool and partial(suite.pool, context)
                    resampled = Resampled(scores, suite.statistics, context.options.seed, pool)
                    results.rows += resampled.rows(run, name, dataset)
                    results.differences += resampled.differences(run, name, dataset)
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
    """A suite on one of its sources."""

    suite: str
    score: Callable[[Batch], Iterator[Score]]
    source: Source
    scores: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)
    """(model, metric) → (n, k)."""

    def put(self, first: int, score: Score) -> None:
        """Store the scores of images `first`, `first` + 1, ...; a batch with more numbers per image widens all."""
        values = score.values.detach().float().cpu().numpy()
        values = values.reshape(len(values), -1)
        key = score.model, score.metric
        array = self.scores.get(key, np.zeros((len(self.source.images), 0), dtype=np.float32))
        if more := max(values.shape[1] - array.shape[1], 0):
            array = np.pad(array, ((0, 0), (0, more)))
        self.scores[key] = array
        array[first : first + len(values), : values.shape[1]] = values


def score_suites(
    context: Context, suites: Iterable[str], bar: Progress | None = None
) -> tuple[dict[str, dict[tuple[str, str], np.ndarray]], list[NotMeasured]]:
    """Return per-image scores {suite: {(model, metric): (n, k)}} of the suites that have them, and what was missing."""
    jobs, missing = list[Job](), list[NotMeasured]()
    for name in suites:
        suite = evaluator(name)
        if suite.score is None:
            continue
        try:
            if SUITES[name].needs_rgb and context.data.in_chans is not None:
                raise NotMeasured(f"{name} requires RGB pictures, {context.data.name} is read with in_chans")
            sources = [context.validation] if suite.sources is None else suite.sources(context)
        except NotMeasured as error:
            missing.append(error)
            continue
        jobs += [Job(name, suite.score, source) for source in sources]
    shared: dict[tuple[int, int], list[Job]] = {}
    for job in jobs:
        shared.setdefault((id(job.source.images), id(job.source.columns)), []).append(job)
    bar, total = bar or Progress(disable=True), sum(len(group[0].source.images) for group in shared.values())
    task = bar.add_task("", total=total, visible=bool(jobs))
    for group in shared.values():
        bar.update(task, description=", ".join(f"{job.suite} {job.source.part}".strip() for job in group))
        _pass(context, group, partial(bar.advance, task))
    scores: dict[str, dict[tuple[str, str], np.ndarray]] = {job.suite: {} for job in jobs}
    for name, model in product(scores, context.models):
        arrays = {key[1]: a for job in jobs if job.suite == name for key, a in job.scores.items() if key[0] == model}
        if derive := evaluator(name).derive:
            arrays |= derive(arrays)
        scores[name] |= {(model, metric): array for metric, array in arrays.items()}
    return scores, missing


def _pass(context: Context, jobs: Sequence[Job], advance: Callable[[float], None]) -> None:
    """Score the images of one source once, for all suites and models."""
    for batch in context.batches(jobs[0].source):
        for job in jobs:
            batch.source = job.source
            for score in job.score(batch):
                job.put(batch.first, score)
        advance(len(batch))
