"""Suites `fourier`, `cka` and `agreement`: tables of all models on the same validation images."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from recast.lab.analysis.cka import tabulate_cka
from recast.lab.analysis.fourier import tabulate_fourier
from recast.lab.evaluation.context import Context, Source, sampled
from recast.lab.evaluation.evaluators import evaluates
from recast.lab.folder.tables import Table

IMAGES = 500
"""Default number of validation images of an analysis: curves change little with more."""


def analyse(tabulate: Callable[..., Table], context: Context) -> Table:
    """Return the table of all models on `IMAGES` images, or on options.num_images."""
    images = context.data.val
    if context.options.num_images is None:
        images = sampled(images, IMAGES)
    return tabulate(context.models, (batch.images for batch in context.batches(Source(images))))


evaluates("fourier", "tabulate")(partial(analyse, tabulate_fourier))
evaluates("cka", "tabulate")(partial(analyse, tabulate_cka))


@evaluates("agreement", "tabulate")
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
