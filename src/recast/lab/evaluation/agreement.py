"""Which images two networks see alike, and which one wins or loses against the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from recast.analysis.blocks import Batches, device_of
from recast.errors import RecastError
from recast.lab.statistics import Agreement
from recast.models.build import check_logits
from recast.tables import Table
from recast.tracing.hooks import in_eval


@torch.no_grad()
def predict(models: Mapping[str, nn.Module], batches: Batches) -> dict[str, list[int]]:
    """Of every image its "label" and, by the name of each model, the class with the largest logit, in one pass.

    models: take images, give logits (B, classes). Raises `RecastError` for other outputs, NaN, and no images.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in ("label", *models)}
    with in_eval(*models.values()):
        for images, labels in batches():
            found["label"].append(labels.cpu())
            for name, model in models.items():
                logits = model(images.to(device_of(model)))
                check_logits(logits, len(images), of=f"model {name!r}")
                if bool(logits.isnan().any()):
                    raise RecastError(f"model {name!r} gives NaN: its predictions mean nothing")
                found[name].append(logits.argmax(1).cpu())
    if not found["label"]:
        raise RecastError("there are no images to predict")
    return {name: torch.cat(parts).tolist() for name, parts in found.items()}


def agreement(predictions: Mapping[str, list[int]], model: str, against: str) -> Agreement:
    """Compare `model` with `against`, as `predict` gives them. Raises `RecastError` for a model without predictions."""
    for name in (model, against):
        if name not in predictions:
            raise RecastError(f"there are predictions of {', '.join(predictions)}, none of {name!r}")
    return Agreement.of(predictions["label"], predictions[model], predictions[against])


def tabulate_agreement(
    models: Mapping[str, nn.Module], batches: Batches, classes: Sequence[str], names: Sequence[str]
) -> Table:
    """Every image's label and predictions as RUN/analysis/agreement.csv: index, image, label and a column a model.

    classes: names in the order of the logits; names: of the images, in the order of the batches.
    Raises `RecastError` as `predict` does, and for labels, logits or names that do not fit.
    """
    found = predict(models, batches)
    count = len(found["label"])
    if len(names) != count:
        raise RecastError(f"a name for each of {count} images is needed, got {len(names)}")
    largest = max(max(values) for values in found.values())
    if largest >= len(classes):
        raise RecastError(f"class {largest} has no name: {len(classes)} were given")
    said = [[classes[one] for one in values] for values in found.values()]
    return Table("agreement", ("index", "image", *found), tuple(zip(range(count), names, *said, strict=True)))
