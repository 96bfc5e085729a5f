"""Suites `fourier`, `heads`, `cka` and `agreement`, which fill tables: `recast.analysis` on the images of a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from recast.analysis.agreement import tabulate_agreement
from recast.analysis.head_statistics import tabulate_heads
from recast.data.seeding import choose_balanced
from recast.data.shards import ImageStream
from recast.evaluation.context import Context, NotMeasured, Source
from recast.run.records import Table
from recast.surgery.apply import recast_layers

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
