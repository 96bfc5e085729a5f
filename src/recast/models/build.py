"""A network from a name: `timm:NAME` (or NAME), `torchvision:NAME`, `upernet:NAME` and others on a
network of timm's, or `pkg.module:function`.

build(ModelConfig("cifar_resnet20", checkpoint="weights.safetensors"))
constructor(config) → {"name": "timm:cifar_resnet20", "kwargs": {"num_classes": 100}} → build_from(...)
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import ConfigDict, model_validator
from torch import Tensor, nn

from recast.config import Classes, Config, Count, Finite, Pixels, Positive, checked, read
from recast.errors import RecastError, shown
from recast.models.adapt import other_classes, resampled, with_channels, with_own_classifier
from recast.models.config import ModelConfig, as_json
from recast.models.names import split_name
from recast.models.sources import create
from recast.models.weights import first_nonfinite, load_weights_, read_header, read_weights, select_weights
from recast.surgery.apply import recast_
from recast.surgery.chosen_forms import ChosenForms, choose_forms_
from recast.surgery.plan import Plan
from recast.tracing.examples import check_weights

KWARGS = ("num_classes", "img_size", "in_chans")
"""What a constructor may set, besides `model.kwargs`."""
NEW_HEAD = "set model.new_head"


def build(
    config: ModelConfig, *, num_classes: int | None = None, trust: bool = False, advice: str = NEW_HEAD
) -> nn.Module:
    """Build the network that `config` names, in training mode, on the CPU, with its weights.

    A part of the network that has `adapt_weights(model, weights, whole, origin)` gives published weights its own names.
    `num_classes` is the size of the head where `config.num_classes` leaves it open (the data set's classes); without
    either it is that of the checkpoint, else the network's default.
    Weights: `config.checkpoint` (strict), else the registry's own where `config.pretrained`, else random. With
    `config.new_head` all but the classifier's; with `config.input_size` position tables are resampled to it. A recast
    network's file makes a recast network: its plan is replayed, and its images and classes are noted.
    A `pkg.module:function` is run only with `trust`, or where the user named it (`recast.models.trust`).
    `advice` ends the error about weights with other classes than the data.
    Raises RecastError for an unknown name, a checkpoint that does not fit, weights that cannot be fetched or hold NaN,
    a size for a network that takes any, and `config.new_head` for the weights that a function returns.
    """
    if config.checkpoint is not None and config.pretrained:
        raise RecastError("pass either checkpoint or pretrained, not both: a checkpoint replaces every weight")
    if config.checkpoint_key is not None and config.checkpoint is None:
        raise RecastError("checkpoint_key=NAME requires checkpoint=FILE, the file that it is a key of")
    source, name = split_name(config.name)
    if config.new_head and config.has_returned_weights:
        raise RecastError(
            f"model.new_head requires model.checkpoint or model.pretrained: {name} returns its own classifier, make it "
            "new there"
        )
    kwargs = _kwargs(config, num_classes)
    origin = str(config.checkpoint or f"the pretrained weights of {config.name}")
    # a checkpoint is read before the network is made: the likelier mistake, and the quicker check
    weights = _weights(config, source, name, kwargs, trust)
    model = create(source, name, kwargs, pretrained=config.pretrained and weights is None, trust=trust)
    check_weights(model)
    if weights is None:
        if bad := first_nonfinite(model, model.state_dict()):
            raise RecastError(f"the weights of {config.name} hold NaN or infinity in {bad}: they cannot be used")
        return model
    header = None
    if config.checkpoint is not None:
        with suppress(RecastError):  # a foreign file has no header
            header = read_header(config.checkpoint)
        restored = partial(replayed, header=header, path=config.checkpoint)
        model = restored(model)
        weights = select_weights(model, weights, config.checkpoint, config.checkpoint_key)
        is_open = not config.new_head and "num_classes" not in kwargs
        if is_open and (differ := other_classes(model, weights)):
            with suppress(RecastError):  # a function may take no number of classes
                again = create(source, name, kwargs | {"num_classes": differ[0]}, pretrained=False, trust=trust)
                if not other_classes(again, weights):  # a detector has several numbers for a class
                    model = restored(again)
                    warnings.warn(f"{name} gets the {differ[0]} classes of {origin}, not {differ[1]}", stacklevel=2)
    load_weights_(model, _adapted(model, weights, config, num_classes, origin, advice), source=origin)
    if header is not None:
        read(Images, header["images"] or {}, f"{origin}'s images").built_as(config).note_(model)
    return model


def _weights(
    config: ModelConfig, source: str, name: str, kwargs: dict[str, Any], trust: bool
) -> dict[str, Tensor] | None:
    """Return the weights that must be adapted before they are loaded: a checkpoint's, or published ones.

    Published weights come as they are where head or positions change, to be treated as a checkpoint's. None where the
    network is built with its weights.
    """
    if config.checkpoint is not None:
        return read_weights(config.checkpoint)
    if config.pretrained and (config.new_head or config.input_size is not None):
        dropped = KWARGS[:2] if config.new_head else ("img_size",)
        published = {key: value for key, value in kwargs.items() if key not in dropped}
        return create(source, name, published, pretrained=True, trust=trust).state_dict()
    return None


def _adapted(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    num_classes: int | None,
    origin: str,
    advice: str,
) -> Mapping[str, Tensor]:
    """Return the weights with the model's names, classifier and positions.

    Raises RecastError for weights with other classes, unless `config.new_head`.
    """
    for part in reversed([part for part in model.modules() if hasattr(part, "adapt_weights")]):  # inner ones first
        weights = part.adapt_weights(model, weights, whole=not config.new_head, origin=origin)  # type: ignore[operator]
    if config.new_head:
        weights = with_own_classifier(model, weights, _kwargs(config, num_classes).get("num_classes"))
    elif differ := other_classes(model, weights):
        theirs, ours = differ
        if config.num_classes is None and num_classes is not None:
            raise RecastError(f"{origin} has {theirs} classes, the data has {ours}: {advice}")
        expected = f"{config.name} has" if config.num_classes is None else "model.num_classes is"
        raise RecastError(
            f"{origin} has {theirs} classes, {expected} {ours}: set model.num_classes={theirs} or model.new_head"
        )
    if config.in_chans is not None:
        weights = with_channels(model, weights, config.in_chans)
    return weights if config.input_size is None else resampled(model, weights)


def replayed(model: nn.Module, header: Mapping[str, Any] | None, path: str | Path) -> nn.Module:
    """Recast `model` by the plan in the header of a saved file, choose the forms; return the model."""
    if header is None or header["plan"] is None:
        return model
    forms = read(ChosenForms, header["forms"], f"{path}'s forms")
    model = recast_(model, Plan.from_json(header["plan"], f"{path}'s plan"))
    choose_forms_(model, forms)
    return model


def _kwargs(config: ModelConfig, num_classes: int | None) -> dict[str, Any]:
    classes = num_classes if config.num_classes is None else config.num_classes
    values = (classes, config.input_size, config.in_chans)
    return config.kwargs | {key: value for key, value in zip(KWARGS, values, strict=True) if value is not None}


def constructor(config: ModelConfig, *, num_classes: int | None = None) -> dict[str, Any]:
    """Return name and keyword arguments that build the same architecture, as JSON-able data without weights."""
    source, name = split_name(config.name)
    return {"name": name if source == "function" else f"{source}:{name}", "kwargs": _kwargs(config, num_classes)}


def build_from(constructor: Mapping[str, Any], *, trust: bool = False) -> nn.Module:
    """Build the network of a `constructor` with random weights; a function is run as by `build`.

    Raises RecastError as `check_constructor` does.
    """
    source, bare, kwargs = check_constructor(constructor)
    return create(source, bare, kwargs, pretrained=False, trust=trust)


def check_constructor(constructor: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Return (source, name, arguments) of a constructor, as `create` takes them.

    Raises RecastError for anything that is not `{"name": str, "kwargs": {"num_classes": int, "img_size": int,
    "in_chans": int, …}}`, of which every argument may be left out; others are those of `model.kwargs`.
    """
    if not isinstance(constructor, Mapping):
        raise RecastError(
            "constructor must be a name (timm:NAME, torchvision:NAME, pkg.module:function) or "
            f'{{"name": …, "kwargs": …}}, got {shown(constructor)}'
        )
    made = read(Constructor, constructor, "the constructor")
    return (*split_name(made.name), made.kwargs.model_dump(exclude_none=True))


class Arguments(Config):
    """Arguments that a constructor may set; others are JSON, and none reads a file."""

    model_config = ConfigDict(extra="allow")

    num_classes: Classes | None = None
    img_size: Pixels | None = None
    in_chans: Count | None = None

    @model_validator(mode="after")
    def _reads_no_file(self) -> Self:
        as_json(self.model_extra or {})
        return self


class Constructor(Config):
    """The name of a network, and its arguments."""

    name: str
    kwargs: Arguments = Arguments()


@checked
class Images:
    """Images and classes of a saved network."""

    classes: tuple[str, ...] | None = None
    """Names of the outputs, in their order."""
    img_size: tuple[Pixels, Pixels] | None = None
    """(height, width) in pixels."""
    mean: tuple[Finite, ...] | None = None
    """Per channel, as `std`, in [0, 1] pixels."""
    std: tuple[Positive, ...] | None = None

    def __post_init__(self) -> None:
        together = (self.img_size, self.mean, self.std)
        if None in together and together != (None,) * 3:
            raise RecastError("img_size, mean and std belong together, and the network states none: give all three")
        if self.mean is not None and self.std is not None and len(self.mean) != len(self.std):
            raise RecastError(f"mean and std need a number per channel each, got {self.mean} and {self.std}")
        if twice := [name for name, count in Counter(self.classes or ()).items() if count > 1]:
            raise RecastError(f"classes has {shown(twice[0])} twice: give every output its own name")

    @classmethod
    def of(cls, model: nn.Module, **given: Any) -> Images:
        """Return the values `given`, and where they are None those of the network (timm's `pretrained_cfg`)."""
        stated: dict[str, Any] = {"classes": class_names(model)}
        if (defaults := input_defaults(model)) is not None:
            stated |= {"img_size": defaults.size, "mean": defaults.mean, "std": defaults.std}
        return cls(**stated | {key: value for key, value in given.items() if value is not None})

    def built_as(self, config: ModelConfig) -> Images:
        """Return what still holds of a network that is built with another classifier, size or number of channels."""
        classes = None if config.new_head else self.classes
        if self.mean is None or config.in_chans not in (None, len(self.mean)):
            return Images(classes)
        size = self.img_size if config.input_size is None else (config.input_size, config.input_size)
        return Images(classes, size, self.mean, self.std)

    def note_(self, model: nn.Module) -> nn.Module:
        """Write them into the network's `pretrained_cfg`, under timm's keys."""
        cfg: dict[str, Any] = dict(getattr(model, "pretrained_cfg", None) or {})
        if self.classes is not None:
            cfg["label_names"] = self.classes
        if self.img_size is not None and self.mean is not None:
            cfg |= {"input_size": (len(self.mean), *self.img_size), "mean": self.mean, "std": self.std}
        if cfg:
            model.pretrained_cfg = cfg  # type: ignore[assignment]
        return model


def class_names(model: nn.Module) -> tuple[str, ...] | None:
    """Return the names of the outputs from the network's `pretrained_cfg`, if it has them."""
    cfg = getattr(model, "pretrained_cfg", None)
    names = cfg.get("label_names") if isinstance(cfg, Mapping) else None
    return tuple(names) if isinstance(names, list | tuple) else None


class InputDefaults(NamedTuple):
    """Images that a network was trained on."""

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
