"""Sources of networks: timm, torchvision, segmenters and detectors on timm's, and functions of the user."""

from __future__ import annotations

import importlib
import inspect
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from importlib.metadata import entry_points
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import timm
from torch import nn

from recast.errors import RecastError, first_line, suggest
from recast.models.config import OF_FIELDS
from recast.models.names import FORMS, ON_TIMM, PLUGINS, unknown_model
from recast.models.trust import check_trusted, elsewhere, import_path, trusting

ON_TIMM_BUILDERS: dict[str, Callable[..., nn.Module]] = {}
"""Prefix of `names.ON_TIMM` → what builds such a network on timm's NAME; `recast.papers.dense` fills it."""


def create(source: str, name: str, kwargs: dict[str, Any], pretrained: bool, trust: bool = False) -> nn.Module:
    """Create the network `name` of `source`, from `split_name`, with random or published weights.

    Raises RecastError for an unknown name, an argument that it does not take, and published weights that are not there
    or cannot be fetched.
    """
    make = {"timm": _timm, "torchvision": _torchvision, "function": _function}.get(source) or partial(_on_timm, source)
    others = kwargs.keys() - {"num_classes", "img_size"}
    if others and source not in ("timm", "function"):
        check_registered(source, name)
        field = "in_chans" if "in_chans" in others else "kwargs"
        raise RecastError(f"model.{field} requires a network of timm or a function, got {source}:{name}: drop it")
    with trusting(trust=True) if trust else nullcontext():
        return make(name, kwargs, pretrained)


def plug_in(is_there: Callable[[], bool]) -> None:
    """Import modules that register networks, in order, until one `is_there`.

    They are `names.PLUGINS`, then those that installed packages name as entry points of the group `recast.networks`.
    """
    for name in PLUGINS:
        if is_there():
            return
        importlib.import_module(name)
    for entry in () if is_there() else entry_points(group="recast.networks"):
        entry.load()


def check_registered(source: str, name: str) -> None:
    """Raise RecastError for a name that timm or torchvision does not have. Functions are not checked."""
    if source == "function":
        return
    source = "timm" if source in ON_TIMM else source
    architecture, _, tag = name.partition(".")
    if source == "timm":
        plug_in(lambda: timm.is_model(architecture))
    if source == "timm" and timm.is_model(architecture):
        tags = [full.partition(".")[2] for full in timm.list_models(f"{architecture}.*", include_tags=True)]
        if tag and tag not in tags:
            names = ", ".join(filter(None, tags)) or "none"
            raise RecastError(f"timm's {architecture} has no tag {tag!r}, only {names}")
        return
    from torchvision import models

    if source == "timm":
        raise unknown_model("timm", architecture, timm.list_models(), models.list_models())
    if name not in models.list_models():
        raise unknown_model("torchvision", name, models.list_models())


def _timm(name: str, kwargs: dict[str, Any], pretrained: bool) -> nn.Module:
    check_registered("timm", name)
    if pretrained:
        _check_published(name)
        return _fetched(name, lambda: timm.create_model(name, pretrained=True, **kwargs))
    size, others = kwargs.get("img_size"), {key: value for key, value in kwargs.items() if key not in OF_FIELDS}
    try:
        model: nn.Module = timm.create_model(name, **kwargs)
    except (AssertionError, ArithmeticError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if others:
            raise RecastError(f"{name} cannot be built with {others} ({first_line(error)})") from None
        if size is None:
            raise
        if isinstance(error, TypeError):  # an argument that it does not take; all take num_classes
            raise RecastError(f"{name} takes images of any size: drop model.input_size, set data.img_size") from None
        raise RecastError(f"{name} cannot be built for model.input_size={size} ({first_line(error)})") from None
    cfg: Any = model.pretrained_cfg  # tells what this network takes (`input_defaults`), not what was published
    if size is not None:
        cfg["input_size"] = (cfg["input_size"][0], size, size)
    return model


def _on_timm(kind: str, name: str, kwargs: dict[str, Any], pretrained: bool) -> nn.Module:
    check_registered(kind, name)
    plug_in(lambda: kind in ON_TIMM_BUILDERS)
    if kind not in ON_TIMM_BUILDERS:
        raise RecastError(f"nothing is registered that builds {kind}:NAME: import the module that does")
    make = partial(ON_TIMM_BUILDERS[kind], name, **kwargs)
    if pretrained:
        _check_published(name)
        return _fetched(name, lambda: make(pretrained=True))
    with _user_code(f"timm's {name} cannot be the body of {kind}"):
        return make()


def _check_published(name: str) -> None:
    if not timm.models.is_model_pretrained(name):
        raise RecastError(f"timm has no pretrained weights for {name}: pass a checkpoint")


def _torchvision(name: str, kwargs: dict[str, Any], pretrained: bool) -> nn.Module:
    from torchvision import models

    check_registered("torchvision", name)
    is_detector = ".detection." in models.get_model_builder(name).__module__
    kwargs, options = dict(kwargs), dict[str, Any]()
    if "img_size" in kwargs and not is_detector:
        raise RecastError(f"model.input_size requires a network of timm, got torchvision:{name}: drop it")
    if size := kwargs.pop("img_size", None):
        if name.startswith("ssd"):
            raise RecastError(f"torchvision:{name} takes images of one size: drop model.input_size")
        options = {"min_size": size, "max_size": size}  # images come as large as they shall be
    if is_detector and "num_classes" in kwargs:
        kwargs["num_classes"] += 1  # the background is their class 0
    if not pretrained:
        # detectors and segmenters would fetch their backbone's weights
        takes = inspect.signature(models.get_model_builder(name)).parameters
        options |= {"weights_backbone": None} if "weights_backbone" in takes else {}
        if "aux_loss" in takes and "num_classes" in kwargs:  # for training: with the head that published weights have
            options["aux_loss"] = True
        return models.get_model(name, weights=None, **kwargs, **options)
    weights = models.get_model_weights(name).DEFAULT
    classes = len(weights.meta["categories"])
    if kwargs.get("num_classes", classes) != classes:
        raise RecastError(
            f"torchvision's weights of {name} have {classes - is_detector} classes, got num_classes="
            f"{kwargs['num_classes'] - is_detector}: "
            "set model.new_head"
        )
    return _fetched(name, lambda: models.get_model(name, weights=weights, **options))


def _fetched(name: str, create: Callable[[], nn.Module]) -> nn.Module:
    with reaching(f"could not fetch the pretrained weights of {name}", "give a file of weights, checkpoint=FILE"):
        return create()


@contextmanager
def reaching(failed: str, remedy: str) -> Iterator[None]:
    """Turn exceptions in a block that contacts a hub into a `RecastError` with what `failed` and the `remedy`."""
    try:
        with _asked_once():
            yield
    except Exception as error:  # each hub and proxy fails in its own class
        raise RecastError(f"{failed} ({type(error).__name__}: {first_line(error)}); {remedy}") from error


@contextmanager
def _asked_once() -> Iterator[None]:
    """Use the hub's cache alone where there is no network: its client would retry for a minute."""
    from huggingface_hub import constants

    address, before = urlsplit(constants.ENDPOINT), constants.HF_HUB_OFFLINE
    try:
        if address.hostname and not getproxies():
            socket.create_connection((address.hostname, address.port or 443), timeout=5).close()
    except OSError:
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _function(name: str, kwargs: dict[str, Any], pretrained: bool) -> nn.Module:
    check_trusted(name)
    wanted = kwargs | ({"pretrained": True} if pretrained else {})
    with import_path(name), redirect_stdout(sys.stderr):  # what the user's code prints is no result
        function = _find_function(name)
        try:
            inspect.signature(function).bind(**wanted)
        except TypeError as error:
            takes, remedy = inspect.signature(function).parameters, ""
            if pretrained and "pretrained" not in takes:
                remedy = "give its weights with checkpoint=FILE, or pretrained=False for those that it returns"
                raise RecastError(f"{name} does not take pretrained=True: {remedy}") from None
            if "num_classes" in wanted and "num_classes" not in takes:
                remedy = f"; let it take num_classes, and return a network with {wanted['num_classes']} of them"
            raise RecastError(f"{name} cannot be called with {wanted or 'nothing'}: {error}{remedy}") from None
        with _user_code(f"{name} failed"):
            model = function(**wanted)
    if not isinstance(model, nn.Module):
        raise RecastError(f"{name} must return an nn.Module, got {type(model).__name__}")
    return model


def _find_function(name: str) -> Callable[..., Any]:
    """Return the function or class of a name. Raises RecastError, before any call, if it makes no network."""
    module_name, _, function_name = name.partition(":")
    if module_name.partition(".")[0] in sys.stdlib_module_names or "__main__" in module_name.split("."):
        raise RecastError(f"{name} belongs to Python's standard library: a model is named {FORMS}")
    with _user_code(f"cannot import {module_name} for model {name}{elsewhere(name)}"):
        module = importlib.import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value)]
        raise RecastError(f"{module_name} has no function {function_name!r}.{suggest(function_name, functions)}")
    return function


@contextmanager
def _user_code(action: str) -> Iterator[None]:
    """Turn any exception of the user's code, SystemExit included, into a RecastError."""
    try:
        yield
    except (RecastError, KeyboardInterrupt):
        raise
    except BaseException as error:
        kind = "" if isinstance(error, ModuleNotFoundError) else f"{type(error).__name__}: "
        raise RecastError(f"{action}: {kind}{first_line(error)}") from error
