"""Learning an embedding of images, with their classes or without them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recast.lab.task import Loss, register_task
from recast.lab.tasks.classify import Classify
from recast.papers.grafit.config import Dino, Neighbors, projector_of
from recast.papers.grafit.head import add_embedding_, without_embedding, without_probe
from recast.papers.grafit.loss import EmbeddingLoss

if TYPE_CHECKING:
    from recast.lab.config import Recipe
    from recast.lab.data import Data


class Embed(Classify):
    """An embedding, with a classifier beside it: validation, suites and reports are those of classification."""

    name = "embed"
    title = "an embedding"
    keeps_network = False

    def notes(self, recipe: Recipe, data: Data) -> Iterator[str]:
        projector = projector_of(recipe)
        if isinstance(projector, Dino):
            return
        yield from super().notes(recipe, data)
        sizes = data.train.labels.bincount()
        if isinstance(projector, Neighbors) and projector.knn_weight and (alone := int((sizes == 1).sum())):
            reason = f"{alone} of {int(sizes.sum())} training images are alone in their class"
            yield f"{reason}: the loss of neighbours skips them"

    def adapt_(self, model: nn.Module, recipe: Recipe, classes: int) -> nn.Module:
        return add_embedding_(model, projector_of(recipe), classes)

    def undone(self, model: nn.Module) -> nn.Module:
        return without_embedding(model)

    def loading(self, recipe: Recipe, data: Data) -> dict[str, Any]:
        """Return the loader's arguments; labels are the numbers of the images, by which the memory is stored."""
        images, local = data.train.relabelled(torch.arange(len(data.train))), None
        projector = projector_of(recipe)
        if isinstance(projector, Dino) and images.augment is not None:
            local = images.augmented(replace(images.augment, crop="random", scale=projector.local_scale))
        return {"dataset": images, "views": projector.views, "local": local}

    def stateful_loss(
        self, recipe: Recipe, data: Data, student: nn.Module, loss: Loss, steps: int, device: torch.device,
        amp: torch.dtype | None,
    ) -> EmbeddingLoss:  # fmt: skip
        return EmbeddingLoss(recipe, data, student, loss, steps, device, amp)

    def clipped(self, model: nn.Module) -> list[nn.Parameter]:
        return without_probe(model)


register_task(Embed())
