"""Predictions of several networks for every image."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from recast.errors import RecastError
from recast.lab.analysis.blocks import Batches, device_of
from recast.models.build import check_logits
from recast.modes import in_eval


@torch.no_grad()
def predict(models: Mapping[str, nn.Module], batches: Batches) -> dict[str, list[int]]:
    """Return the "label" of every image and, under each model's name, its class with the largest logit.

    models: map images to logits (B, classes). Raises `RecastError` for other outputs, NaN, and no images.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
        >>> batches = lambda: [(torch.zeros(2, 3, 4, 4), torch.tensor([0, 2]))]
        >>> recast.lab.evaluation.agreement.predict({"model": model}, batches)["label"]
        [0, 2]
    """
    columns: dict[str, list[Tensor]] = {name: [] for name in ("label", *models)}
    with in_eval(*models.values()):
        for images, labels in batches():
            columns["label"].append(labels.cpu())
            for name, model in models.items():
                logits = model(images.to(device_of(model)))
                check_logits(logits, len(images), of=f"model {name!r}")
                if bool(logits.isnan().any()):
                    raise RecastError(f"model {name!r} outputs NaN: its predictions are meaningless")
                columns[name].append(logits.argmax(1).cpu())
    if not columns["label"]:
        raise RecastError("no images to predict")
    return {name: torch.cat(parts).tolist() for name, parts in columns.items()}
