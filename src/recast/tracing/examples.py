"""Inputs of a model: the readers of examples and batches for all functions.

An example is a tensor (B, C, H, W), a tuple of positional arguments, a mapping of keyword arguments, or a list of
images (C, H, W) or of mappings that hold one each, as detectors take them. A list of batches, or a loader, holds
examples or pairs (example, labels).
"""

from __future__ import annotations

import inspect
import itertools
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from recast.errors import RecastError, blamed, first_line, shown
from recast.tracing.outputs import tensors_of

Example = Tensor | tuple[Any, ...] | Mapping[str, Any] | list[Any]
"""Input of a model in one call, for `plan` and `verify`."""


def arguments_of(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments of an example."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}


def run_example(model: nn.Module, example: Example) -> Any:
    """Run `model` on an example. Raises `RecastError`, naming the shapes, if that fails."""
    check_not_lazy(model)
    args, kwargs = arguments_of(example)
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
            kind = type(model).__name__
            hint = " (for one image pass image[None])" if isinstance(example, Tensor) and example.dim() == 3 else ""
            raise RecastError(f"{kind} cannot run on the example {shown(shapes)}{hint}: {first_line(error)}") from error


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
    """Raise `RecastError` for an example without images, images or models on the meta device, and lazy layers."""
    batch_of(example)
    if any(tensor.is_meta for tensor in tensors_of(arguments_of(example))):
        raise RecastError("the images are on the meta device, without values: pass real images")
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
        kind = type(model).__name__
        raise RecastError(f"{kind} has lazy layers, whose weights have no shape yet ({lazy}): run it once first")


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return itertools.chain(model.named_parameters(), model.named_buffers())


def read_batches(model: nn.Module, data: Any) -> Iterator[tuple[Example, Any]]:
    """Yield the batches in `data` as (example, labels) pairs; missing labels are None.

    A tensor, a tuple, a mapping and a list of images (C, H, W) are one example. A list or loader of others holds
    batches, each an example or a pair (example, labels). A pair is read as the arguments of the network only where
    `model` takes two and the second is no tensor of whole numbers; a tuple of batches (`images.split(64)`) is read as
    a list where `model` requires one argument.
    """
    fewest, most = _arity(model)
    is_split = isinstance(data, tuple) and len(data) > 1 and fewest < 2
    if is_split and all((isinstance(t, Tensor) and t.dim() == 4) or _has_labels(t, fewest, most) for t in data):
        data = list(data)
    is_example = isinstance(data, Tensor | tuple | Mapping) or is_image_list(data)
    if isinstance(data, list) and _has_labels(data, fewest, most) and isinstance(data[0], Tensor):
        labels = data[1]  # one batch as a loader of torch yields it, else two batches of images
        is_example = isinstance(labels, Tensor) and not labels.is_floating_point() and labels.dim() < data[0].dim()
    with blamed("reading the batches"):  # what a generator of the user's raises
        for batch in [data] if is_example else data:
            yield (batch[0], batch[1]) if _has_labels(batch, fewest, most) else (batch, None)


def _has_labels(batch: Any, fewest: int, most: float) -> bool:
    """Return True for a pair (example, labels), given to a network of `fewest` to `most` arguments."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        return False
    first, second = batch
    if isinstance(first, tuple | Mapping):
        return isinstance(second, Tensor)
    if fewest > 1:
        return False
    if isinstance(second, Tensor):
        return not second.is_floating_point() or (most < 2 and not is_image_list([first, second]))
    return most < 2


def _arity(model: nn.Module) -> tuple[int, float]:
    """Return the numbers of positional arguments that a model requires, and takes at most."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # a scripted module
        return 1, 1
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    is_open = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return sum(p.default is p.empty for p in positional), math.inf if is_open else len(positional)
