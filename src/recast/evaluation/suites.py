"""The suites by name, and `evaluate`, which runs them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from recast.data import Data
from recast.device import choose_device
from recast.errors import RecastError, suggest
from recast.evaluation.adversarial import measure_fgsm, measure_pgd
from recast.evaluation.bench import Bench, Measurement, PixelModel, ready
from recast.evaluation.clean import measure_clean
from recast.evaluation.corruption import CORRUPTIONS, SEVERITIES, measure_basic
from recast.evaluation.cost import measure_cost
from recast.rows import Row


@dataclass(frozen=True)
class Suite:
    """A way to measure models."""

    measure: Callable[[Bench], Iterator[Measurement]]
    passes: Callable[[Bench], int] = lambda bench: 1
    """How often each model goes over the images, for the progress bar."""


SUITES: dict[str, Suite] = {
    "clean": Suite(measure_clean),
    "fgsm": Suite(measure_fgsm, lambda bench: len(bench.eps)),
    "pgd": Suite(measure_pgd, lambda bench: len(bench.eps)),
    "basic": Suite(measure_basic, lambda bench: len(CORRUPTIONS) * len(SEVERITIES)),
    "cost": Suite(measure_cost),
}


def evaluate(
    models: Mapping[str, nn.Module],
    suites: Sequence[str],
    data: Data,
    *,
    run: str = "",
    batch_size: int = 256,
    device: str | torch.device = "cpu",
    eps: Sequence[float] = (1.0, 4.0),
    progress: bool = True,
) -> list[Row]:
    """Measure every model with every suite on the validation images of `data`; all models see the same pixels.

    models: name -> a model that takes normalised images (B, 3, H, W) and gives logits (B, classes). Their training
    flags and devices are restored. eps: budgets of the attacks in 1/255.
    Raises RecastError before anything is measured for an unknown suite, no images, a bad ε or an absent device.
    """
    for name in suites:
        if name not in SUITES:
            raise RecastError(f"unknown suite {name!r}: expected {', '.join(SUITES)}.{suggest(name, SUITES)}")
    if not suites or not models:
        raise RecastError(f"nothing to evaluate: expected models and suites, got {list(models)} and {list(suites)}")
    if not all(math.isfinite(budget) and budget >= 0 for budget in eps):
        raise RecastError(f"eps must be numbers of 0 or more (in 1/255), got {tuple(eps)}")
    if len(data.val) == 0:
        raise RecastError(f"{data.name} has no validation images to evaluate on")
    chosen = choose_device(device)
    wrapped = {name: PixelModel(model, data.mean, data.std) for name, model in models.items()}
    bench = Bench(wrapped, data, batch_size, chosen, tuple(dict.fromkeys(eps)))
    rows = []
    with _progress(progress) as bar, ready(wrapped.values(), chosen):
        for name in dict.fromkeys(suites):
            suite = SUITES[name]
            task = bar.add_task(name, total=suite.passes(bench) * len(models) * len(data.val))
            measurements = suite.measure(replace(bench, advance=partial(bar.advance, task)))
            rows += [Row(run, m.model, name, data.name, m.metric, float(m.value), m.n) for m in measurements]
    return rows


def _progress(shown: bool) -> Progress:
    columns = TextColumn("{task.description:>6}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown)
