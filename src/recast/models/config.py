"""Which network, as plain data: what `models.build.build` takes. Imports no torch."""

from __future__ import annotations

import ast
import json
from contextlib import suppress
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from recast.config import Classes, Config, Count, FilePath, Pixels, Rare, problem

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
            raise problem(f"must not name {name}, which is model.{OF_FIELDS[name]}")
        if name in WEIGHTS:
            raise problem(f"must not name {name}: weights come from model.checkpoint or model.pretrained")
    try:
        arguments = json.loads(json.dumps(arguments, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise problem(f"must hold what JSON can ({error})") from None
    return arguments


Arguments = Annotated[dict[str, Any], BeforeValidator(_as_mapping), AfterValidator(as_json)]
"""Further arguments of a network, values as in JSON."""


class ModelConfig(Config):
    """Network"""

    name: str = "resnet18"
    """Network: NAME of timm, torchvision:NAME, or pkg.module:function. On a NAME of timm too:
    upernet|maskrcnn|fasterrcnn|retinanet:NAME."""
    checkpoint: FilePath | None = None
    """Weights of the parent, .safetensors or .pth. They are never unpickled."""
    pretrained: bool = False
    """Let timm or torchvision fetch its pretrained weights."""
    num_classes: Annotated[Classes | None, Rare()] = None
    """Classes of the head. None: the model's own, or the data set's when training."""
    new_head: bool = False
    """Load the checkpoint without its classifier and draw a new one. For data with other classes."""
    input_size: Annotated[Pixels | None, Rare()] = None
    """Side in pixels for networks built for one size (ViT, CaiT, ResMLP); positions of a checkpoint are resampled."""
    in_chans: Annotated[Count | None, Rare()] = None
    """Channels of an image, for networks of timm. The images then have this many bands: grey (1), TIFF, arrays (.npy,
    .npz: rows x columns x bands). None: RGB."""
    kwargs: Annotated[Arguments, Rare()] = Field(default_factory=dict)
    """Further arguments of a network of timm or a function: NAME=VALUE ..., e.g. depth=6 global_pool=max."""
    checkpoint_key: Annotated[str | None, Rare()] = None
    """Which weights of a checkpoint with several, e.g. state_dict. None: as timm, a moving average (EMA) first."""
