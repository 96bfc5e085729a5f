"""A network with random or published weights, from timm, from torchvision, or from a function of the user's."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
from torch import nn

import recast.models.cmhsa_vit
import recast.models.patchconvnet
import recast.models.small  # noqa: F401
from recast.errors import RecastError, suggest

FORMS = "timm:NAME (or NAME), torchvision:NAME, or pkg.module:function"


def split_name(name: str) -> tuple[str, str]:
    """`timm:resnet18` → ("timm", "resnet18"); `pkg.module:function` → ("function", the same name)."""
    prefix, colon, rest = name.partition(":")
    if not colon:
        return "timm", name
    if prefix in ("timm", "torchvision"):
        return prefix, rest
    if all(part.isidentifier() for part in prefix.split(".")) and rest.isidentifier():
        return "function", name
    raise RecastError(f"a model is named {FORMS}, got {name!r}")


def create(source: str, name: str, kwargs: dict[str, Any], pretrained: bool) -> nn.Module:
    """The network `name` of `source`, as `split_name` gives them. Raises RecastError for an unknown name, an argument
    that it does not take, and published weights that are not there or cannot be fetched."""
    return {"timm": _timm, "torchvision": _torchvision, "function": _function}[source](name, kwargs, pretrained)


def _timm(name: str, kwargs: dict[str, Any], pretrained: bool) -> nn.Module:
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        raise RecastError(f"timm has no model {architecture!r}.{_suggest_model(architecture)} A model is named {FORMS}")
    tags = [full.partition(".")[2] for full in timm.list_models(f"{architecture}.*", include_tags=True)]
    if tag and tag not in tags:
        raise RecastError(f"timm's {architecture} has no tag {tag!r}, only {', '.join(filter(None, tags)) or 'none'}")
    if not pretrained:
        return _random_timm(name, kwargs)
    if not timm.models.is_model_pretrained(name):
        raise RecastError(f"timm has no pretrained weights for {name}: pass a checkpoint")
    return _fetch(name, lambda: timm.create_model(name, pretrained=True, **kwargs))


def _random_timm(name: str, kwargs: dict[str, Any]) -> nn.Module:
    """timm's network with random weights; `img_size` is an argument of those built for one size only."""
    try:
        model: nn.Module = timm.create_model(name, pretrained=False, **kwargs)
    except (AssertionError, ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        if "img_size" not in kwargs:
            raise
        if isinstance(error, TypeError) and "img_size" in str(error):
            raise RecastError(
                f"{name} takes images of any size: leave model.input_size out, data.img_size is the size of the images"
            ) from None
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RecastError(f"{name} cannot be built for model.input_size={kwargs['img_size']} ({reason})") from None
    if "img_size" in kwargs:  # a network's cfg tells what it takes (`input_defaults`), not what was published
        cfg: Any = model.pretrained_cfg
        cfg["input_size"] = (cfg["input_size"][0], kwargs["img_size"], kwargs["img_size"])
    return model


def _torchvision(name: str, kwargs: dict[str, Any], pretrained: bool) -> nn.Module:
    from torchvision import models

    if name not in models.list_models():
        close = suggest(name, models.list_models())
        raise RecastError(f"torchvision has no model {name!r}.{close} A model is named {FORMS}")
    if "img_size" in kwargs:
        raise RecastError(f"model.input_size is for timm's networks, got torchvision:{name}: leave it out")
    if not pretrained:
        # detectors and segmenters would fetch their backbone's weights
        has_backbone = "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters
        return models.get_model(name, weights=None, **kwargs, **({"weights_backbone": None} if has_backbone else {}))
    weights = models.get_model_weights(name).DEFAULT
    own = len(weights.meta["categories"])
    if kwargs.get("num_classes", own) != own:
        raise RecastError(
            f"torchvision's weights of {name} have {own} classes, got num_classes={kwargs['num_classes']}: "
            "set model.new_head"
        )
    return _fetch(name, lambda: models.get_model(name, weights=weights))


def _function(name: str, kwargs: dict[str, Any], pretrained: bool) -> nn.Module:
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
