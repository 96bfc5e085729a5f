"""Compare the outputs of two networks: pairs of tensors, predictions, and relative errors of channels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from recast.errors import RecastError
from recast.tracing.outputs import PLAIN, answer_of, leaves_of

OUTLIER = 10
"""A channel that is this many times larger than the median one is no measure for the others."""


def paired_tensors(output: Any, expected: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the tensors of two outputs in pairs, by their path.

    Raises `RecastError` unless both are nests of one kind, with tensors of the same types (maps may differ in size,
    logits may not) and equal other values in the same places.
    """
    actual, reference = dict(leaves_of(output)), dict(leaves_of(expected))
    same_paths = actual.keys() == reference.keys()

    def alike(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.dtype == b.dtype and a.dim() == b.dim() and (a.dim() > 2 or a.shape[1:] == b.shape[1:])
        return type(a) is type(b) and bool(a == b)

    for path, value in reference.items() if same_paths else ():
        if not isinstance(value, (Tensor, *PLAIN)) and not alike(actual[path], value):
            kind = type(value).__name__
            raise RecastError(f"cannot compare output{path}, a {kind}: return tensors, or objects that hold tensors")
    both = {path: (actual.get(path), b) for path, b in reference.items()}
    pairs = {path: (a, b) for path, (a, b) in both.items() if isinstance(a, Tensor) and isinstance(b, Tensor)}
    if not pairs or not same_paths or not all(alike(actual[path], b) for path, b in reference.items()):
        kinds = (tree_map_only(Tensor, _kind, o) for o in (expected, output))
        raise RecastError("parent and child return different kinds of output: {!r:.80} and {!r:.80}".format(*kinds))
    return pairs


def _kind(x: Tensor) -> str:
    """Return dtype and shape as text, `float32 (2, 10)`."""
    return f"{x.dtype} {tuple(x.shape)}".removeprefix("torch.")


def equal_predictions(output: Any, expected: Any, tensors: dict[str, tuple[Tensor, Tensor]], images: int) -> Tensor:
    """Return whether each image (or pixel) has the same argmax in both; no element if there are no classes."""
    first, reference = answer_of(output), answer_of(expected)
    if not isinstance(first, Tensor) or not isinstance(reference, Tensor):
        first, reference = next(iter(tensors.values()))
    # detectors return a dictionary of boxes per image, with no classes in its first tensor
    boxes = isinstance(expected, list) and any(isinstance(item, dict) for item in expected)
    if boxes or first.shape != reference.shape or first.dim() < 2 or len(first) != images:
        return torch.zeros(0)
    return first.argmax(1) == reference.argmax(1)


def relative_error(a: Tensor, b: Tensor, ranges: Tensor | None = None) -> float:
    """Return max|a − b| of the worst channel over its scale (`worst_channel`)."""
    return worst_channel(a, b, ranges)[0]


def worst_channel(a: Tensor, b: Tensor, ranges: Tensor | None = None) -> tuple[float, int | None]:
    """Return the largest relative error of a channel, and the channel; infinite for values that are not finite.

        error_c = max|a_c − b_c| / max(r_c, min(max r, 10 · median r))        r_c = max|b_c|, or `ranges` (channels,)

    Channels are dimension 1 (classes, maps), or the last dimension (tokens, NHWC); both are compared. An error is
    relative to its channel's own range, so that a channel of 1e7 hides no other. Rounding depends on the size of the
    summands, not of the sum: a dead class whose terms cancel to 0 is compared with the largest channel, unless that is
    an outlier. A tensor without channels is one channel.
    """
    if a.shape != b.shape or not (a.isfinite().all() and b.isfinite().all()):
        return math.inf, None
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0, None
    if not all(t.is_floating_point() or t.is_complex() for t in (a, b)):
        a, b = a.cpu().double(), b.cpu().double()
    tiny, candidates = torch.finfo(b.dtype).tiny, []
    for axis in sorted({1, b.dim() - 1}) if b.dim() > 1 else (None,):
        errors, sizes = (
            t.abs().movedim(axis or 0, 0).reshape(1 if axis is None else t.shape[axis], -1).amax(1) for t in (a - b, b)
        )
        if ranges is not None and axis == 1:
            sizes = ranges.to(sizes)
        alive = sizes[sizes > 0]
        floor = torch.minimum(sizes.max(), OUTLIER * alive.median()) if len(alive) else sizes.max()
        worst, channel = (errors / sizes.clamp_min(floor).clamp_min(tiny)).max(0)
        candidates.append((float(worst), int(channel) if axis == 1 else None))
    return max(candidates, key=lambda pair: pair[0])
