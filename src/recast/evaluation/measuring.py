"""The passes over the images: suites that look at the same images share one, and it goes on where it was stopped."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from recast.evaluation.bench import Bench, NotMeasured, Source, Suite
from recast.evaluation.cache import Scores, SourceKeys, model_key, score_file, scores_key

SAVE_EVERY = 30.0
"""Seconds between two savings of what was scored so far."""

Arrays = dict[str, np.ndarray]
Advance = Callable[[str, int, int], None]
"""(suite, images that are done now, all of them)."""


@dataclass(frozen=True)
class Job:
    """A suite on one of its sources, with the scores of each model."""

    name: str
    suite: Suite
    source: Source
    scores: dict[str, Scores]

    @property
    def done(self) -> int:
        return min(scores.done for scores in self.scores.values())


@dataclass(frozen=True)
class Scored:
    """What a suite found on the images of one data set."""

    dataset: str
    scores: dict[str, Arrays]
    """{model: {metric: (n, k)}}."""


def score_suites(
    bench: Bench,
    suites: Mapping[str, Suite],
    folder: Path | None = None,
    advance: Advance = lambda suite, images, total: None,
) -> tuple[dict[str, Scored], list[NotMeasured]]:
    """Per-image scores of the suites that have them, and the data sets that were missing.

    folder: where scores are kept. None: in memory only. What was scored is kept even if a pass is interrupted.
    """
    jobs, missing = _jobs(bench, suites, folder)
    shared: dict[tuple[int, int], list[Job]] = {}
    for job in jobs:
        shared.setdefault((id(job.source.images), id(job.source.columns)), []).append(job)
    totals = Counter[str]()
    for job in jobs:
        totals[job.name] += len(job.source.images)
    for together in shared.values():
        _pass(bench, together, lambda name, images: advance(name, images, totals[name]))
    found: dict[str, Scored] = {}
    for name in dict.fromkeys(job.name for job in jobs):
        parts = [job for job in jobs if job.name == name]
        merged = {model: {k: v for job in parts for k, v in job.scores[model].arrays.items()} for model in bench.models}
        if derive := suites[name].derive:
            merged = {model: arrays | derive(arrays) for model, arrays in merged.items()}
        found[name] = Scored(parts[0].source.dataset, merged)
    return found, missing


def _jobs(bench: Bench, suites: Mapping[str, Suite], folder: Path | None) -> tuple[list[Job], list[NotMeasured]]:
    own = [Source("", bench.data.val, bench.data.name)]
    models = {name: model_key(model) for name, model in bench.models.items()} if folder else {}
    keys = SourceKeys()
    jobs, missing = [], []
    for name, suite in suites.items():
        if suite.score is None:
            continue
        try:
            sources = own if suite.sources is None else suite.sources(bench)
        except NotMeasured as error:
            missing.append(error)
            continue
        for source in sources:
            n = len(source.images)
            scores = {model: Scores(n) for model in bench.models}
            if folder is not None:
                key = keys(source)
                for model, own_key in models.items():
                    whole = scores_key(name, suite.uses, bench.options, own_key, key)
                    scores[model] = Scores(n, score_file(folder, name, source.part, model, whole), whole)
            jobs.append(Job(name, suite, source, scores))
    return jobs, missing


def _pass(bench: Bench, jobs: Sequence[Job], advance: Callable[[str, int], None]) -> None:
    """Go over the images of one source once, for all suites and models that are not done with them."""
    for job in jobs:
        advance(job.name, job.done)
    todo = [job for job in jobs if job.done < len(job.source.images)]
    if not todo:
        return
    begun, saved = {id(job): job.done for job in jobs}, time.monotonic()
    try:
        for batch in bench.batches(todo[0].source, min(job.done for job in todo) // bench.batch_size):
            end = batch.first + len(batch)
            for job in todo:
                waiting = {model for model, scores in job.scores.items() if scores.done < end}
                if not waiting:
                    continue
                some = replace(bench, models={name: bench.models[name] for name in bench.models if name in waiting})
                batch.source = job.source
                assert job.suite.score is not None
                scored = set()
                for score in job.suite.score(some, batch):
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
