"""Outputs of a model: a tensor, or any nest of them, read here for all functions.

A nest is a mapping (a ModelOutput of transformers is one), a list, a tuple, or an object that holds tensors in its
attributes (a dataclass, Instances of detectron2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recast.errors import RecastError

PLAIN = (bool, int, float, complex, str, bytes, type, type(None), torch.dtype, torch.device)


def leaves_of(value: Any, path: str = "", above: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield every leaf of a nest with its path, `['boxes'].t` or `[1]`.

    The type of a mapping, list or object comes before its leaves. Floats and NumPy arrays of numbers come as tensors.
    """
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(np.ascontiguousarray(value))
    elif isinstance(value, float):
        value = torch.tensor(value, dtype=torch.float64)
    inner = None if isinstance(value, (Tensor, *PLAIN)) else _inside(value)
    yield path, value if inner is None else type(value)
    for step, item in inner or () if id(value) not in above else ():
        yield from leaves_of(item, path + step, (*above, id(value)))


def _inside(value: Any) -> list[tuple[str, Any]] | None:
    """Return the items of a mapping, a sequence or an object with their steps; None for other values."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if callable(value):  # a module, a function: no result
        return None
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})
    return [(f".{name}", item) for name, item in held.items()] or None


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a nest, in order."""
    return [leaf for _, leaf in leaves_of(value) if isinstance(leaf, Tensor)]


def answer_of(output: Any) -> Any:
    """Return the answer of a model: the entry or attribute `logits`, else the first of a tuple if it is logits
    (B, classes); the output itself where there is neither, such as the maps of a segmenter or the boxes of a detector.
    """
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor) and output[0].dim() == 2:
        return output[0]
    return output


def logits_of(output: Any, model: nn.Module, wanted: str) -> Tensor:
    """Return the logits (B, classes) of an output. Raises `RecastError`, saying what they are `wanted` for."""
    answer = answer_of(output)
    if isinstance(answer, Tensor) and answer.dim() == 2:
        return answer
    got = tuple(answer.shape) if isinstance(answer, Tensor) else type(output).__name__
    raise RecastError(
        f"{wanted} requires logits (batch, classes), got {got}: wrap {type(model).__name__} in a module that returns "
        "its logits, by themselves, as .logits or first in a tuple"
    )
