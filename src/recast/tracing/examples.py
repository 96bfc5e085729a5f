"""Inputs of a model: what an example is, for all functions.

An example is a tensor (B, C, H, W), a tuple of positional arguments, a mapping of keyword arguments, or a list of
images (C, H, W) or of mappings that hold one each, as detectors take them.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from recast.errors import RecastError, first_line, shown
from recast.tracing.outputs import tensors_of

Example = Tensor | tuple[Any, ...] | Mapping[str, Any] | list[Any]
"""Input of a model in one call, for `plan` and `verify`."""


def arguments_of(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments of an example."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}


def copied(example: Any) -> Any:
    """Return an example with copies of its tensors."""
    return tree_map_only(Tensor, Tensor.clone, example)


def run_example(model: nn.Module, example: Example) -> Any:
    """Run `model` on a copy of an example, which a model may overwrite. Raises `RecastError` if that fails."""
    check_not_lazy(model)
    args, kwargs = copied(arguments_of(example))
    # hooks inside a compiled part would not be called, and fake tensors cannot compile
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        # torch warns of the module hooks that a plan counts operations with
        warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
        try:
            return model(*args, **kwargs)
        except RecastError:
            raise
        except Exception as error:  # whatever a model does with what it does not know
            shapes = tree_map_only(Tensor, lambda t: tuple(t.shape), kwargs or example)
            raise RecastError(
                f"{type(model).__name__} cannot run on the example {shown(shapes)}{_cure(model, example)}: "
                f"{first_line(error)}"
            ) from error


def _cure(model: nn.Module, example: Any) -> str:
    """Return what to do about an example that a model cannot run on, in brackets, where its form tells."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    if not isinstance(example, Tensor):
        cures = {"ndarray": "torch.from_numpy(images)", "DataLoader": "next(iter(loader))[0]"}
        return f" (pass {cures[kind]})" if (kind := type(example).__name__) in cures else ""
    if example.dim() == 3:
        return " (for one image pass image[None])"
    if example.dim() == 4 and example.shape[-1] in (1, 3, 4) and example.shape[1] not in (1, 3, 4):
        return " (channels come second: images.permute(0, 3, 1, 2))"
    if not example.is_floating_point():
        return " (whole numbers: pass images.float() / 255, normalised)"
    return f" (the weights are {dtype}: images.to({dtype}))" if dtype not in (None, example.dtype) else ""


def batch_of(example: Example) -> int:
    """Count the images in an example.

    Of a list of images (C, H, W), or of mappings that hold one each, its length; else the first dimension of the
    tensor with four axes (of several the largest), whatever comes before it; without one, of that with the most axes.
    Raises `RecastError` where there is none.
    """
    args, kwargs = arguments_of(example)
    images = next((value for value in (*args, *kwargs.values()) if is_image_list(value)), None)
    return images_of(example).shape[0] if images is None else len(images)


def images_of(example: Example) -> Tensor:
    """Return the tensor of an example that `batch_of` counts. Raises `RecastError` if there is none."""
    tensors = [tensor for tensor in tensors_of(arguments_of(example)) if tensor.dim() > 0]
    if not tensors:
        raise RecastError(f"the example holds no tensor: expected a batch of images, got {shown(example)}")
    largest = max(tensors, key=lambda tensor: (tensor.dim() == 4, tensor.dim(), tensor.numel()))
    if not largest.numel():
        raise RecastError(f"the example holds no image: expected one or more, got {tuple(largest.shape)}")
    return largest


def part_of(example: Example, index: slice | Tensor) -> Example:
    """Return the images `index` of an example, and the same rows of tensors with a row for each image."""
    count = batch_of(example)
    rows = lambda tensor: tensor[index] if tensor.dim() and len(tensor) == count else tensor  # noqa: E731
    part: Example = tree_map_only(Tensor, rows, dict(example) if isinstance(example, Mapping) else example)
    return part


def is_image_list(value: object) -> bool:
    """True for a list of images, as detectors take them: tensors of up to three axes, or mappings that hold such."""
    if not isinstance(value, list | tuple) or not value:
        return False
    images = [tensors_of(item) if isinstance(item, Tensor | Mapping) else [] for item in value]
    return all(tensors and max(t.dim() for t in tensors) in (2, 3) for tensors in images)


def check_values(example: Example, *models: nn.Module) -> None:
    """Raise `RecastError` for an example without images, with NaN, images or models on the meta device, lazy layers."""
    batch_of(example)
    if any(tensor.is_meta for tensor in tensors_of(arguments_of(example))):
        raise RecastError("the images are on the meta device, without values: pass real images")
    if not images_of(example).isfinite().all():
        raise RecastError("the images hold NaN or infinity: check how they are read and normalised")
    for model in models:
        check_weights(model)


def check_weights(model: nn.Module) -> None:
    """Raise `RecastError` for a model with weights on the meta device, or lazy layers that never ran."""
    check_not_lazy(model)
    if missing := next((name for name, tensor in _named_tensors(model) if tensor.is_meta), None):
        raise RecastError(f"{missing} is on the meta device, without values: load the model's weights first")


def check_not_lazy(model: nn.Module) -> None:
    """Raise `RecastError` for a model with lazy layers that never ran."""
    if lazy := next((name for name, tensor in _named_tensors(model) if is_lazy(tensor)), None):
        raise RecastError(f"the model has lazy layers, whose weights have no shape yet ({lazy}): run it once first")


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return itertools.chain(model.named_parameters(), model.named_buffers())
