"""Shapes and costs of every layer for an example, without computing: a pass over fake tensors.

A fake tensor has a shape, a dtype and a device but no memory, so a pass over a network of any size takes milliseconds a
layer and never changes a running statistic.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from recast.errors import RecastError
from recast.modes import data_of, in_eval
from recast.tracing.cost import saved_sizes
from recast.tracing.examples import Example, batch_of, check_not_lazy, run_example
from recast.tracing.hooks import hooked, named


@dataclass(frozen=True)
class Call:
    """One use of a layer: shapes of its first input and of its output, batch included."""

    input: tuple[int, ...]
    output: tuple[int, ...]
    num_arguments: int = 1


@dataclass(frozen=True)
class Observation:
    """Result of a pass: calls of every watched layer in the order of first use, and costs per image."""

    calls: dict[str, list[Call]]
    batch: int
    macs: int
    activation_bytes: int
    by_class: frozenset[str] = frozenset()
    """Layers that are called otherwise if they are of another class: the network asks for it (`isinstance`)."""
    note: str = ""
    """What follows for the costs if fake tensors failed, and one real pass in eval mode was made instead."""


def copy_with(model: nn.Module, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """Copy `model`, with its tensors converted (to fake ones, to the meta device) before they are copied."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        # the older weight_norm keeps the computed weight as a plain attribute
        plain = (value for value in vars(module).values() if isinstance(value, Tensor))
        for tensor in chain(module._parameters.values(), module._buffers.values(), plain):
            if tensor is not None and id(tensor) not in memo:
                is_parameter = isinstance(tensor, nn.Parameter)
                new = convert(tensor.clone() if tensor.is_inference() else tensor if is_parameter else tensor.detach())
                if is_parameter and not isinstance(new, nn.Parameter):  # `from_tensor` makes parameters, and faster
                    new = nn.Parameter(new.detach(), False)
                memo[id(tensor)] = new.requires_grad_(is_parameter and tensor.is_floating_point())
    return copy.deepcopy(model, memo)


def on_meta(module: nn.Module) -> nn.Module:
    """Copy a module to the meta device, without values."""
    return copy_with(module, lambda tensor: tensor.to("meta"))


def observe(
    model: nn.Module, example: Example, names: set[str], edit: Callable[[nn.Module], None] | None = None
) -> Observation:
    """Run the example through a fake copy of `model` and note what the named layers see; `model` itself is only read.

    `edit` may change the copy first. Where fake tensors fail, one real pass in eval mode is made, and the observation
    says so. Raises `RecastError` if that fails too: the example does not fit the model.
    """
    batch, mode = batch_of(example), FakeTensorMode(allow_non_fake_inputs=True)
    check_not_lazy(model)
    tensors = (*model.named_parameters(), *model.named_buffers())
    if odd := next((n for n, t in tensors if t.layout != torch.strided or t.is_quantized or t.is_nested), None):
        raise RecastError(f"{odd} is sparse, quantized or nested: convert it to a dense tensor before")
    log = logging.getLogger(FakeTensorMode.__module__)  # it prints what fails, with the whole traceback
    was_off, log.disabled = log.disabled, True
    try:
        with suppress(Exception), torch.inference_mode(False):  # whatever a model does that fake tensors cannot follow
            # outside the mode: tensors in places that are no parameter or buffer (a list of anchors) are copied as is
            subject = copy_with(model, mode.from_tensor)
            with mode:
                fakes = tree_map_only(Tensor, mode.from_tensor, example)
                return _run(subject, fakes, batch, names, edit)
    finally:
        log.disabled = was_off
    with _all_trained(model):
        copied = edit or any(p.is_inference() for p in model.parameters())  # of those nothing is kept for a gradient
        observed = _run(copy_with(model, Tensor.clone) if copied else model, example, batch, names, edit)
    note = "costs are those of this example: where sizes depend on its values (a detector's boxes), others differ"
    return replace(observed, note=note)


@contextmanager
def _all_trained(model: nn.Module) -> Iterator[None]:
    """Let every floating-point parameter require a gradient, so that frozen ones count as in a fake pass."""
    frozen = [p for p in model.parameters() if p.is_floating_point() and not p.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _run(
    model: nn.Module, example: Example, batch: int, names: set[str], edit: Callable[[nn.Module], None] | None
) -> Observation:
    if edit:
        edit(model)
    calls: dict[str, list[Call]] = {}

    def note(name: str, _module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor) and inputs and isinstance(inputs[0], Tensor):  # not a sequence of several maps
            calls.setdefault(name, []).append(Call(tuple(inputs[0].shape), tuple(output.shape), len(inputs)))

    watched = named(model, names)
    # gradients on, whatever the caller's mode: what they keep is counted
    with (
        torch.enable_grad(),
        in_eval(model),
        hooked(watched, after=note),
        FlopCounterMode(display=False) as flops,
        saved_sizes(model) as sizes,
    ):
        run_example(model, example)
    first, calls = calls, {}

    def differ(layers: list[nn.Module]) -> bool:
        """Return True if the layers of `first` are called otherwise while these have another class."""
        calls.clear()
        with torch.no_grad(), in_eval(model), hooked(watched, after=note), _masked(model, layers):
            try:
                run_example(model, example)
            except RecastError:
                return True
        return calls != first

    called = {name: layer for name, layer in watched if name in first}
    by_class: list[str] = []
    if not edit and differ([*called.values()]):
        by_class = [name for name, layer in called.items() if differ([layer])] or [*called]
    return Observation(first, batch, flops.get_total_flops() // 2 // batch, sum(sizes) // batch, frozenset(by_class))


class _Masked(nn.Module):
    """A layer behind another class, as recast layers are."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return data_of(self._modules["layer"], name)  # type: ignore[arg-type]


@contextmanager
def _masked(model: nn.Module, layers: list[nn.Module]) -> Iterator[None]:
    """Put a `_Masked` in the place of every layer inside the block."""
    masks = {id(layer): _Masked(layer).eval() for layer in layers}
    places = [(m._modules, key) for m in model.modules() for key, part in m._modules.items() if id(part) in masks]
    try:
        for parts, key in places:
            parts[key] = masks[id(parts[key])]
        yield
    finally:
        for parts, key in places:
            parts[key] = parts[key].layer  # type: ignore[union-attr, assignment]
