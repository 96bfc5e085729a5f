"""Suites `fourier`, `heads`, `cka` and `agreement`: analyses on the bench's models and images."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from recast.analysis.agreement import tabulate_agreement
from recast.analysis.cka import tabulate_cka
from recast.analysis.fourier import tabulate_fourier
from recast.analysis.head_statistics import tabulate_heads
from recast.data.seeding import choose_balanced
from recast.data.shards import ImageStream
from recast.evaluation.bench import Bench, NotMeasured, Source
from recast.run.records import Table
from recast.surgery.apply import recast_layers

IMAGES, HEAD_IMAGES = 500, 200
"""Validation images that an analysis looks at, unless num_samples says otherwise: curves change little with more, and
the maps of all heads take their time."""
EPOCHS = "epochs"
"""Key of `Bench.store`: kept weights, (model name, epoch, function that gives the model of that epoch) each."""


def analyse_fourier(bench: Bench) -> Table:
    """Δ log amplitude by block and frequency."""
    return tabulate_fourier(bench.models, lambda: _some(bench))


def analyse_heads(bench: Bench) -> Table:
    """Gate, span, distance, non-locality and entropy of every head; of kept weights too."""
    if not any(recast_layers(model) for model in bench.models.values()):
        raise NotMeasured("heads looks at recast layers, and no model here has one")
    return tabulate_heads(bench.models, lambda: _some(bench, HEAD_IMAGES), epochs=bench.store.get(EPOCHS, ()))


def analyse_cka(bench: Bench) -> Table:
    """Similarity of the layers of the first model to its own and to every other's."""
    return tabulate_cka(bench.models, lambda: _some(bench))


def analyse_agreement(bench: Bench) -> Table:
    """Every model's prediction for every validation image."""
    names = [bench.data.val.image_name(index) for index in range(len(bench.data.val))]
    batches = lambda: ((batch.images, batch.labels) for batch in bench.batches())  # noqa: E731
    return tabulate_agreement(bench.models, batches, bench.data.classes, names=names)


def _some(bench: Bench, most: int = IMAGES) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of the images that are looked at; of shards, which cannot be chosen from, the first ones."""
    images = bench.data.val
    is_stream = isinstance(images, ImageStream)
    if bench.options.num_samples is None and len(images) > most and not is_stream:
        images = images.subset(choose_balanced(images.labels, most, "num_samples"))
    for batch in bench.batches(Source("", images, bench.data.name)):
        if is_stream and batch.first >= most:
            return
        yield batch.images, batch.labels
