"""A network from a name: `timm:NAME` (or NAME), `torchvision:NAME`, or `pkg.module:function`.

build(ModelConfig("cifar_resnet20", checkpoint="weights.safetensors"))
constructor(config) → {"name": "timm:cifar_resnet20", "kwargs": {"num_classes": 100}} → build_from(...)
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import timm
from torch import nn

import recast.models.small  # noqa: F401  registers our names with timm
from recast.config import ModelConfig
from recast.errors import RecastError, suggest
from recast.models.weights import first_nonfinite, load_weights_, read_weights

FORMS = "timm:NAME (or NAME), torchvision:NAME, or pkg.module:function"


def build(config: ModelConfig, *, num_classes: int | None = None) -> nn.Module:
    """The network that `config` names, in training mode, on the CPU, with its weights.

    `num_classes` is the size of the head where `config.num_classes` leaves it open (the data set's classes).
    Weights: `config.checkpoint` (strict), else the registry's own where `config.pretrained`, else random.
    Raises RecastError for an unknown name, a checkpoint that does not fit, weights that cannot be fetched or hold NaN.
    """
    if config.checkpoint is not None and config.pretrained:
        raise RecastError("pass either checkpoint or pretrained, not both: a checkpoint replaces every weight")
    # The file is read before the network is made: it is the likelier mistake, and the quicker check.
    weights = None if config.checkpoint is None else read_weights(config.checkpoint)
    source, name = _split(config.name)
    model = _create(source, name, _head(config, num_classes), pretrained=config.pretrained)
    if weights is not None:
        load_weights_(model, weights, source=str(config.checkpoint))
    elif bad := first_nonfinite(model, model.state_dict()):
        raise RecastError(f"the weights of {config.name} hold NaN or infinity in {bad}: they cannot be used")
    return model


def constructor(config: ModelConfig, *, num_classes: int | None = None) -> dict[str, Any]:
    """What makes the same architecture again, as JSON-able data: name and keyword arguments, no weights."""
    source, name = _split(config.name)
    return {"name": name if source == "function" else f"{source}:{name}", "kwargs": _head(config, num_classes)}


def build_from(constructor: Mapping[str, Any], *, allow_functions: bool = False) -> nn.Module:
    """The network, with random weights, that a `constructor` describes.

    A file's `pkg.module:function` would run whatever it names, so it is called only if `allow_functions`.
    Raises RecastError for anything that is not `{"name": str, "kwargs": {"num_classes": int}}`.
    """
    if not isinstance(constructor, Mapping) or not isinstance(constructor.get("name"), str):
        raise RecastError(
            f'a constructor must be {{"name": ..., "kwargs": {{"num_classes": ...}}}}, got {constructor!r}'
        )
    name, kwargs = constructor["name"], constructor.get("kwargs", {})
    if not isinstance(kwargs, Mapping) or set(kwargs) - {"num_classes"}:
        raise RecastError(f"the constructor of {name} may set num_classes only, got {kwargs!r}")
    if type(kwargs.get("num_classes", 1)) is not int:
        raise RecastError(f"the constructor of {name} must set num_classes to a whole number, got {kwargs!r}")
    source, bare = _split(name)
    if source == "function" and not allow_functions:
        raise RecastError(
            f"this file asks to run {name}: pass its network as parent, or allow_functions=True if you trust it"
        )
    return _create(source, bare, dict(kwargs), pretrained=False)


class InputDefaults(NamedTuple):
    """What a network was trained on: side in pixels, per-channel mean and standard deviation in [0, 1] pixels."""

    img_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def input_defaults(model: nn.Module) -> InputDefaults | None:
    """Read from timm's `pretrained_cfg`; None for a network without one."""
    cfg = getattr(model, "pretrained_cfg", None)
    if not isinstance(cfg, Mapping) or not {"input_size", "mean", "std"} <= set(cfg):
        return None
    return InputDefaults(int(cfg["input_size"][-1]), tuple(cfg["mean"]), tuple(cfg["std"]))


def _split(name: str) -> tuple[str, str]:
    """`timm:resnet18` → ("timm", "resnet18"); `pkg.module:function` → ("function", the same name)."""
    prefix, colon, rest = name.partition(":")
    if not colon:
        return "timm", name
    if prefix in ("timm", "torchvision"):
        return prefix, rest
    if all(part.isidentifier() for part in prefix.split(".")) and rest.isidentifier():
        return "function", name
    raise RecastError(f"a model is named {FORMS}, got {name!r}")


def _head(config: ModelConfig, num_classes: int | None) -> dict[str, int]:
    wanted = num_classes if config.num_classes is None else config.num_classes
    if wanted is None:
        return {}
    if wanted < 1:
        raise RecastError(f"num_classes must be at least 1, got {wanted}")
    return {"num_classes": wanted}


def _create(source: str, name: str, kwargs: dict[str, Any], pretrained: bool) -> nn.Module:
    create = {"timm": _create_timm, "torchvision": _create_torchvision, "function": _create_function}[source]
    return create(name, kwargs, pretrained)


def _create_timm(name: str, kwargs: dict[str, Any], pretrained: bool) -> nn.Module:
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        raise RecastError(f"timm has no model {architecture!r}.{_suggest_model(architecture)} A model is named {FORMS}")
    tags = [full.partition(".")[2] for full in timm.list_models(f"{architecture}.*", include_tags=True)]
    if tag and tag not in tags:
        raise RecastError(f"timm's {architecture} has no tag {tag!r}, only {', '.join(filter(None, tags)) or 'none'}")
    if not pretrained:
        return timm.create_model(name, pretrained=False, **kwargs)
    if not timm.models.is_model_pretrained(name):
        raise RecastError(f"timm has no pretrained weights for {name}: pass a checkpoint")
    return _fetch(name, lambda: timm.create_model(name, pretrained=True, **kwargs))


def _create_torchvision(name: str, kwargs: dict[str, Any], pretrained: bool) -> nn.Module:
    from torchvision import models

    if name not in models.list_models():
        close = suggest(name, models.list_models())
        raise RecastError(f"torchvision has no model {name!r}.{close} A model is named {FORMS}")
    if not pretrained:
        # detectors and segmenters would fetch their backbone's weights
        has_backbone = "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters
        return models.get_model(name, weights=None, **kwargs, **({"weights_backbone": None} if has_backbone else {}))
    weights = models.get_model_weights(name).DEFAULT
    own = len(weights.meta["categories"])
    if kwargs.get("num_classes", own) != own:
        raise RecastError(
            f"torchvision's weights of {name} have {own} classes, got num_classes={kwargs['num_classes']}"
        )
    return _fetch(name, lambda: models.get_model(name, weights=weights))


def _create_function(name: str, kwargs: dict[str, Any], pretrained: bool) -> nn.Module:
    function = _find_function(name)
    accepted = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    wanted = kwargs | ({"pretrained": True} if pretrained else {})
    if refused := [key for key in wanted if key not in accepted and not takes_any]:
        raise RecastError(f"{name} takes no argument {refused[0]}: leave it out, or let the function take it")
    model = function(**wanted)
    if not isinstance(model, nn.Module):
        raise RecastError(f"{name} must return an nn.Module, got {type(model).__name__}")
    return model


def _find_function(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    here = str(Path.cwd())
    added = here not in sys.path
    if (
        added
    ):  # a console script does not look in the current folder, `python -m` does: both should find the user's file
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise RecastError(f"cannot import {module_name} for model {name}: {error}") from error
    finally:
        if added:
            sys.path.remove(here)
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value)]
        raise RecastError(f"{module_name} has no function {function_name!r}.{suggest(function_name, known)}")
    return function


def _fetch(name: str, create: Callable[[], nn.Module]) -> nn.Module:
    try:
        return create()
    except Exception as error:  # each hub and proxy fails in its own class
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RecastError(
            f"could not fetch the pretrained weights of {name} ({type(error).__name__}: {reason}); "
            "pass a checkpoint, or leave pretrained off"
        ) from error


def _suggest_model(name: str) -> str:
    from torchvision import models

    if name in models.list_models():
        return f" Did you mean torchvision:{name}?"
    return suggest(name, timm.list_models())
