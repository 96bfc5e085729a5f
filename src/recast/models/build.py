"""A network from a name: `timm:NAME` (or NAME), `torchvision:NAME`, or `pkg.module:function`.

build(ModelConfig("cifar_resnet20", checkpoint="weights.safetensors"))
constructor(config) → {"name": "timm:cifar_resnet20", "kwargs": {"num_classes": 100}} → build_from(...)
"""

from __future__ import annotations

import functools
import importlib
import inspect
import socket
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints
from urllib.parse import urlsplit
from urllib.request import getproxies

import timm
from torch import Tensor, nn

from recast.errors import RecastError, first_line, shown, suggest
from recast.models.adapt import other_classes, resampled, with_own_classifier
from recast.models.patchconvnet import PatchConvNet
from recast.models.patchconvnet_weights import checkpoint_filter_fn
from recast.models.weights import first_nonfinite, load_weights_, read_header, read_weights
from recast.run.config import ModelConfig
from recast.run.fields import Classes, Pixels, check_value, read_fields
from recast.run.names import FORMS, split_name, unknown_model
from recast.run.trust import check_trusted, elsewhere, import_path, trusting
from recast.surgery.apply import recast_
from recast.surgery.plan import Plan
from recast.surgery.proof import Proof, note_

KWARGS = ("num_classes", "img_size")
"""What a constructor may set."""


def build(config: ModelConfig, *, num_classes: int | None = None, trust: bool = False) -> nn.Module:
    """The network that `config` names, in training mode, on the CPU, with its weights.

    `num_classes` is the size of the head where `config.num_classes` leaves it open (the data set's classes).
    Weights: `config.checkpoint` (strict), else the registry's own where `config.pretrained`, else random. With
    `config.new_head` all but the classifier's; with `config.input_size` position tables are resampled to it. A recast
    network's file makes a recast network: its plan is replayed.
    A `pkg.module:function` is run only with `trust`, or where the user named it (`recast.run.trust`).
    Raises RecastError for an unknown name, a checkpoint that does not fit, weights that cannot be fetched or hold NaN,
    and a size for a network that takes any.
    """
    if config.checkpoint is not None and config.pretrained:
        raise RecastError("pass either checkpoint or pretrained, not both: a checkpoint replaces every weight")
    source, name = split_name(config.name)
    kwargs = _kwargs(config, num_classes)
    origin, weights, header = f"the pretrained weights of {config.name}", None, None
    if config.checkpoint is not None:
        # The file is read before the network is made: it is the likelier mistake, and the quicker check.
        origin, weights = str(config.checkpoint), read_weights(config.checkpoint)
    elif config.pretrained and (config.new_head or config.input_size is not None):
        # As they were published, so that head and positions are treated as a checkpoint's are.
        published = {} if config.new_head else {key: value for key, value in kwargs.items() if key != "img_size"}
        weights = create(source, name, published, pretrained=True, trust=trust).state_dict()
    model = create(source, name, kwargs, pretrained=config.pretrained and weights is None, trust=trust)
    if weights is not None:
        if config.checkpoint is not None:
            with suppress(RecastError):  # foreign: its weights were read before
                header = read_header(config.checkpoint)
            model = model if header is None else replayed(model, header, config.checkpoint)
        if isinstance(model, PatchConvNet):  # published names are another layout's; one class token serves every class
            weights = checkpoint_filter_fn(weights, model)
        if config.new_head:
            weights = with_own_classifier(model, weights, kwargs.get("num_classes"))
        elif differ := other_classes(model, weights):
            theirs, ours = differ
            if config.num_classes is None and num_classes is not None:
                raise RecastError(f"{origin} has {theirs} classes, the data has {ours}: set model.new_head")
            wanted = f"{config.name} has" if config.num_classes is None else "model.num_classes is"
            raise RecastError(
                f"{origin} has {theirs} classes, {wanted} {ours}: pass num_classes={theirs}, or set model.new_head"
            )
        if config.input_size is not None:
            weights = resampled(model, weights)
        load_weights_(model, weights, source=origin)
    elif any(weight.is_meta for weight in model.parameters()):
        raise RecastError(f"{config.name} is on the device meta, where weights have no values: build it on the CPU")
    elif bad := first_nonfinite(model, model.state_dict()):
        raise RecastError(f"the weights of {config.name} hold NaN or infinity in {bad}: they cannot be used")
    return model


def replayed(model: nn.Module, header: Mapping[str, Any], path: str | Path) -> nn.Module:
    """`model` recast by the plan, with the proof, that the header of a saved file holds."""
    if header["plan"] is None:
        return model
    note_(model, read_fields(Proof, header["proof"], f"{path}'s proof"))
    return recast_(model, Plan.from_json(header["plan"], f"{path}'s plan"))


def _kwargs(config: ModelConfig, num_classes: int | None) -> dict[str, int]:
    classes = num_classes if config.num_classes is None else config.num_classes
    return {key: value for key, value in zip(KWARGS, (classes, config.input_size), strict=True) if value is not None}


def constructor(config: ModelConfig, *, num_classes: int | None = None) -> dict[str, Any]:
    """What makes the same architecture again, as JSON-able data: name and keyword arguments, no weights."""
    source, name = split_name(config.name)
    return {"name": name if source == "function" else f"{source}:{name}", "kwargs": _kwargs(config, num_classes)}


def build_from(constructor: Mapping[str, Any], *, trust: bool = False) -> nn.Module:
    """The network, with random weights, that a `constructor` describes; a function is run as by `build`.

    Raises RecastError as `check_constructor` does.
    """
    source, bare, kwargs = check_constructor(constructor)
    return create(source, bare, kwargs, pretrained=False, trust=trust)


def check_constructor(constructor: Mapping[str, Any]) -> tuple[str, str, dict[str, int]]:
    """(source, name, arguments) of a constructor, as `create` takes them.

    Raises RecastError for anything that is not `{"name": str, "kwargs": {"num_classes": int, "img_size": int}}`, of
    which both numbers may be left out.
    """
    if not isinstance(constructor, Mapping) or not isinstance(constructor.get("name"), str):
        raise RecastError(
            f'a constructor must be {{"name": ..., "kwargs": {{"num_classes": ...}}}}, got {shown(constructor)}'
        )
    name, kwargs = constructor["name"], constructor.get("kwargs", {})
    if not isinstance(kwargs, Mapping) or set(kwargs) - set(KWARGS):
        raise RecastError(f"the constructor of {name} may set {' and '.join(KWARGS)} only, got {shown(kwargs)}")
    for key, value in kwargs.items():
        if type(value) is not int or value < 1:
            raise RecastError(f"the constructor of {name} must set {key} to a whole number from 1, got {shown(kwargs)}")
        check_value(Classes if key == "num_classes" else Pixels, value, f"{key} of the constructor of {name}")
    return (*split_name(name), dict(kwargs))


class InputDefaults(NamedTuple):
    """What a network was trained on."""

    size: tuple[int, int]
    """(height, width) in pixels."""
    crop_pct: float | None
    """Share of the short side that the crop keeps; None: not said."""
    mean: tuple[float, ...]
    """Per channel, as `std`, in [0, 1] pixels."""
    std: tuple[float, ...]


def input_defaults(model: nn.Module) -> InputDefaults | None:
    """Read from timm's `pretrained_cfg`; None for a network without one."""
    cfg = getattr(model, "pretrained_cfg", None)
    if not isinstance(cfg, Mapping) or not {"input_size", "mean", "std"} <= set(cfg):
        return None
    _, height, width = cfg["input_size"]
    return InputDefaults((height, width), cfg.get("crop_pct"), tuple(cfg["mean"]), tuple(cfg["std"]))


def check_logits(
    logits: object, images: int, classes: int | None = None, dataset: str | None = None, of: str = "the model"
) -> None:
    """Raise RecastError unless `logits`, the output of the network `of`, is a tensor (images, classes).

    classes: of `dataset`; None: any number.
    """
    got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if isinstance(got, tuple) and len(got) == 2 and got[0] == images and classes in (None, got[1]):
        return
    if classes is None:
        raise RecastError(f"{of} must give logits ({images}, classes), got {got}")
    raise RecastError(
        f"{of} must give logits of shape {(images, classes)} (images, classes of {dataset}), got {got}: "
        "set model.num_classes, or choose the data the model was trained on"
    )


def create(source: str, name: str, kwargs: dict[str, Any], pretrained: bool, trust: bool = False) -> nn.Module:
    """The network `name` of `source`, as `split_name` gives them, with random or published weights.

    Raises RecastError for an unknown name, an argument that it does not take, and published weights that are not there
    or cannot be fetched.
    """
    make = {"timm": _timm, "torchvision": _torchvision, "function": _function}[source]
    with trusting(trust=True) if trust else nullcontext():
        return make(name, kwargs, pretrained)


def check_registered(source: str, name: str) -> None:
    """Raise RecastError for a name that timm or torchvision has not. Functions are not looked for."""
    if source == "function":
        return
    architecture, _, tag = name.partition(".")
    if source == "timm" and timm.is_model(architecture):
        tags = [full.partition(".")[2] for full in timm.list_models(f"{architecture}.*", include_tags=True)]
        if tag and tag not in tags:
            told = ", ".join(filter(None, tags)) or "none"
            raise RecastError(f"timm's {architecture} has no tag {tag!r}, only {told}")
        return
    from torchvision import models

    if source == "timm":
        raise unknown_model("timm", architecture, timm.list_models(), models.list_models())
    if name not in models.list_models():
        raise unknown_model("torchvision", name, models.list_models())


def _timm(name: str, kwargs: dict[str, Any], pretrained: bool) -> nn.Module:
    check_registered("timm", name)
    if pretrained:
        if not timm.models.is_model_pretrained(name):
            raise RecastError(f"timm has no pretrained weights for {name}: pass a checkpoint")
        return _fetched(name, lambda: timm.create_model(name, pretrained=True, **kwargs))
    if "img_size" not in kwargs:
        return timm.create_model(name, **kwargs)
    size = kwargs["img_size"]
    try:
        model: nn.Module = timm.create_model(name, **kwargs)
    except TypeError:  # an argument that it does not take; all take num_classes
        raise RecastError(
            f"{name} takes images of any size: leave model.input_size out, data.img_size is the size of the images"
        ) from None
    except (AssertionError, ArithmeticError, RuntimeError, ValueError) as error:
        raise RecastError(f"{name} cannot be built for model.input_size={size} ({first_line(error)})") from None
    cfg: Any = model.pretrained_cfg  # tells what this network takes (`input_defaults`), not what was published
    cfg["input_size"] = (cfg["input_size"][0], size, size)
    return model


def _torchvision(name: str, kwargs: dict[str, Any], pretrained: bool) -> nn.Module:
    from torchvision import models

    check_registered("torchvision", name)
    is_detector = ".detection." in models.get_model_builder(name).__module__
    kwargs, options = dict(kwargs), dict[str, Any]()
    if "img_size" in kwargs and not is_detector:
        raise RecastError(f"model.input_size is for timm's networks, got torchvision:{name}: leave it out")
    if size := kwargs.pop("img_size", None):
        if name.startswith("ssd"):
            raise RecastError(f"torchvision:{name} takes images of one size: leave model.input_size out")
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
    own = len(weights.meta["categories"])
    if kwargs.get("num_classes", own) != own:
        raise RecastError(
            f"torchvision's weights of {name} have {own - is_detector} classes, got num_classes="
            f"{kwargs['num_classes'] - is_detector}: "
            "set model.new_head"
        )
    return _fetched(name, lambda: models.get_model(name, weights=weights, **options))


def _fetched(name: str, create: Callable[[], nn.Module]) -> nn.Module:
    remedy = "pass a checkpoint, or leave pretrained off"
    with reaching(f"could not fetch the pretrained weights of {name}", remedy):
        return create()


@contextmanager
def reaching(failed: str, remedy: str) -> Iterator[None]:
    """For a block that asks a hub: whatever goes wrong there is a `RecastError` that says what `failed`."""
    try:
        with _asked_once():
            yield
    except Exception as error:  # each hub and proxy fails in its own class
        raise RecastError(f"{failed} ({type(error).__name__}: {first_line(error)}); {remedy}") from error


@contextmanager
def _asked_once() -> Iterator[None]:
    """The hub's client asks for a minute where there is no network: without one it looks at its cache alone."""
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
        accepted = inspect.signature(function).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        if refused := [key for key in wanted if key not in accepted and not takes_any]:
            raise RecastError(f"{name} takes no argument {refused[0]}: leave it out, or let the function take it")
        try:
            inspect.signature(function).bind(**wanted)
        except TypeError as error:
            raise RecastError(f"{name} cannot be called with {wanted or 'nothing'}: {error}") from None
        with _told(f"{name} failed"):
            model = function(**wanted)
    if not isinstance(model, nn.Module):
        raise RecastError(f"{name} must return an nn.Module, got {type(model).__name__}")
    return model


def _find_function(name: str) -> Callable[..., Any]:
    """The function or class of a name. Raises RecastError for what makes no network, before anything is called."""
    module_name, _, function_name = name.partition(":")
    own = {*sys.stdlib_module_names, *sys.builtin_module_names}
    if module_name.partition(".")[0] in own or "__main__" in module_name.split("."):
        raise RecastError(f"{name} is of Python's own library, which makes no networks: a model is named {FORMS}")
    with _told(f"cannot import {module_name} for model {name}{elsewhere(name)}"):
        module = importlib.import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value)]
        raise RecastError(f"{module_name} has no function {function_name!r}.{suggest(function_name, known)}")
    inner = function.func if isinstance(function, functools.partial) else inspect.unwrap(function)
    is_network = isinstance(inner, type) and issubclass(inner, nn.Module)
    is_python = isinstance(inner, types.FunctionType) and inner.__module__.partition(".")[0] not in own
    if not (is_network or (is_python and _may_return_network(inner))):
        raise RecastError(f"{name} is no function or class that makes an nn.Module: it is not called")
    return function


def _may_return_network(function: Callable[..., Any]) -> bool:
    """Whether what a function says of its result allows a network; most say nothing."""
    try:
        told = get_type_hints(function).get("return", nn.Module)
    except Exception:  # names that only a type checker knows
        return True
    return not isinstance(told, type) or issubclass(told, nn.Module) or issubclass(nn.Module, told)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Whatever the user's code raises, or leaving the program, as RecastError."""
    try:
        yield
    except (RecastError, KeyboardInterrupt):
        raise
    except BaseException as error:
        kind = "" if isinstance(error, ModuleNotFoundError) else f"{type(error).__name__}: "
        raise RecastError(f"{what}: {kind}{first_line(error)}") from error
