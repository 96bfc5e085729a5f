"""Saving and loading: one safetensors file that holds the weights, how to build the parent, and the plan.

Loading a recast model = build the parent, replay the plan, load the weights. No pickle is written or read.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from recast.config import read, typed
from recast.errors import RecastError, shown
from recast.files import check_place, free_space, replaced
from recast.layers.cmhsa import RecastLayer
from recast.models.build import KWARGS, Images, build_from, check_constructor, replayed
from recast.models.checksum import checksum
from recast.models.sources import check_registered
from recast.models.trust import may_run
from recast.models.weights import CHECKSUM, HEADER, load_weights_, mismatch, read_header, read_safetensors
from recast.names import modules_by_name, plain_name
from recast.surgery.chosen_forms import chosen_forms
from recast.surgery.folding.forms import as_it_is, last_of
from recast.surgery.plan import plan_of
from recast.surgery.rules import is_convolution
from recast.surgery.wrappers import unwrapped
from recast.tracing.examples import check_weights


@typed("model", "path", "classes", "mean", "std")
def save(
    model: nn.Module,
    path: str | Path,
    constructor: str | dict[str, Any] | None = None,
    *,
    classes: Sequence[str] | None = None,
    img_size: int | tuple[int, int] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Path:
    """Write a model (recast or plain) to one `.safetensors` file, with its plan and constructor.

    The file also holds the choices of `tune_`, which `load` restores on a processor or GPU of the same name. An
    existing file is replaced only by a complete one.

    Args:
        model: the network, in any wrapper of torch or timm.
        path: the file, .safetensors.
        constructor: how to build the parent: a name (timm:NAME or NAME, torchvision:NAME, upernet:NAME and the like,
            pkg.module:function), or {"name": …, "kwargs": {"num_classes": …}}. Without it, `load` needs the parent. It
            is tried here: it must build a network with this model's weights. A function is called only if its module
            is imported already.
        classes: names of the outputs.
        img_size: side, or (height, width), of the images in pixels.
        mean, std: the normalisation per channel, in [0, 1] pixels. All of these default to what the network states in
            `pretrained_cfg`, as timm's do. `load` states them there, for `explain` and `export`.

    Returns:
        The path.

    Raises:
        RecastError: for another suffix, a constructor of another network, classes that repeat or are not as many as the
            outputs of timm's classifier, and a file that cannot be written.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> recast.save(model, "model.safetensors").name
        'model.safetensors'
    """
    size = (img_size, img_size) if isinstance(img_size, int) else img_size
    images = Images.of(unwrapped(model), classes=classes, img_size=size, mean=mean, std=std)
    if classes is not None:
        _check_classes(unwrapped(model), classes)
    return write_model(model, path, constructor, images)


def write_model(
    model: nn.Module, path: str | Path, constructor: str | dict[str, Any] | None, images: Images, *, tried: bool = True
) -> Path:
    """Save a model with the `images` given; with `tried` the constructor is tested."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise RecastError(f"save writes .safetensors, got {path.name}")
    if constructor is not None:
        constructor = {"name": constructor} if isinstance(constructor, str) else constructor
        check_registered(*check_constructor(constructor)[:2])
    model = unwrapped(model)  # a wrapper has names of its own
    check_weights(model)
    header: dict[str, Any] = {"constructor": constructor, "plan": _plan_as_it_is(model)}
    if images != Images():
        header["images"] = asdict(images)
    if (forms := chosen_forms(model)) is not None:
        header["forms"] = asdict(forms)
    tensors = _unshared_tensors(model)
    if constructor is not None and tried:
        _try_constructor(header, tensors, model)
    with suppress(OSError):  # `check_place` says what is wrong
        path.parent.mkdir(parents=True, exist_ok=True)
    check_place(path, "path", "model.safetensors")
    metadata = {"format": "pt", HEADER: json.dumps(header)}
    metadata[CHECKSUM] = checksum(metadata[HEADER], tensors)
    with replaced(path) as temporary:
        try:
            save_file(tensors, temporary, metadata=metadata)
        except SafetensorError as error:  # of a full disk too
            raise RecastError(f"cannot write {path}: {error}; its disk has {free_space(path.parent)} left") from None
    return path


def _check_classes(model: nn.Module, classes: Sequence[str]) -> None:
    """Raise `RecastError` for more or fewer names than the classifier has outputs, if it is known."""
    classifier = getattr(model, "get_classifier", lambda: None)()  # of timm's networks
    outputs = getattr(classifier, "out_features", len(classes))
    if outputs != len(classes):
        raise RecastError(f"classes has {len(classes)} names, but the classifier has {outputs} outputs")
    if not any(p.dim() and len(p) == len(classes) for p in model.parameters()):
        raise RecastError(f"classes has {len(classes)} names, but no layer of the network has as many outputs")


def _plan_as_it_is(model: nn.Module) -> str | None:
    """Return the JSON of a recast model's plan, for its layers as they are now; None for a plain model."""
    plan, layers = plan_of(model), modules_by_name(model)
    if plan is None:
        return None
    for step in plan.steps:
        layer = layers.get(step.name)
        if step.fold is not None and step.fold.batch_norm:
            raise RecastError(
                f"{step.fold.batch_norm} was multiplied into {step.name}, which its parent is not: save before "
                "fold_(batch_norm=True), or export"
            )
        if isinstance(layer, RecastLayer) and (foreign := layer.foreign_state()):
            raise RecastError(
                f"{step.name} got {foreign[0]} after it was recast, which load cannot rebuild: call "
                "torch.nn.utils.prune.remove or parametrize.remove_parametrizations first, or merge the adapter"
            )
        if layer is None or not is_convolution(last_of(layer)):
            raise RecastError(
                f"{step.name} was recast and is not a recast layer or a convolution any more: the plan is another "
                "network's"
            )
    return replace(plan, steps=tuple(as_it_is(layers[step.name], step) for step in plan.steps)).to_json()


def _unshared_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the state on the CPU; safetensors rejects two tensors that share memory."""
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in model.state_dict().items():
        name = plain_name(name)
        if is_traceable_wrapper_subclass(tensor):
            raise RecastError(
                f"{name} is a {type(tensor).__name__}, not a plain tensor: save before quantizing or sharding"
            )
        tensor = tensor.detach().cpu().contiguous()
        tensors[name] = tensor.clone() if tensor.untyped_storage().data_ptr() in storages else tensor
        storages.add(tensor.untyped_storage().data_ptr())
    return tensors


def _try_constructor(header: dict[str, Any], tensors: dict[str, Tensor], model: nn.Module) -> None:
    """Raise RecastError unless the constructor in `header` builds a network that takes `tensors`."""
    source, name, _ = check_constructor(header["constructor"])
    if source == "function" and not may_run(name) and (module := name.partition(":")[0]) not in sys.modules:
        package = module.partition(".")[0]
        if find_spec(package) is None and PathFinder.find_spec(package, [os.getcwd()]) is None:
            raise RecastError(f"constructor {shown(name)}: there is no module {package}, so load could not build it")
        return  # importing it may do anything: a script's module would run the script again
    with torch.random.fork_rng(devices=[]):
        header = {"forms": {}, **header}
        built = replayed(build_from(header["constructor"], trust=True), header, "the model")
    if reason := mismatch(built, tensors):
        raise RecastError(
            f"constructor {shown(header['constructor'])} builds another network than this {type(model).__name__}: "
            f"{reason}. Set its kwargs ({', '.join(KWARGS)}), or leave it out and load with parent="
        )


@typed("path", "parent", "trust")
def load(path: str | Path, parent: nn.Module | None = None, *, trust: bool = False) -> nn.Module:
    """Load a saved model, in eval mode.

    Its `pretrained_cfg` states images and classes of the file under timm's keys: input_size, mean, std, label_names.

    Args:
        path: a file of `save`.
        parent: used instead of the saved constructor; it is copied, never changed.
        trust: call a `pkg.module:function` that the file names as its constructor.

    Returns:
        The model.

    Raises:
        RecastError: before any weight is loaded, if the file is truncated or foreign, if it has no constructor and no
            `parent` is given, or if its tensors do not fit the model.

    Example:
        >>> parent = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> images = torch.randn(2, 3, 8, 8)
        >>> child = recast.recast_(copy.deepcopy(parent), recast.plan(parent, images)).eval()
        >>> path = recast.save(child, "child.safetensors")
        >>> torch.equal(recast.load(path, parent)(images), child(images))
        True
    """
    path = Path(path)
    header = read_header(path)
    if parent is None:
        if header["constructor"] is None:
            raise RecastError(f"{path} has no constructor: pass its parent, load(path, parent=model)")
        model = build_from(header["constructor"], trust=trust)
    else:
        parent = unwrapped(parent)
        check_weights(parent)
        # torch cannot copy what a hook computed (the older weight_norm): cut it off its graph
        computed = (v for m in parent.modules() for v in vars(m).values() if isinstance(v, Tensor) and not v.is_leaf)
        model = copy.deepcopy(parent, {id(tensor): tensor.detach().clone() for tensor in computed})
    model = replayed(model, header, path)
    load_weights_(model, read_safetensors(path), path)
    read(Images, header["images"] or {}, f"{path}'s images").note_(model)
    return model.eval()
