"""The network that the first word of `recast explain` means."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import timm
from torch import nn

from recast.errors import RecastError
from recast.io import load
from recast.lab.data.images import is_image_name
from recast.models.build import build
from recast.models.config import ModelConfig
from recast.models.names import FORMS, no_subject
from recast.models.trust import is_function, may_run
from recast.models.weights import PICKLED, read_header

SAVED = ".safetensors"


def weights_of(config: ModelConfig) -> tuple[str, str, list[str]]:
    """Where the weights that `open_model` gives come from; what a title adds and notes say where they may be chance."""
    name = config.name
    if config.checkpoint or name.endswith(SAVED):
        return config.checkpoint or name, "", []
    if config.pretrained:
        return "published", "", []
    if is_function(name):
        note = f"The weights are those that {name} returns: if they are random, predictions and maps are chance; "
        return f"as {name} returns them", " (weights as it returns them)", [f"{note}--checkpoint gives others."]
    note = "Random weights: predictions and maps are chance; --checkpoint or --pretrained gives trained ones."
    return "random", " (random weights: chance)", [note]


def names_a_run(word: str) -> bool:
    """Whether a word means a run folder: a folder, unless it holds no run and a model has its name too."""
    return Path(word).is_dir() and ((Path(word) / "recipe.yaml").is_file() or not timm.is_model(word))


def open_model(config: ModelConfig) -> nn.Module:
    """The network in eval mode: of a file that `recast.save` wrote, or of a name, with or without weights.

    A checkpoint that `recast.save` wrote of a recast network is loaded into the recast network of that name. Raises
    `RecastError` for a name that means nothing, and as `build` and `load` do.
    """
    name = config.name
    if name.endswith(SAVED):
        return _saved(config)
    if Path(name).is_file() and is_image_name(name):
        raise RecastError(f"{name} is an image, and the network comes first: recast explain RUN|MODEL {name}")
    if Path(name).is_file() and name.endswith(PICKLED):
        raise RecastError(f"{name} holds weights alone: name the model, and add --checkpoint {name}")
    if config.checkpoint is not None and not config.pretrained and _has_plan(config.checkpoint):
        return load(config.checkpoint, parent=build(config.replace(checkpoint=None)))
    try:
        return build(config).eval()
    except RecastError as error:
        raise error if timm.is_model(name.partition(".")[0]) else no_subject(name, error) from None


def _saved(config: ModelConfig) -> nn.Module:
    path = config.name
    if config.checkpoint or config.pretrained or config.num_classes is not None:
        raise RecastError(
            f"{path} says its network and its weights: leave --checkpoint, --pretrained, --num-classes away"
        )
    if not Path(path).is_file():
        raise RecastError(f"no such file: {path}")
    try:
        constructor = read_header(path)["constructor"]
    except RecastError as error:
        raise RecastError(f"{error}. Weights alone: name the model, and add --checkpoint {path}") from None
    name = constructor.get("name") if isinstance(constructor, Mapping) else None
    if constructor is None:
        raise RecastError(
            f"{path} does not say how to build its network: name the model, and add --checkpoint {path}. "
            f"A model is named {FORMS}"
        )
    if isinstance(name, str) and is_function(name) and not may_run(name):
        raise RecastError(f"{path} asks to run {name}, and code may do anything: add --trust if you trust it")
    return load(path)


def _has_plan(path: str) -> bool:
    """Whether `recast.save` wrote the file, of a network that was changed."""
    try:
        return path.endswith(SAVED) and read_header(path)["plan"] is not None
    except RecastError:
        return False
