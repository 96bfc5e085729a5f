"""Batches of examples, with labels or without, from a tensor, a list or a loader."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from recast.errors import errors_in
from recast.tracing.examples import Example, is_image_list


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
    with errors_in("reading the batches"):  # what a generator of the user's raises
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
