"""The likeliest classes of one image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from recast.errors import RecastError


class Ranked(NamedTuple):
    """A class: its number among the outputs, its name and its probability."""

    number: int
    name: str
    probability: float


def ranked(output: Any, classes: Sequence[str] | None, most: int) -> tuple[Ranked, ...]:
    """The likeliest classes, at most `most`; none where the output is not one finite number per class.

    Raises `RecastError` if there are names for another number of classes.
    """
    if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != 1 or not output.isfinite().all():
        return ()
    if classes is not None and len(classes) != output.shape[1]:
        raise RecastError(f"{len(classes)} names of classes for a network with {output.shape[1]} outputs")
    found = output.float().softmax(1)[0].topk(min(most, output.shape[1]))
    return tuple(
        Ranked(i, str(i) if classes is None else classes[i], p)
        for i, p in zip(found.indices.tolist(), found.values.tolist(), strict=True)
    )


def percent(probability: float) -> str:
    """ "61 %", "3.2 %"."""
    return f"{100 * probability:.{0 if probability >= 0.0995 else 1}f} %"
