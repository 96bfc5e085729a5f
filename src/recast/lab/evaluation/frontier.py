"""Suite `frontier`: accuracy and robustness against time, as the heads of a trained network are closed one by one."""

from __future__ import annotations

import copy
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from recast.errors import RecastError
from recast.lab.data.sources import labelled_images
from recast.lab.evaluation.basic_corruptions import corrupt
from recast.lab.evaluation.context import Context, NotMeasured, PixelModel, Source, is_correct, sampled
from recast.lab.records import FrontierLine
from recast.layers.gpsa import gpsa_layers
from recast.surgery.folding.closing import close_, closing_, heads_left, parts_of
from recast.surgery.folding.model import fold_
from recast.surgery.scales import recalibrate_batch_norm_
from recast.tables import Table, read_records
from recast.tracing.timing import time_models

if TYPE_CHECKING:
    from recast.lab.evaluation.run_folder import OpenRun

CHOSEN_ON = 512
"""Training images: heads are chosen by half of them, BatchNorm's statistics are of all."""
IMAGES = 1000
"""Validation images that a point is measured on, unless num_images says otherwise."""
BATCH = 32
SECONDS = 1.0
"""That the timing of a point may take."""
SEVERITY = 3
"""Of the Gaussian noise, as the suite `basic` has it."""


def tabulate_frontier(context: Context) -> Table:
    """A line for every network as it is, and for each head less of the recast one.

    A point is measured as it would be used: folded, on the same images, and timed by turns with the network with all
    its heads, so that a machine that slows down slows both. BatchNorm's statistics are measured anew on the same
    training images in every network, those that lose no head among them: that alone moves accuracies by points.
    """
    named = [name for name, model in context.models.items() if gpsa_layers(model)]
    if not named:
        raise NotMeasured("frontier closes heads of GPSA layers, and no model here has one")
    name = named[-1]
    count = min(CHOSEN_ON, context.options.num_images or CHOSEN_ON)
    # an unreadable image stops no curve of a run that was trained without it; `close_to` takes the same ones
    images, labels = labelled_images(context.data, count, 0, "skip", context.device)
    models = {of: copy.deepcopy(model) for of, model in context.models.items()}
    for model in models.values():
        recalibrate_batch_norm_(model.model, parts_of(images))
    rest, first = models[name], fold_exactly(models[name])
    total = len(heads_left(first.model))
    source, reference = Source(sampled(context.data.val, context.options.num_images or IMAGES)), list[float]()
    few = next(context.batches(source)).images[:BATCH]

    def line(of: str, model: nn.Module, heads: int, layer: str, head: int | None, loss: float | None) -> FrontierLine:
        times = time_models({"first": first, "now": model}, few, SECONDS)
        reference.append(min(times["first"]))
        top1, noise, n = _accuracies(context, source, model)
        slower = min(times["now"]) / min(times["first"])  # what else runs on the machine only ever adds
        return FrontierLine(of, heads, layer, head, loss, top1, noise, slower, len(images), n)

    others = [other for other in models if other != name]
    lines = [line(other, models[other], 0, "", None, None) for other in others]
    lines.append(line(name, first, total, "", None, None))
    for closed in closing_(rest.model, images, labels):
        folded = fold_exactly(rest)
        lines.append(line(name, folded, len(heads_left(folded.model)), *closed))
        context.told(len(lines) / (len(others) + 1 + total))
    per_image = 1000 * statistics.median(reference) / len(few)
    return Table.of("frontier", FrontierLine, (replace(one, ms=one.ms * per_image) for one in lines))


def fold_exactly(model: PixelModel) -> PixelModel:
    """A copy in which every layer has its smallest form."""
    folded = copy.deepcopy(model)
    fold_(folded.model)
    return folded


def close_to(run: OpenRun, heads: int) -> None:
    """Close heads of a run's recast network, in place, as RUN/analysis/frontier.csv has it with `heads` heads open.

    Raises RecastError where the table is missing, of another network, or has no such point.
    """
    path = run.folder / "analysis" / "frontier.csv"
    if not path.is_file():
        raise RecastError(f"{path} is not there: measure the curve first, recast fold {run.folder} --frontier")
    lines = [line for line in read_records(path, FrontierLine) if line.model == "recast"]
    if not lines:
        raise RecastError(f"{path} has no point of a recast network: recast fold {run.folder} --frontier writes one")
    counts = [line.heads for line in lines]
    if heads not in counts:
        raise RecastError(f"the curve goes from {counts[0]} open heads to {counts[-1]}, got heads={heads}")
    model = run.models["recast"].eval()
    wanted = [(line.layer, line.head) for line in lines[1 : counts.index(heads) + 1] if line.head is not None]
    images, _ = labelled_images(run.data, lines[0].chosen_on, 0, "skip", next(model.parameters()).device)
    for layer in gpsa_layers(model).values():
        layer.close_maps_(0.0)
    close_(model, wanted, images)


@torch.no_grad()
def _accuracies(context: Context, source: Source, model: nn.Module) -> tuple[float, float, int]:
    """Top-1 in percent, clean and under noise, and the number of images."""
    right = torch.zeros(2, dtype=torch.double)
    for batch in context.batches(source):
        noisy = corrupt(batch.images, "gaussian_noise", SEVERITY, batch.first)
        for i, pixels in enumerate((batch.images, noisy)):
            right[i] += is_correct(model(pixels), batch.labels).sum().item()
    clean, under_noise = (100 * right / len(source.images)).tolist()
    return clean, under_noise, len(source.images)
