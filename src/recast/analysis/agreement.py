"""Which images two networks see alike, and which one wins or loses against the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recast.analysis.blocks import Batches, device_of
from recast.errors import RecastError
from recast.run.records import Table
from recast.run.statistics import Agreement
from recast.tracing.hooks import in_eval


@dataclass(frozen=True)
class Predictions:
    """What models say of the same images, in their order."""

    labels: tuple[int, ...]
    predicted: dict[str, tuple[int, ...]]
    """Model: its class of every image."""


@torch.no_grad()
def predict(models: Mapping[str, nn.Module], batches: Batches) -> Predictions:
    """The class with the largest logit, of every image and model, in one pass over the images.

    models: take images, give logits (B, classes). Raises `RecastError` for other outputs, NaN, and no images.
    """
    if not models:
        raise RecastError("there are no models to predict with")
    labels: list[Tensor] = []
    predicted: dict[str, list[Tensor]] = {name: [] for name in models}
    with in_eval(*models.values()):
        for images, known in batches():
            labels.append(known.cpu())
            for name, model in models.items():
                logits = model(images.to(device_of(model)))
                if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(images):
                    got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
                    raise RecastError(f"model {name!r} must give logits ({len(images)}, classes), got {got}")
                if bool(logits.isnan().any()):
                    raise RecastError(f"model {name!r} gives NaN: its predictions mean nothing")
                predicted[name].append(logits.argmax(1).cpu())
    if not labels:
        raise RecastError("there are no images to predict")
    return Predictions(
        tuple(torch.cat(labels).tolist()), {name: tuple(torch.cat(parts).tolist()) for name, parts in predicted.items()}
    )


def agreement(predictions: Predictions, model: str, against: str) -> Agreement:
    """Compare `model` with `against`. Raises `RecastError` for a model without predictions."""
    for name in (model, against):
        if name not in predictions.predicted:
            raise RecastError(f"there are predictions of {', '.join(predictions.predicted)}, none of {name!r}")
    return Agreement.of(predictions.labels, predictions.predicted[model], predictions.predicted[against])


def tabulate_agreement(
    models: Mapping[str, nn.Module], batches: Batches, classes: Sequence[str], names: Sequence[str] | None = None
) -> Table:
    """Every image's label and predictions as RUN/analysis/agreement.csv: index, image, label and a column a model.

    classes: names in the order of the logits; names: of the images, in the order of the batches (None: empty cells).
    Raises `RecastError` as `predict` does, and for labels, logits or names that do not fit.
    """
    found = predict(models, batches)
    if names is not None and len(names) != len(found.labels):
        raise RecastError(f"a name for each of {len(found.labels)} images is needed, got {len(names)}")
    largest = max(max(found.labels), *(max(values) for values in found.predicted.values()))
    if largest >= len(classes):
        raise RecastError(f"class {largest} has no name: {len(classes)} were given")
    images = [None] * len(found.labels) if names is None else names
    said = [[classes[one] for one in column] for column in (found.labels, *found.predicted.values())]
    rows = tuple(zip(range(len(images)), images, *said, strict=True))
    return Table("agreement", ("index", "image", "label", *found.predicted), rows)
