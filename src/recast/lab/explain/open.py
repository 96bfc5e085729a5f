"""Open the network named by the first argument of `recast explain`."""

from __future__ import annotations

from pathlib import Path

import timm
from torch import nn

from recast.errors import RecastError
from recast.io import load
from recast.lab.data.images import is_image_name
from recast.lab.folder.run import RunFolder
from recast.models.build import build
from recast.models.config import ModelConfig
from recast.models.names import FORMS, no_subject
from recast.models.trust import is_function
from recast.models.weights import PICKLED, read_header

SAVED = ".safetensors"


def weights_of(config: ModelConfig) -> tuple[str, str, list[str]]:
    """Return the source of the weights that `open_model` loads, a suffix for titles, and notes on random weights."""
    name = config.name
    if config.checkpoint or name.endswith(SAVED):
        return config.checkpoint or name, "", []
    if config.pretrained:
        return "published", "", []
    if is_function(name):
        note = f"The weights are those that {name} returns. If they are random, predictions and maps mean nothing; "
        return f"as returned by {name}", " (weights as returned)", [f"{note}--checkpoint loads others."]
    note = "Random weights: predictions and maps mean nothing. --checkpoint or --pretrained loads trained weights."
    return "random", " (random weights)", [note]


def names_a_run(word: str) -> bool:
    """Return True if `word` means a run folder: a folder with a recipe, or one that is not also a timm model's name."""
    return Path(word).is_dir() and (RunFolder(word).is_run or not timm.is_model(word))


def open_model(config: ModelConfig) -> nn.Module:
    """Return the network in eval mode: from a file that `recast.save` wrote, or by name with or without weights.

    A checkpoint that `recast.save` wrote for a recast network is loaded into the recast network of that name.

    Raises:
        RecastError: the name is unknown, or an error of `build` or `load`.
    """
    name = config.name
    if name.endswith(SAVED):
        return _open_saved(config)
    if Path(name).is_file() and is_image_name(name):
        raise RecastError(f"{name} is an image; give the network first: recast explain RUN|MODEL {name}")
    if Path(name).is_file() and name.endswith(PICKLED):
        raise RecastError(f"{name} was not written by recast.save: {_advice(name)}")
    try:
        return build(config).eval()
    except RecastError as error:
        raise error if timm.is_model(name.partition(".")[0]) else no_subject(name, error) from None


def _advice(path: str) -> str:
    """Return what to do with a file that does not say how to build its network."""
    explain = f"recast explain MODEL IMAGE --checkpoint {path}"
    return f"save the network with recast.save and its constructor; for a state dict, {explain}"


def _open_saved(config: ModelConfig) -> nn.Module:
    path = config.name
    if config.checkpoint or config.pretrained or config.num_classes is not None:
        raise RecastError(
            f"{path} holds its own network and weights: drop --checkpoint, --pretrained and --num-classes"
        )
    if not Path(path).is_file():
        raise RecastError(f"no such file: {path}")
    try:
        constructor = read_header(path)["constructor"]
    except RecastError as error:
        raise RecastError(f"{error}; {_advice(path)}") from None
    if constructor is None:
        raise RecastError(f"{path} does not say how to build its network: {_advice(path)}. A model is named {FORMS}")
    return load(path)
