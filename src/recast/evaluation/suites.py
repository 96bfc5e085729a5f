"""The suites by name, and `evaluate`, which runs them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from recast.data import Data
from recast.data.seeding import choose_balanced
from recast.device import choose_device
from recast.errors import RecastError, suggest
from recast.evaluation.adversarial import score_fgsm, score_pgd
from recast.evaluation.analysis import analyse_agreement, analyse_cka, analyse_fourier, analyse_heads
from recast.evaluation.autoattack import score_autoattack, sources_autoattack
from recast.evaluation.bench import Bench, NotMeasured, Options, PixelModel, Suite, ready
from recast.evaluation.clean import expected_calibration_error, score_clean
from recast.evaluation.corruption import mean_over_corruptions, score_basic
from recast.evaluation.corruptions import means_over_corruptions, score_part, sources_corruptions
from recast.evaluation.cost import measure_cost
from recast.evaluation.frequency import score_frequency
from recast.evaluation.imagenet_c import means_with_mce, sources_imagenet_c
from recast.evaluation.imagenet_real import score_real, sources_real
from recast.evaluation.imagenet_sets import SETS, score_top, set_sources
from recast.evaluation.knn import score_knn, sources_knn
from recast.evaluation.measuring import Scored, score_suites
from recast.evaluation.resolution import parse_size, score_resolution, sources_resolution
from recast.evaluation.scores import Resampled, plain_mean
from recast.run.records import Difference, Row, Table

SUITES: dict[str, Suite] = {
    "clean": Suite(score_clean, statistics={"loss": plain_mean, "ece": expected_calibration_error}),
    "fgsm": Suite(score_fgsm, uses=("eps",)),
    "pgd": Suite(score_pgd, uses=("eps", "steps", "step_size", "restarts", "random_start", "seed")),
    "autoattack": Suite(score_autoattack, sources=sources_autoattack, uses=("eps", "seed")),
    "basic": Suite(score_basic, derive=mean_over_corruptions),
    "corruptions": Suite(score_part, sources=sources_corruptions, derive=means_over_corruptions, uses=("seed",)),
    "imagenet-c": Suite(score_part, sources=sources_imagenet_c, derive=means_with_mce),
    **{name: Suite(score_top, sources=set_sources(name)) for name in SETS},
    "imagenet-real": Suite(score_real, sources=sources_real),
    "resolution": Suite(score_resolution, sources=sources_resolution),
    "knn": Suite(score_knn, sources=sources_knn, uses=("neighbours",)),
    "frequency": Suite(score_frequency),
    "cost": Suite(measure=measure_cost),
    "fourier": Suite(tabulate=analyse_fourier),
    "heads": Suite(tabulate=analyse_heads),
    "cka": Suite(tabulate=analyse_cka),
    "agreement": Suite(tabulate=analyse_agreement),
}

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
    results = measure(
        models if isinstance(models, Mapping) else {"model": models},
        [suites] if isinstance(suites, str) else suites,
        data,
        run=run,
        batch_size=batch_size,
        device=device,
        options=options,
        workers=workers,
        cache=cache,
        progress=progress,
    )
    if results.not_measured:
        raise results.not_measured[0]
    return results.rows


def measure(
    models: Mapping[str, nn.Module],
    suites: Sequence[str],
    data: Data,
    *,
    run: str = "",
    batch_size: int = 256,
    device: str | torch.device = "cpu",
    options: Options = Options(),
    workers: int = 0,
    cache: Path | None = None,
    store: dict[Any, Any] | None = None,
    progress: bool = True,
) -> Results:
    """`evaluate` with tables and paired differences; what could not be measured is named in the results.

    store: what suites are given beforehand, see `Bench.store`.
    """
    chosen = check(suites, options)
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
    bench = Bench(wrapped, data, batch_size, choose_device(device), _once(options), workers, store or {})
    results = Results()
    with _progress(progress) as bar, ready(wrapped.values(), bench.device):
        tasks = {name: bar.add_task(name, total=None) for name in chosen}
        scored, results.not_measured = score_suites(
            bench, chosen, cache, lambda name, images, total: bar.update(tasks[name], advance=images, total=total)
        )
        for name, suite in chosen.items():
            if suite.tabulate is not None:
                try:
                    results.tables[name] = suite.tabulate(bench)
                except NotMeasured as error:
                    results.not_measured.append(error)
                bar.update(tasks[name], advance=1, total=1)
            elif suite.measure is not None:
                numbers = [
                    Row(run, m.model, name, data.name, m.metric, float(m.value), m.n) for m in suite.measure(bench)
                ]
                results.rows += numbers
            elif name in scored:
                rows, differences = summarise(run, name, suite, scored[name], options.seed)
                results.rows += rows
                results.differences += differences
    return results


def check(suites: Sequence[str], options: Options) -> dict[str, Suite]:
    """The suites that are asked for; raises RecastError for one that is not there, or for a bad option."""
    for name in suites:
        if name not in SUITES:
            raise RecastError(f"unknown suite {name!r}: expected {', '.join(SUITES)}.{suggest(name, SUITES)}")
    if not suites:
        raise RecastError(f"nothing to evaluate: expected suites ({', '.join(SUITES)}), got none")
    if not options.eps or not all(math.isfinite(budget) and budget >= 0 for budget in options.eps):
        raise RecastError(f"eps must be numbers of 0 or more (in 1/255), got {options.eps}")
    if options.seed < 0:
        raise RecastError(f"seed must be 0 or more, got {options.seed}")
    for name in ("steps", "restarts"):
        if getattr(options, name) < 1:
            raise RecastError(f"{name} must be at least 1, got {getattr(options, name)}")
    if options.step_size is not None and not (math.isfinite(options.step_size) and options.step_size > 0):
        raise RecastError(f"step_size must be a number above 0 (in 1/255), got {options.step_size}")
    if not options.neighbours or any(k < 1 for k in options.neighbours):
        raise RecastError(f"neighbours must be numbers of 1 or more, got {options.neighbours}")
    for size in options.sizes:
        parse_size(size)
    return {name: SUITES[name] for name in suites}


def groups(suites: Sequence[str]) -> list[list[str]]:
    """The suites in groups that are measured in one go: those that score the validation images share one pass."""
    shared = [name for name in dict.fromkeys(suites) if SUITES[name].score and SUITES[name].sources is None]
    alone = [[name] for name in dict.fromkeys(suites) if name not in shared]
    return [shared, *alone] if shared else alone


def _once(options: Options) -> Options:
    return replace(options, eps=tuple(dict.fromkeys(options.eps)), neighbours=tuple(dict.fromkeys(options.neighbours)))


def summarise(run: str, name: str, suite: Suite, scored: Scored, seed: int) -> tuple[list[Row], list[Difference]]:
    """Rows with 95 % intervals, and paired differences between arms."""
    rows: dict[tuple[str, str], Row] = {}
    differences: list[Difference] = []
    sizes: dict[str, int] = {}
    for arrays in scored.scores.values():
        sizes |= {metric: len(values) for metric, values in arrays.items()}
    for n in dict.fromkeys(sizes.values()):  # metrics of other images are resampled apart
        same = {
            (model, metric): values
            for model, arrays in scored.scores.items()
            for metric, values in arrays.items()
            if sizes[metric] == n
        }
        resampled = Resampled(same, suite.statistics, seed)
        for model, metric in same:
            low, high = resampled.interval(model, metric)
            value = resampled.values[model, metric]
            rows[model, metric] = Row(run, model, name, scored.dataset, metric, value, n, low, high)
        for model, against in COMPARED:
            for metric in (metric for metric, size in sizes.items() if size == n):
                if (model, metric) in same and (against, metric) in same:
                    value, low, high = resampled.difference(model, against, metric)
                    differences.append(
                        Difference(run, model, against, name, scored.dataset, metric, value, low, high, n)
                    )
    ordered = [rows[model, metric] for model, arrays in scored.scores.items() for metric in arrays]
    return ordered, differences


def _progress(shown: bool) -> Progress:
    columns = TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown)
