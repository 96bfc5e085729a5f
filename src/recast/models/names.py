"""The names of models: what a name means, and the message for an unknown one. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import PurePath

from recast.errors import RecastError, shown, suggest

FORMS = "timm:NAME (or NAME), torchvision:NAME, upernet|maskrcnn|fasterrcnn|retinanet:NAME, or pkg.module:function"
DETECTORS = ("maskrcnn", "fasterrcnn", "retinanet")
"""`maskrcnn:NAME` is torchvision's Mask R-CNN on the network NAME of timm."""
ON_TIMM = ("upernet", *DETECTORS)
REGISTRIES = ("timm", "torchvision", *ON_TIMM)
"""Whose names are known."""
PLUGINS = ["recast.models.cifar"]
"""Modules that register networks with timm, or tasks, when they are imported: in this order, until one is there.
`recast.lab` and `recast.papers` add theirs; `sources.plug_in` also finds those of packages that were not imported."""


def split_name(name: str) -> tuple[str, str]:
    """Split `timm:resnet18` into ("timm", "resnet18"); `pkg.module:function` gives ("function", the same name)."""
    prefix, colon, rest = name.partition(":")
    if prefix.endswith(".py"):
        function = f"{PurePath(prefix).stem}:{rest or 'FUNCTION'}"
        raise RecastError(
            f"{name} names a file: name its module, {function}, from its folder or with that on PYTHONPATH"
        )
    if not colon and PurePath(name).suffix and os.path.isfile(name):
        raise RecastError(f"{name} is a file: name the model, and load its weights with checkpoint={name}")
    if not colon:
        return "timm", name
    if prefix in REGISTRIES:
        return prefix, rest
    if all(part.isidentifier() for part in prefix.split(".")) and rest.isidentifier():
        return "function", name
    raise RecastError(f"a model is named {FORMS}, got {shown(name)}")


def unknown_model(source: str, name: str, names: Iterable[str], torchvision: Iterable[str] = ()) -> RecastError:
    """Return the error for a name unknown to `source`, with the nearest names, or a hint at torchvision."""
    close = f" Did you mean torchvision:{name}?" if name in torchvision else suggest(name[:100], names)
    return RecastError(f"{source} has no model {shown(name)}.{close} A model is named {FORMS}")


def unknown_subject(name: str, error: RecastError) -> RecastError:
    """Return the error of `explain` for a word that is neither a path nor, by `error`, a model."""
    if ":" in name:
        return error
    return RecastError(f"{name} is not a run folder (there is no such folder), and no model: {error}")
