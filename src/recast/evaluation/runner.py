"""The passes over the images: suites that look at the same images share one, and it goes on where it was stopped."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recast.evaluation.cache import Cache, Scores
from recast.evaluation.context import Context, Evaluator, NotMeasured, Source

SAVE_EVERY = 30.0
"""Seconds between two savings of what was scored so far."""
Advance = Callable[[str, int, int], None]
"""(suite, images that are done now, all of them)."""
Scored = dict[str, dict[str, np.ndarray]]
"""{model: {metric: (n, k)}} of a suite."""


@dataclass(frozen=True)
class Job:
    """A suite on one of its sources, with the scores of each model."""

    name: str
    evaluator: Evaluator
    source: Source
    scores: dict[str, Scores]

    @property
    def done(self) -> int:
        return min(scores.done for scores in self.scores.values())


def score_suites(
    context: Context,
    suites: Mapping[str, Evaluator],
    folder: Path | None = None,
    advance: Advance = lambda suite, images, total: None,
) -> tuple[dict[str, Scored], list[NotMeasured]]:
    """Per-image scores of the suites that have them, and the data sets that were missing.

    folder: where scores are kept. None: in memory only. What was scored is kept even if a pass is interrupted.
    """
    jobs, missing = _jobs(context, suites, folder)
    shared: dict[tuple[int, int], list[Job]] = {}
    totals = Counter[str]()
    for job in jobs:
        shared.setdefault((id(job.source.images), id(job.source.columns)), []).append(job)
        totals[job.name] += len(job.source.images)
    for together in shared.values():
        _pass(context, together, lambda name, images: advance(name, images, totals[name]))
    found: dict[str, Scored] = {}
    for name in totals:
        parts = [job for job in jobs if job.name == name]
        found[name] = {
            model: {metric: array for job in parts for metric, array in job.scores[model].arrays.items()}
            for model in context.models
        }
        if derive := suites[name].derive:
            found[name] = {model: arrays | derive(arrays) for model, arrays in found[name].items()}
    return found, missing


def _jobs(
    context: Context, suites: Mapping[str, Evaluator], folder: Path | None
) -> tuple[list[Job], list[NotMeasured]]:
    own = [context.validation]
    cache = None if folder is None else Cache(folder, context)
    jobs, missing = [], []
    for name, evaluator in suites.items():
        if evaluator.score is None:
            continue
        try:
            sources = own if evaluator.sources is None else evaluator.sources(context)
        except NotMeasured as error:
            missing.append(error)
            continue
        for source in sources:
            if cache is None:
                scores = {model: Scores(len(source.images)) for model in context.models}
            else:
                scores = cache.open(name, evaluator.uses, source)
            jobs.append(Job(name, evaluator, source, scores))
    return jobs, missing


def _pass(context: Context, jobs: Sequence[Job], advance: Callable[[str, int], None]) -> None:
    """Go over the images of one source once, for all suites and models that are not done with them."""
    for job in jobs:
        advance(job.name, job.done)
    todo = [job for job in jobs if job.done < len(job.source.images)]
    if not todo:
        return
    begun, saved = {id(job): job.done for job in jobs}, time.monotonic()
    try:
        for batch in context.batches(todo[0].source, min(job.done for job in todo) // context.batch_size):
            end = batch.first + len(batch)
            for job in todo:
                batch.models = {name: context.models[name] for name, kept in job.scores.items() if kept.done < end}
                if not batch.models:
                    continue
                batch.source = job.source
                assert job.evaluator.score is not None
                scored = set()
                for score in job.evaluator.score(batch):
                    job.scores[score.model].put(batch.first, score)
                    scored.add(score.model)
                for model in scored:  # a model that a suite leaves out is asked again the next time
                    job.scores[model].done = end
                advance(job.name, end - max(batch.first, begun[id(job)]))
            if time.monotonic() - saved > SAVE_EVERY:
                _save(todo)
                saved = time.monotonic()
    finally:
        _save(todo)


def _save(jobs: Sequence[Job]) -> None:
    for job in jobs:
        for scores in job.scores.values():
            scores.save()
