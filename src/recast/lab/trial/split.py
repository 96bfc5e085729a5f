"""Split a network at its first layer to be recast: features before it are computed once, the tail is a network.

The tail is the network on images of the meta device, which have a shape and no values. Modules that finish before the
entry are replaced by stubs with such outputs; the input of the entry is replaced by the features. A path around the
entry (a skip from the trunk to the head) combines features with tensors without values and fails. So a result with
values depends on the features alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from recast.errors import RecastError
from recast.modes import in_eval
from recast.surgery.records import Step
from recast.surgery.wrappers import unwrapped
from recast.tracing.examples import run_example
from recast.tracing.hooks import hooked, replaced_inputs, undisturbed
from recast.tracing.outputs import answer_of

ROUNDING = 1e-5
"""Largest relative difference of the logits that counts as the same function (fp32)."""


class Stub(nn.Module):
    """A module whose output is not needed: tensors of its shapes on the meta device."""

    def __init__(self, output: Any, batch: int) -> None:
        super().__init__()
        self.output, self.batch = tree_map_only(Tensor, lambda t: t.to("meta"), output), batch

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the recorded output, with as many images as the first input has."""
        count = len(next(value for value in (*inputs, *named.values()) if isinstance(value, Tensor)))
        return tree_map_only(
            Tensor, lambda t: t.new_empty(len(t) * count // self.batch, *t.shape[1:]) if t.dim() else t, self.output
        )


class Tail(nn.Module):
    """A network as a function of the input of its module `entry`, or of its images if `entry` is empty.

    `frozen` are modules that neither train nor follow the data.
    """

    def __init__(self, network: nn.Module, entry: str, image: Sequence[int], frozen: Sequence[str] = ()) -> None:
        super().__init__()
        self.network, self.entry, self.image, self.frozen = network, entry, tuple(image), tuple(frozen)
        for name in frozen:
            network.get_submodule(name).requires_grad_(False)

    def train(self, mode: bool = True) -> Tail:
        """Set the mode of all but the frozen modules."""
        super().train(mode)
        for name in self.frozen:
            self.network.get_submodule(name).eval()
        return self

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits (B, classes) of features (B, …)."""
        if not self.entry:
            return answer_of(self.network(features))
        images = torch.empty(len(features), *self.image, device="meta", dtype=features.dtype)
        try:
            entry = self.network.get_submodule(self.entry)
        except AttributeError:  # split again behind it
            return answer_of(self.network(images))
        with replaced_inputs(entry, lambda _inputs, _named: ((features,), {})):
            return answer_of(self.network(images))


@dataclass(frozen=True)
class Split:
    """A network in two parts: `tail(features(images))` are its logits."""

    network: nn.Module
    tail: Tail

    @property
    def is_whole(self) -> bool:
        """True if the network could not be split: features are the images, and the trunk is frozen."""
        return not self.tail.entry

    def features(self, images: Tensor) -> Tensor:
        """Return what enters the tail, for normalised images (B, C, H, W)."""
        if self.is_whole:
            return images
        entry = [("", self.network.get_submodule(self.tail.entry))]
        with torch.no_grad(), in_eval(self.network), hooked(entry, before=_stop):
            try:
                self.network(images)
            except _Reached as reached:
                return reached.features
        raise RecastError(f"{type(self.network).__name__} did not reach {self.tail.entry} on these images")


class _Reached(Exception):
    def __init__(self, features: Tensor) -> None:
        self.features = features.clone()


def _stop(_name: str, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
    raise _Reached(inputs[0])


@dataclass
class _Use:
    """Calls of a module: when the first began and the last ended, and what went in and came out last."""

    calls: int = 0
    begin: int = 0
    end: int = 0
    inputs: tuple[Any, ...] = ()
    output: Any = None


def last_layers(model: nn.Module, steps: Iterable[Step]) -> list[str]:
    """Return the layers of the parent that a plan's steps change, or that a new layer follows at once."""
    ends = {step.name: step.name.rpartition(".")[0] for step in steps if step.is_after_block}
    last = {name: f"{end}.{[*model.get_submodule(end)._modules][-1]}" for name, end in ends.items()}
    return [last.get(step.name, step.name) for step in steps]


def split_network(model: nn.Module, layers: Sequence[str], images: Tensor) -> Split:
    """Split a network as late as its function allows, at the first of `layers` or before it.

    Args:
        model: a network that gives logits; only read.
        layers: names of the layers that the tail must hold.
        images: normalised images (B, C, H, W), two or more: the parts are compared with the whole on them.

    Returns:
        A `Split`; `is_whole` where no module's input determines the logits.

    Raises:
        RecastError: if a layer is not called, or the network cannot run on the images.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
        >>> parts = split_network(model, ["2"], images := torch.randn(2, 3, 8, 8))
        >>> parts.tail.entry, torch.equal(parts.tail(parts.features(images)), model(images))
        ('2', True)
    """
    network, batch = unwrapped(model), len(images)
    with torch.no_grad(), in_eval(network), undisturbed(network):
        uses, logits = _watch(network, images)
        if missing := [name for name in layers if name not in uses]:
            raise RecastError(f"{missing[0]} is not called by {type(network).__name__}: it has no place to split at")
        first = min(uses[name].begin for name in layers)
        for entry in _entries(uses, first, batch):
            before = [name for name, use in uses.items() if use.calls == 1 and use.end < uses[entry].begin]
            if not any(next(network.get_submodule(name).parameters(), None) is not None for name in before):
                break  # it begins with the images
            tail = Tail(_without(network, before, uses, batch), entry, images.shape[1:])
            features = uses[entry].inputs[0]
            try:
                is_same = _agree(tail.eval()(features), logits)
                with undisturbed(tail):  # auxiliary heads run in training alone
                    tail.train()(features)
            except Exception:  # networks raise different errors for tensors without values
                continue
            if is_same:
                return Split(network, copy.deepcopy(tail))  # with parameters of its own
    done = [name for name, use in uses.items() if use.end < first]
    outer = [name for name in done if not any(name.startswith(f"{other}.") for other in done)]
    return Split(network, Tail(copy.deepcopy(network), "", images.shape[1:], outer))


def _watch(network: nn.Module, images: Tensor) -> tuple[dict[str, _Use], Tensor]:
    """Run the network and note the uses of every module, in the order of the first ones."""
    uses: dict[str, _Use] = {}
    clock = iter(range(10**9))

    def enter(name: str, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        use = uses.setdefault(name, _Use(begin=next(clock)))
        use.calls += 1
        use.inputs = tree_map_only(Tensor, Tensor.clone, inputs)  # an in-place layer may follow

    def leave(name: str, _module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> None:
        uses[name].end = next(clock)
        uses[name].output = tree_map_only(Tensor, lambda t: t.to("meta"), output)

    with hooked(network.named_modules(), before=enter, after=leave):
        logits = answer_of(run_example(network, images))
    return uses, logits


def _entries(uses: dict[str, _Use], first: int, batch: int) -> Iterator[str]:
    """Yield modules that the tail may begin with, the latest first: called once, with one tensor of all images."""
    for name, use in sorted(uses.items(), key=lambda item: -item[1].begin):
        single = len(use.inputs) == 1 and isinstance(use.inputs[0], Tensor) and use.inputs[0].dim() > 1
        if name and use.begin <= first and use.calls == 1 and single and len(use.inputs[0]) == batch:
            yield name


def _without(network: nn.Module, before: Sequence[str], uses: dict[str, _Use], batch: int) -> nn.Module:
    """Return a copy with stubs instead of the modules `before`; all others share the network's parameters."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in network.parameters()}
    for name in before:
        memo[id(network.get_submodule(name))] = Stub(uses[name].output, batch)
    return copy.deepcopy(network, memo)


def _agree(logits: Tensor, expected: Tensor) -> bool:
    """Return True if the logits have values that differ by rounding at most, relative to the largest logit."""
    if logits.is_meta or logits.shape != expected.shape:
        return False
    return bool((logits - expected).abs().max() <= ROUNDING * expected.abs().max())
