"""Learning an embedding of images, with their classes or without them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recast.lab.task import Loss, Setting, register_task
from recast.lab.tasks.classify import Classify
from recast.papers.grafit.config import Dino, EmbedConfig, Neighbors
from recast.papers.grafit.head import add_embedding_, without_embedding, without_probe
from recast.papers.grafit.loss import EmbeddingLoss
from recast.papers.grafit.views import ManyViews

if TYPE_CHECKING:
    from recast.lab.data import Data


class Embed(Classify):
    """An embedding, with a classifier beside it: validation, suites and reports are those of classification."""

    name = "embed"
    title = "an embedding"
    keeps_network = False

    def notes(self, config: Any, data: Data) -> Iterator[str]:
        projector = config.projector
        if isinstance(projector, Dino):
            return
        yield from super().notes(config, data)
        sizes = data.train.labels.bincount()
        if isinstance(projector, Neighbors) and projector.knn_weight and (alone := int((sizes == 1).sum())):
            reason = f"{alone} of {int(sizes.sum())} training images are alone in their class"
            yield f"{reason}: the loss of neighbours skips them"

    def adapt_(self, model: nn.Module, config: EmbedConfig, classes: int) -> nn.Module:
        return add_embedding_(model, config.head, classes)

    def undone(self, model: nn.Module) -> nn.Module:
        return without_embedding(model)

    def loading(self, config: Any, data: Data) -> dict[str, Any]:
        """Return the loader's arguments; labels are the numbers of the images, by which the memory is stored."""
        images, local = data.train.relabelled(torch.arange(len(data.train))), None
        projector = config.head
        if isinstance(projector, Dino) and images.augment is not None:
            local = images.augmented(replace(images.augment, crop="random", scale=projector.local_scale))
        return {"dataset": images if projector.views == 1 else ManyViews(images, projector.views, local)}

    def stateful_loss(
        self, config: EmbedConfig, data: Data, student: nn.Module, loss: Loss, setting: Setting
    ) -> EmbeddingLoss:
        return EmbeddingLoss(config.head, data, student, loss, setting)

    def clipped(self, model: nn.Module) -> list[nn.Parameter]:
        return without_probe(model)


register_task(Embed())
