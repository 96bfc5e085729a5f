"""Suite `frontier`: accuracy and robustness over time while the heads of a trained network are closed one by one."""

from __future__ import annotations

import copy
import statistics
from dataclasses import replace

import torch
from torch import Tensor, nn

from recast.lab.data import Data, Loader
from recast.lab.evaluation.basic_corruptions import corrupt
from recast.lab.evaluation.closing import batches_of, closing_, heads_left
from recast.lab.evaluation.context import Context, NotMeasured, PixelModel, Source, is_correct, sampled
from recast.lab.evaluation.evaluators import evaluates
from recast.lab.folder.records import FrontierLine
from recast.lab.folder.tables import Table
from recast.layers.cmhsa import gated_layers
from recast.surgery.folding.model import fold_
from recast.surgery.scales import recalibrate_batch_norm_
from recast.tracing.timing import time_models

CHOSEN_ON = 512
"""Number of training images: half of them choose heads, all give BatchNorm's statistics."""
IMAGES = 1000
"""Default number of validation images of a point."""
BATCH = 32
SECONDS = 1.0
"""Duration of the timing of a point."""
SEVERITY = 3
"""Severity of the Gaussian noise of suite `basic`."""


@evaluates("frontier", "tabulate")
def tabulate_frontier(context: Context) -> Table:
    """Return one row per network, and one per head closed in the recast one.

    Each point is folded as in use, measured on the same images, and timed in turns with the network with all heads, so
    that a slower machine slows both. BatchNorm's statistics are measured again on the same training images in every
    network, also without closed heads: that alone moves accuracies by points.
    """
    named = [name for name, model in context.models.items() if gated_layers(model)]
    if not named:
        raise NotMeasured("frontier requires a model with recast layers that have gates, whose heads it closes")
    name = named[-1]
    count = min(CHOSEN_ON, context.options.num_images or CHOSEN_ON)
    images, labels = training_images(context.data, count, context.device)  # `recast fold --heads` uses the same
    models = {other: copy.deepcopy(model) for other, model in context.models.items()}
    for model in models.values():
        recalibrate_batch_norm_(model.model, batches_of(images))
    recast = models.pop(name)
    first = fold_exactly(recast)
    source, reference = Source(sampled(context.data.val, context.options.num_images or IMAGES)), list[float]()
    timed = next(context.batches(source)).images[:BATCH]

    def point(
        name: str, model: PixelModel, layer: str = "", head: int | None = None, loss: float | None = None
    ) -> FrontierLine:
        times = time_models({"first": first, "now": model}, timed, SECONDS)
        reference.append(min(times["first"]))
        top1, noise, n = _accuracies(context, source, model)
        slower = min(times["now"]) / min(times["first"])  # other load on the machine only adds
        return FrontierLine(name, len(heads_left(model.model)), layer, head, loss, top1, noise, slower, len(images), n)

    lines = [point(other, model) for other, model in models.items()]
    lines.append(point(name, first))
    lines += [point(name, fold_exactly(recast), *closed) for closed in closing_(recast.model, images, labels)]
    per_image = 1000 * statistics.median(reference) / len(timed)
    return Table.of("frontier", FrontierLine, (replace(line, ms=line.ms * per_image) for line in lines))


def training_images(data: Data, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return at most `count` training images, always the same, normalised, not augmented, and their labels.

    Unreadable images are skipped, as the run may have been trained without them.
    """
    # at least 1: without images the loader reports that, not a batch size of 0
    source = Loader(data.train.plain(), max(1, min(count, len(data.train))), shuffle_seed=0, bad_image="skip")
    images, labels = next(iter(source))
    return data.normalised(images, device), labels.to(device)


def fold_exactly(model: PixelModel) -> PixelModel:
    """Return a copy in which every layer has its smallest form."""
    folded = copy.deepcopy(model)
    fold_(folded.model)
    return folded


@torch.no_grad()
def _accuracies(context: Context, source: Source, model: nn.Module) -> tuple[float, float, int]:
    """Return top-1 in percent, clean and under noise, and the number of images."""
    right = torch.zeros(2, dtype=torch.double)
    for batch in context.batches(source):
        noisy = corrupt(batch.images, "gaussian_noise", SEVERITY, batch.first)
        for i, pixels in enumerate((batch.images, noisy)):
            right[i] += is_correct(model(pixels), batch.labels).sum().item()
    clean, under_noise = (100 * right / len(source.images)).tolist()
    return clean, under_noise, len(source.images)
