"""Networks that pool in code, not in a module: in timm's heads, or after an nn.Sequential."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from recast.errors import RecastError
from recast.surgery.pooling.place import Layout, Place
from recast.surgery.pooling.watch import MEANS, Probe, all_comes_through, classifier_of, is_one, same, watched

__all__ = ["find_after_sequential", "find_in_head"]

TRIED = 6
"""How many of the last nn.Sequential are looked at."""
MAX_PREFIX = 16
"""More tokens than this before those of the patches are no class, distillation or register tokens."""


def find_in_head(model: Any, example: Tensor, logits: Tensor) -> Place | None:
    """A network of timm whose `forward_head` pools: it gets a single position instead, in the layout of its features.

    None if it has no such head, or one that cannot take a single position.
    """
    try:
        x = model.forward_features(example)
        if isinstance(x, tuple | list) and same(model.forward_head(x), logits):
            raise RecastError(
                f"{type(model).__name__} pools {len(x)} maps or sets of tokens for one answer: there is no one place "
                "for attention pooling"
            )
        if not isinstance(x, Tensor) or not same(model.forward_head(x), logits):
            return None
    except (AttributeError, TypeError, NotImplementedError):
        return None
    if x.dim() not in (3, 4) or is_one(x.shape):
        return None
    probe = Probe(model)
    answer = probe(model.forward_head, x)
    if answer is None:
        return None
    expected, tail = answer
    classifier = classifier_of(tail, logits)
    layouts, prefixes = _forms(model, x)
    for layout in layouts:
        for prefix in prefixes:
            found = probe(model.forward_head, _single(x, layout, prefix))
            if found is not None and same(found[0], expected):
                return _place(x, layout, prefix, classifier, averages=True)
    # the head reads the class token, or pools otherwise: it takes the pooled position all the same
    width = getattr(model, "num_features", None)
    layout = next((form for form in layouts if _channels(x, form) == width), layouts[0])
    found = probe(model.forward_head, _single(x, layout, prefixes[0]))
    if found is None or found[0].shape != expected.shape:
        return None
    return _place(x, layout, prefixes[0], classifier, averages=False)


def _place(x: Tensor, layout: Layout, prefix: int, classifier: str | None, averages: bool) -> Place:
    dim = _channels(x, layout)
    positions = x[0].numel() // dim - prefix
    return Place("head", "", dim, layout, layout, prefix, classifier, averages, positions=positions)


def _single(x: Tensor, layout: Layout, prefix: int) -> Tensor:
    """The mean over positions, as one position; of tokens also in the place of those before the patches."""
    one = x[:, prefix:].mean(MEANS[layout], keepdim=True)
    return one.expand(-1, prefix + 1, -1) if layout == "NLC" else one


def _channels(x: Tensor, layout: Layout) -> int:
    return x.shape[1 if layout == "NCHW" else -1]


def _forms(model: Any, x: Tensor) -> tuple[list[Layout], list[int]]:
    """Layouts and numbers of leading tokens that features may have, the likeliest first."""
    if x.dim() == 4:
        return ["NCHW", "NHWC"], [0]
    told = getattr(model, "num_prefix_tokens", None)
    patches = getattr(getattr(model, "patch_embed", None), "num_patches", None)
    derived = x.shape[1] - patches if isinstance(patches, int) else None
    likely = [n for n in (told, derived) if isinstance(n, int) and 0 <= n <= min(MAX_PREFIX, x.shape[1] - 1)]
    return ["NLC"], list(dict.fromkeys([*likely, 0]))


def find_after_sequential(
    model: nn.Module, example: Tensor, order: list[tuple[str, torch.Size]], logits: Tensor
) -> Place | None:
    """An nn.Sequential whose map may be averaged, after a ReLU or not, and the network's answer stays what it is."""
    modules, probe = dict(model.named_modules()), Probe(model)
    answer = probe(model, example)
    names = [n for n, shape in order if isinstance(modules[n], nn.Sequential) and len(shape) == 4 and not is_one(shape)]
    for name in list(dict.fromkeys(reversed(names)))[:TRIED]:
        for relu in (False, True):
            shapes: list[torch.Size] = []
            with _averaged(modules[name], relu, shapes):
                found = probe(model, example)
            if found is None or answer is None or len(shapes) != 1 or not same(found[0], answer[0]):
                continue
            with watched(model, {name}) as seen:
                model(example)
            if all_comes_through(model, name, seen[-1], example):
                classifier, positions = classifier_of(found[1], logits), shapes[0][2:].numel()
                dim = shapes[0][1]
                return Place("append", name, dim, "NCHW", "NCHW", 0, classifier, relu=relu, positions=positions)
    return None


@contextmanager
def _averaged(module: nn.Module, relu: bool, shapes: list[torch.Size]) -> Iterator[None]:
    """Give the mean over positions instead of a module's map, after a ReLU or not."""

    def average(_module: nn.Module, _inputs: Any, output: Any) -> Tensor | None:
        if not isinstance(output, Tensor) or output.dim() != 4:
            return None
        shapes.append(output.shape)
        return (output.relu() if relu else output).mean((2, 3), keepdim=True)

    handle = module.register_forward_hook(average)
    try:
        yield
    finally:
        handle.remove()
