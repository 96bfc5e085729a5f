"""A network from a name: `timm:NAME` (or NAME), `torchvision:NAME`, or `pkg.module:function`.

build(ModelConfig("cifar_resnet20", checkpoint="weights.safetensors"))
constructor(config) → {"name": "timm:cifar_resnet20", "kwargs": {"num_classes": 100}} → build_from(...)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from recast.errors import RecastError
from recast.models.adapt import other_classes, resampled, with_own_classifier
from recast.models.create import create, split_name
from recast.models.patchconvnet import PatchConvNet, checkpoint_filter_fn
from recast.models.weights import first_nonfinite, load_weights_, read_weights
from recast.run.config import ModelConfig

KWARGS = ("num_classes", "img_size")
"""What a constructor may set."""


def build(config: ModelConfig, *, num_classes: int | None = None) -> nn.Module:
    """The network that `config` names, in training mode, on the CPU, with its weights.

    `num_classes` is the size of the head where `config.num_classes` leaves it open (the data set's classes).
    Weights: `config.checkpoint` (strict), else the registry's own where `config.pretrained`, else random. With
    `config.new_head` all but the classifier's; with `config.input_size` position tables are resampled to it.
    Raises RecastError for an unknown name, a checkpoint that does not fit, weights that cannot be fetched or hold NaN,
    and a size for a network that takes any.
    """
    if config.checkpoint is not None and config.pretrained:
        raise RecastError("pass either checkpoint or pretrained, not both: a checkpoint replaces every weight")
    source, name = split_name(config.name)
    kwargs = _kwargs(config, num_classes)
    origin, weights = f"the pretrained weights of {config.name}", None
    if config.checkpoint is not None:
        # The file is read before the network is made: it is the likelier mistake, and the quicker check.
        origin, weights = str(config.checkpoint), read_weights(config.checkpoint)
    elif config.pretrained and (config.new_head or config.input_size is not None):
        # As they were published, so that head and positions are treated as a checkpoint's are.
        published = {} if config.new_head else {key: value for key, value in kwargs.items() if key != "img_size"}
        weights = create(source, name, published, pretrained=True).state_dict()
    model = create(source, name, kwargs, pretrained=config.pretrained and weights is None)
    if weights is not None:
        if isinstance(model, PatchConvNet):  # published names are another layout's; one class token serves every class
            weights = checkpoint_filter_fn(weights, model)
        if config.new_head:
            weights = with_own_classifier(model, weights, kwargs.get("num_classes"))
        elif differ := other_classes(model, weights):
            raise RecastError(_other_classes(origin, *differ, config, num_classes))
        if config.input_size is not None:
            weights = resampled(model, weights)
        load_weights_(model, weights, source=origin)
    elif bad := first_nonfinite(model, model.state_dict()):
        raise RecastError(f"the weights of {config.name} hold NaN or infinity in {bad}: they cannot be used")
    return model


def _other_classes(origin: str, theirs: int, ours: int, config: ModelConfig, of_data: int | None) -> str:
    if config.num_classes is None and of_data is not None:
        return f"{origin} has {theirs} classes, the data has {ours}: set model.new_head"
    wanted = f"{config.name} has" if config.num_classes is None else "model.num_classes is"
    return f"{origin} has {theirs} classes, {wanted} {ours}: pass num_classes={theirs}, or set model.new_head"


def constructor(config: ModelConfig, *, num_classes: int | None = None) -> dict[str, Any]:
    """What makes the same architecture again, as JSON-able data: name and keyword arguments, no weights."""
    source, name = split_name(config.name)
    return {"name": name if source == "function" else f"{source}:{name}", "kwargs": _kwargs(config, num_classes)}


def build_from(constructor: Mapping[str, Any], *, allow_functions: bool = False) -> nn.Module:
    """The network, with random weights, that a `constructor` describes.

    A file's `pkg.module:function` would run whatever it names, so it is called only if `allow_functions`.
    Raises RecastError as `check_constructor` does.
    """
    source, bare, kwargs = check_constructor(constructor)
    if source == "function" and not allow_functions:
        raise RecastError(
            f"this file asks to run {bare}: pass its network as parent, or allow_functions=True if you trust it"
        )
    return create(source, bare, kwargs, pretrained=False)


def check_constructor(constructor: Mapping[str, Any]) -> tuple[str, str, dict[str, int]]:
    """(source, name, arguments) of a constructor, as `create` takes them.

    Raises RecastError for anything that is not `{"name": str, "kwargs": {"num_classes": int, "img_size": int}}`, of
    which both numbers may be left out.
    """
    if not isinstance(constructor, Mapping) or not isinstance(constructor.get("name"), str):
        raise RecastError(
            f'a constructor must be {{"name": ..., "kwargs": {{"num_classes": ...}}}}, got {constructor!r}'
        )
    name, kwargs = constructor["name"], constructor.get("kwargs", {})
    if not isinstance(kwargs, Mapping) or set(kwargs) - set(KWARGS):
        raise RecastError(f"the constructor of {name} may set {' and '.join(KWARGS)} only, got {kwargs!r}")
    for key, value in kwargs.items():
        if type(value) is not int or value < 1:
            raise RecastError(f"the constructor of {name} must set {key} to a whole number from 1, got {kwargs!r}")
    return (*split_name(name), dict(kwargs))


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


def _kwargs(config: ModelConfig, num_classes: int | None) -> dict[str, int]:
    wanted = {
        "num_classes": num_classes if config.num_classes is None else config.num_classes,
        "img_size": config.input_size,
    }
    for name, value in (("num_classes", wanted["num_classes"]), ("input_size", wanted["img_size"])):
        if value is not None and value < 1:
            raise RecastError(f"{name} must be at least 1, got {value}")
    return {key: value for key, value in wanted.items() if value is not None}
