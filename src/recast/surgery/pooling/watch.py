"""Watching a network run: in which order its modules finish, what they take and give, and when two answers are one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recast.surgery.pooling.place import Layout

__all__ = [
    "MEANS",
    "Done",
    "Probe",
    "all_comes_through",
    "classifier_of",
    "finished",
    "is_linear",
    "is_one",
    "same",
    "watched",
]

MEANS: dict[Layout, tuple[int, ...]] = {"NCHW": (2, 3), "NHWC": (1, 2), "NLC": (1,)}
"""The dimensions of the positions."""
TOLERANCE = 1e-4
"""Relative difference below which two outputs in single precision are the same."""


@dataclass(frozen=True)
class Done:
    """A module that has finished: what it took first and gave, as they were then."""

    name: str
    module: nn.Module
    input: Tensor
    output: Tensor


def finished(model: nn.Module, example: Tensor) -> list[tuple[str, torch.Size]]:
    """Names of modules in the order in which they finish, with the shapes of their first outputs."""
    order: list[tuple[str, torch.Size]] = []

    def note(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        first = _first(output)
        if first is not None:
            order.append((name, first.shape))

    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_hook(partial(note, name)).remove)
        model(example)
    return order


@contextmanager
def watched(model: nn.Module, names: set[str]) -> Iterator[list[Done]]:
    """Collect what the named modules take and give, in the order in which they finish."""
    seen: list[Done] = []

    def keep(before: list[Tensor | None], _module: nn.Module, inputs: Any) -> None:
        first = _first(inputs)
        before.append(None if first is None else first.clone())  # the module may change it in place

    def note(name: str, before: list[Tensor | None], module: nn.Module, _inputs: Any, output: Any) -> None:
        taken, given = before.pop(), _first(output)
        if taken is not None and given is not None:
            seen.append(Done(name, module, taken, given.clone()))

    with ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name)
            before: list[Tensor | None] = []
            stack.callback(module.register_forward_pre_hook(partial(keep, before)).remove)
            stack.callback(module.register_forward_hook(partial(note, name, before)).remove)
        yield seen


class Probe:
    """What the last linear layer of a network takes: it tells answers apart, also where that layer's own weights are
    zero, as they are at the start of some networks."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.linear = {name for name, module in model.named_modules() if is_linear(module)}

    def __call__(self, run: Callable[[Tensor], Any], x: Tensor) -> tuple[Tensor, list[Done]] | None:
        """(what the last linear layer took, all of them) as `run` is given x; None if it cannot take it."""
        with watched(self.model, self.linear) as seen:
            try:
                given = run(x)
            except (AssertionError, IndexError, RuntimeError, TypeError, ValueError):
                return None
        if not isinstance(given, Tensor) or not (given.is_meta or given.isfinite().all()):
            return None
        return (seen[-1].input if seen else given), seen


@contextmanager
def held(module: nn.Module, output: Tensor) -> Iterator[None]:
    """Let a module give `output`, whatever it takes."""
    handle = module.register_forward_hook(lambda _module, _inputs, _output: output.clone())
    try:
        yield
    finally:
        handle.remove()


def all_comes_through(model: nn.Module, name: str, done: Done, example: Tensor) -> bool:
    """Whether other images give the same answer while the module `name` gives what it gave for these (`done`): then
    nothing goes round it."""
    probe = Probe(model)
    answer = probe(model, example)
    with held(model.get_submodule(name), done.output):
        other = probe(model, 1 - example.flip(-1))
    return answer is not None and other is not None and same(other[0], answer[0])


def classifier_of(tail: list[Done], logits: Tensor) -> str | None:
    """The last linear layer, if what it gives are the logits. Where all of them are zero, the only one of that size."""
    fits = [done for done in tail if done.output.numel() == logits.numel()]
    if not fits or fits[-1] is not tail[-1] or not same(tail[-1].output.flatten(), logits.flatten()):
        return None
    if len(fits) > 1 and not logits.is_meta and not logits.any():
        return None
    return tail[-1].name


def is_linear(module: nn.Module) -> bool:
    """A linear layer, or a 1×1 convolution."""
    return isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1))


def is_one(shape: torch.Size) -> bool:
    """Whether a shape is that of a single position: (B, C), (B, C, 1, 1), (B, 1, 1, C) or (B, 1, C)."""
    if len(shape) == 4:
        return tuple(shape[2:]) == (1, 1) or tuple(shape[1:3]) == (1, 1)
    return len(shape) <= 2 or shape[1] == 1


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers, to `TOLERANCE` of the largest."""
    if a.shape != b.shape:
        return False
    if a.is_meta or b.is_meta:
        return True  # nothing but shapes to go by
    a, b = a.float(), b.float()
    return bool((a - b).abs().max() <= TOLERANCE * b.abs().max())


def _first(values: Any) -> Tensor | None:
    """The tensor that a module takes or gives; the first of several."""
    if isinstance(values, Tensor):
        return values
    return next((v for v in values if isinstance(v, Tensor)), None) if isinstance(values, tuple | list) else None
