"""Classes that a network states, and the outputs that it gives, compared with the classes of the data."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from recast.errors import RecastError, listed
from recast.lab.data.sources import Data
from recast.layers.attention_pool import AttentionPool
from recast.models.adapt import classifiers
from recast.models.build import Images, class_names


def name_other_classes(model: nn.Module, data: Data, of: str = "the network") -> str:
    """Return a message if the network states other classes than the data's; empty if they agree or it states none.

    of: the network or its file, in messages.
    """
    names = class_names(model)
    if not names or sorted(names) == sorted(data.classes):
        return ""
    return f"{of} has the classes {listed(names, 5)}, the data {listed(data.classes, 5)}"


def order_classes_(model: nn.Module, data: Data, of: str = "the network", remedy: str = "") -> nn.Module:
    """Put the outputs of a network into the data's order of classes, with a warning, if it states another order.

    Raises RecastError for a network whose classifier does not have one row per class, and for one that states other
    classes, with this `remedy`; without a remedy the latter is left as it is.
    """
    if remedy and (others := name_other_classes(model, data, of)):
        raise RecastError(f"{others}: {remedy}")
    names = list(class_names(model) or ())
    if names == data.classes or sorted(names) != sorted(data.classes):
        return model
    layers = [model.get_submodule(name) for name in classifiers(model, len(names))]
    has_rows = all(isinstance(layer, nn.Linear) and layer.out_features == len(names) for layer in layers)
    has_tokens = any(isinstance(module, AttentionPool) and module.num_classes for module in model.modules())
    if not has_rows or has_tokens or len(set(names)) < len(names):
        raise RecastError(
            f"{of} has the classes of {data.name} in another order ({listed(names, 5)}): order its outputs as "
            f"{listed(data.classes, 5)} and save it again"
        )
    order = [names.index(name) for name in data.classes]
    with torch.no_grad():
        for parameter in (parameter for layer in layers for parameter in layer.parameters()):
            parameter.copy_(parameter[order])
    warnings.warn(f"{of} has the classes of {data.name} in another order: its outputs are reordered", stacklevel=2)
    return Images(tuple(data.classes)).note_(model)
