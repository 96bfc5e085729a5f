"""Choice of the network, as plain data for `models.build.build`. Imports no torch."""

from __future__ import annotations

import ast
import json
from contextlib import suppress
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from recast.config import Classes, Config, Count, FilePath, Pixels, Rare, problem
from recast.models.trust import is_function

OF_FIELDS = {"num_classes": "num_classes", "img_size": "input_size", "in_chans": "in_chans"}
"""Arguments of a network → fields of `ModelConfig` that set them."""
WEIGHTS = (
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "pretrained_strict",
    "checkpoint_path",
    "cache_dir",
)
"""Arguments of timm that fetch or read weights."""


def _as_mapping(words: Any) -> Any:
    """Turn texts NAME=VALUE into a mapping; a value is JSON or a Python literal, else a text."""
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return words
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise problem(f"must be NAME=VALUE, got {word!r}")
        values[name] = text
        for parse in (ast.literal_eval, json.loads):
            with suppress(ValueError, SyntaxError):
                values[name] = parse(text)
    return values


def as_json(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments as JSON has them: tuples are lists.

    Raises a validation error for an argument that a field sets, that would fetch weights, or that JSON cannot hold.
    """
    for name in arguments:
        if name in OF_FIELDS:
            raise problem(f"must not set {name}; use model.{OF_FIELDS[name]}")
        if name in WEIGHTS:
            raise problem(f"must not set {name}; use model.checkpoint or model.pretrained")
    try:
        arguments = json.loads(json.dumps(arguments, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise problem(f"must hold values that JSON can store ({error})") from None
    return arguments


Arguments = Annotated[dict[str, Any], BeforeValidator(_as_mapping), AfterValidator(as_json)]
"""Further arguments of a network, values as in JSON."""


class ModelConfig(Config):
    """Network"""

    name: str = "resnet18"
    """Network: a timm NAME, torchvision:NAME, or pkg.module:function; upernet:NAME, maskrcnn:NAME, fasterrcnn:NAME or
    retinanet:NAME on a timm NAME as backbone."""
    checkpoint: FilePath | None = None
    """Weights of the parent, .safetensors or .pth. They are never unpickled."""
    pretrained: bool = False
    """Load the pretrained weights of timm or torchvision."""
    num_classes: Annotated[Classes | None, Rare()] = None
    """Number of classes of the head. None: the model's own, or the data set's when training."""
    new_head: bool = False
    """Load the checkpoint without its classifier and initialize a new one, for data with other classes."""
    input_size: Annotated[Pixels | None, Rare()] = None
    """Image side in pixels for networks with a fixed size (ViT, CaiT, ResMLP); position embeddings are resampled."""
    in_chans: Annotated[Count | None, Rare()] = None
    """Input channels of a timm network, and bands of the images: grey (1), TIFF, arrays (.npy, .npz: rows x columns x
    bands). None: RGB."""
    kwargs: Annotated[Arguments, Rare()] = Field(default_factory=dict)
    """Additional arguments of a timm network or a function: NAME=VALUE ..., e.g. depth=6 global_pool=max."""
    checkpoint_key: Annotated[str | None, Rare()] = None
    """Set of weights to load from a checkpoint with several, e.g. state_dict. None: EMA first, as in timm."""

    @property
    def has_returned_weights(self) -> bool:
        """True if the weights are those that a user's function returns: nothing else gives them."""
        return is_function(self.name) and not (self.checkpoint or self.pretrained)
