"""Learning an embedding of images, with their classes or without them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recast.errors import RecastError
from recast.lab.data.shards import ImageStream
from recast.lab.tasks import Loss, register_task, task_of_data
from recast.lab.tasks.classify import Classify
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

    def clashes(self, recipe: Recipe) -> Iterator[tuple[bool, str]]:
        yield from task_of_data(recipe.data).clashes(recipe)
        config, augment = recipe.embedding, recipe.augment
        for used, value in (
            ("augment.mixup", augment.mixup > 0),
            ("augment.cutmix", augment.cutmix > 0),
            ("augment.repeats", augment.repeats > 1),
            ("distill.name", recipe.distill.name is not None),
            ("distill.feature_epochs", recipe.distill.feature_epochs > 0),
            ("schedule", recipe.schedule.name != "before"),
            ("regularization.freeze", recipe.regularization.freeze != "none"),
            ("pool.kind per_class", recipe.pool.kind == "per_class"),
        ):
            yield (
                value,
                f"{used} has no meaning for an embedding (embedding.projector={config.projector}): leave it out",
            )
        is_dino, (smallest, largest) = config.projector == "dino", config.local_scale
        yield (
            is_dino and (config.knn_weight or config.instance_weight or config.views < 2 or smallest > largest) > 0,
            "embedding.projector=dino has one loss, over two views or more: set embedding.knn_weight and "
            "embedding.instance_weight to 0, views to 2 or more, and local_scale to (smallest, largest)",
        )
        yield (
            not (is_dino or config.knn_weight or config.instance_weight),
            "an embedding learns from embedding.knn_weight or embedding.instance_weight, both are 0: raise one, or "
            "take embedding.projector=none",
        )
        yield (
            config.instance_weight > 0 and config.views < 2,
            "embedding.instance_weight compares views of an image: set embedding.views to 2 or more, or the weight "
            "to 0",
        )

    def check_data(self, recipe: Recipe, data: Data) -> None:
        if isinstance(data.train, ImageStream):
            raise RecastError(
                "an embedding is remembered by an image's number, and shards are a stream: use image files"
            )

    def notes(self, recipe: Recipe, data: Data) -> Iterator[str]:
        if recipe.embedding.projector != "dino":
            yield from super().notes(recipe, data)
        sizes = data.train.labels.bincount()
        if recipe.embedding.knn_weight and (alone := int((sizes == 1).sum())):
            reason = f"{alone} of {int(sizes.sum())} training images are alone in their class"
            yield f"{reason}: the loss of neighbours skips them"

    def adapt_(self, model: nn.Module, recipe: Recipe, classes: int) -> nn.Module:
        return add_embedding_(model, recipe.embedding, classes)

    def undone(self, model: nn.Module) -> nn.Module:
        return without_embedding(model)

    def loading(self, recipe: Recipe, data: Data) -> dict[str, Any]:
        """The memory is kept by an image's number, which leads to its label."""
        images, local = data.train.relabelled(torch.arange(len(data.train))), None
        if recipe.embedding.projector == "dino" and images.augment is not None:
            local = images.augmented(replace(images.augment, crop="random", scale=recipe.embedding.local_scale))
        return {"dataset": images, "views": recipe.embedding.views, "local": local}

    def stateful_loss(
        self, recipe: Recipe, data: Data, student: nn.Module, loss: Loss, steps: int, device: torch.device,
        amp: torch.dtype | None,
    ) -> EmbeddingLoss:  # fmt: skip
        return EmbeddingLoss(recipe, data, student, loss, steps, device, amp)

    def clipped(self, model: nn.Module) -> list[nn.Parameter]:
        return without_probe(model)


register_task(Embed())
