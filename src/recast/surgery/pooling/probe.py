"""Probe a network from outside: inputs and outputs of its modules, and dependencies of its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from recast.tracing.examples import Example, run_example
from recast.tracing.hooks import hooked, named, replaced_output
from recast.tracing.outputs import answer_of, logits_of

TOLERANCE = 1e-4
"""Relative difference below which two outputs in single precision are the same."""


@dataclass(frozen=True)
class ModuleCall:
    """A call of a module: what it took first and what it gave, as they were then."""

    name: str
    module: nn.Module
    input: Tensor
    output: Tensor


class Probe:
    """A network, what it gives for images, and the names of its modules in the order in which they finish, with the
    shapes of their first outputs."""

    def __init__(self, model: nn.Module, example: Example) -> None:
        self.model, self.example, self.kind = model, example, type(model).__name__
        self.modules = dict(model.named_modules())
        self.linear = [
            name
            for name, m in self.modules.items()
            if isinstance(m, nn.Linear) or (isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1))
        ]
        self.order: list[tuple[str, torch.Size]] = []

        def note(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
            first = _first(output)
            if first is not None:
                self.order.append((name, first.shape))

        with hooked(self.modules.items(), after=note):
            self.logits = logits_of(run_example(model, example), model, "attention pooling")

    def run(self, example: Example) -> Any:
        """Return the answer of the network."""
        return answer_of(run_example(self.model, example))

    def watch(self, names: Iterable[str]) -> list[ModuleCall]:
        """Return inputs and outputs of the named modules, in the order in which they finish."""
        with _watched(named(self.model, names)) as calls:
            self.run(self.example)
        return calls

    def probe(self, run: Callable[[Any], Any], x: Any) -> tuple[Tensor, list[ModuleCall]] | None:
        """Return (input of the last linear layer, all of them) of `run(x)`; None if it fails.

        What that layer takes tells answers apart also where its own weights are zero, as those of some networks are.
        """
        with _watched(named(self.model, self.linear)) as calls:
            try:
                given = run(x)
            except (AssertionError, IndexError, RuntimeError, TypeError, ValueError):
                return None
        if not isinstance(given, Tensor) or not (given.is_meta or given.isfinite().all()):
            return None
        return (calls[-1].input if calls else given), calls

    @cached_property
    def answer(self) -> tuple[Tensor, list[ModuleCall]] | None:
        """`probe` of the network itself on its example."""
        return self.probe(self.run, self.example)

    def answer_if(self, module: nn.Module, given: Tensor, x: Example) -> tuple[Tensor, list[ModuleCall]] | None:
        """Return `probe` of the network on x, with `given` as the output of a module."""
        with replaced_output(module, lambda _: given.clone()):
            return self.probe(self.run, x)

    def all_comes_through(self, call: ModuleCall) -> bool:
        """Return True if the answer depends on the images through this module only.

        Other images must give the same answer while the module repeats its output.
        """
        images = tree_map_only(Tensor, lambda x: 1 - x.flip(-1) if x.dim() == 4 else x, self.example)
        other = self.answer_if(call.module, call.output, images)
        return self.answer is not None and other is not None and same(other[0], self.answer[0])

    def classifier(self, tail: list[ModuleCall]) -> str | None:
        """Return the last linear layer if its output is the logits; if all are zero, the only one of that size."""
        fits = [call for call in tail if call.output.numel() == self.logits.numel()]
        if not fits or fits[-1] is not tail[-1] or not same(tail[-1].output.flatten(), self.logits.flatten()):
            return None
        if len(fits) > 1 and not self.logits.is_meta and not self.logits.any():
            return None
        return tail[-1].name


@contextmanager
def _watched(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[list[ModuleCall]]:
    calls: list[ModuleCall] = []
    taken: list[Tensor | None] = []  # calls end in the reverse of the order in which they begin

    def before(_name: str, _module: nn.Module, inputs: Any) -> None:
        first = _first(inputs)
        taken.append(None if first is None else first.clone())  # the module may change it in place

    def after(name: str, module: nn.Module, _inputs: Any, output: Any) -> None:
        x, y = taken.pop(), _first(output)
        if x is not None and y is not None:
            calls.append(ModuleCall(name, module, x, y.clone()))

    with hooked(modules, before, after):
        yield calls


def is_one(shape: torch.Size) -> bool:
    """Return True for the shape of a single position: (B, C), (B, C, 1, 1), (B, 1, 1, C) or (B, 1, C)."""
    if len(shape) == 4:
        return tuple(shape[2:]) == (1, 1) or tuple(shape[1:3]) == (1, 1)
    return len(shape) <= 2 or shape[1] == 1


def same(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors are equal to `TOLERANCE` of the largest number."""
    if a.shape != b.shape:
        return False
    if a.is_meta or b.is_meta:
        return True  # nothing but shapes to go by
    a, b = a.float(), b.float()
    return bool((a - b).abs().max() <= TOLERANCE * b.abs().max())


def _first(values: Any) -> Tensor | None:
    """Return the tensor that a module takes or gives; the first of several."""
    several = values if isinstance(values, tuple | list) else (values,)
    return next((value for value in several if isinstance(value, Tensor)), None)
