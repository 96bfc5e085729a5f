"""Training the head alone: everything below it keeps its weights and statistics, and drops nothing."""

from __future__ import annotations

from torch import nn

from recast.models.adapt import classifiers
from recast.surgery.pooling.swap import attention_pools


def heads(model: nn.Module, num_classes: int | None = None) -> list[nn.Module]:
    """What trains where the trunk is frozen: attention pooling, where there is any, and the classifiers.

    Raises RecastError where one cannot tell which layer is the classifier (`recast.models.adapt.classifiers`).
    """
    return [*attention_pools(model).values(), *map(model.get_submodule, classifiers(model, num_classes))]


def freeze_trunk_(model: nn.Module, num_classes: int | None = None) -> nn.Module:
    """Ask no gradient for anything but `heads`, so that no optimiser is given it; returns the model."""
    trained = {id(p) for head in heads(model, num_classes) for p in head.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in trained:
            parameter.requires_grad_(False)
    return model


def rest_trunk(model: nn.Module, num_classes: int | None = None) -> None:
    """Eval mode for everything but `heads`: BatchNorm uses its stored statistics and does not update them, dropout and
    stochastic depth let everything through. `model.train()` undoes it: call it after each."""
    model.eval()
    for head in heads(model, num_classes):
        head.train()
