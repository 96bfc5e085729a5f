"""The layers that keep to the limits of a plan, chosen from the end of the network; the time that layers add to what an
image takes, measured here and now."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from recast.errors import RecastError, shown
from recast.layers.config import RecastConfig
from recast.layers.gpsa import GPSA
from recast.surgery.limits import Budget
from recast.surgery.records import Step
from recast.surgery.rules import convert
from recast.surgery.table import quantity
from recast.tracing.cost import Cost
from recast.tracing.examples import Example, arguments_of, batch_of, images_of, part_of
from recast.tracing.hooks import in_eval
from recast.tracing.timing import time_models

_COSTS = {"params": "parameters", "macs": "macs", "memory": "memory"}
BATCH = 16
"""Images of a batch: a single one measures what a call costs, not what an image does."""
SECONDS = 0.5
"""For each layer."""


@dataclass(frozen=True)
class Times:
    """Milliseconds that an image takes, in batches of `BATCH`."""

    model: float
    """The whole network as it is."""
    added: dict[str, float]
    """Layer by name: with every head open, less the convolution's."""


UNTIMED = Times(0.0, {})


def keep_within(
    steps: list[Step], added: dict[str, Cost], order: list[str], explicit: set[str], limits: Budget, start: Cost,
    parent: Cost, times: Times,
) -> tuple[list[Step], dict[str, str], Cost]:  # fmt: skip
    """The steps within the budget, why each other is not, and the cost of the model with them.

    Layers named one by one come first, and must fit. The others are taken from the end of the network (`order`, of the
    calls) while they fit: the papers recast the last layers, and late layers have the fewest tokens. `added` is what a
    layer adds to the model's cost, `start` the model's cost without any, `times` what a limit in milliseconds needs.
    Raises `RecastError` if nothing fits.
    """
    left: dict[str, str] = {}
    total, ms = start, times.model
    for step in sorted(steps, key=lambda s: (s.name not in explicit, -order.index(s.name))):
        longer = ms + times.added.get(step.name, 0)
        reason = _exceeds(step, total + added[step.name], longer, limits, parent, times.model)
        if reason is None:
            total, ms = total + added[step.name], longer
        elif step.name in explicit:
            raise RecastError(f"{step.name or 'the model'} {reason}")
        else:
            left[step.name] = reason
    if steps and len(left) == len(steps):
        last = next(iter(left))
        raise RecastError(f"nothing is within the budget: {last or 'the model'} {left[last]}; raise the budget")
    return [step for step in steps if step.name not in left], left, total


def _exceeds(step: Step, total: Cost, ms: float, limits: Budget, parent: Cost, parent_ms: float) -> str | None:
    """Why a step does not fit, if `total` is the model's cost with it and `ms` its milliseconds."""
    if limits.tokens is not None and step.keys > limits.tokens:
        return (
            f"has too many tokens: {step.keys} ({step.keys / limits.tokens:.1f}× the budget of {limits.tokens}); "
            f"lower the resolution or set the budget to tokens={step.keys}"
        )
    costs = {name: (getattr(parent, field), getattr(total, field)) for name, field in _COSTS.items()}
    for name, (own, cost) in {**costs, "ms": (parent_ms, ms)}.items():
        limit = getattr(limits, name)
        allowed = math.inf if limit is None else limit.value * own if limit.relative else limit.value
        if cost > allowed:
            unit = ("B", 1024) if name == "memory" else ("", 1000)
            return (
                f"does not fit the budget of {quantity(allowed, *unit)} {name} for the whole model "
                f"(the parent has {quantity(own, *unit)})"
            )
    return None


@torch.no_grad()
def measure_times(model: nn.Module, example: Example, steps: Sequence[Step], config: RecastConfig) -> Times:
    """Time the network, and every layer beside its convolution on maps of its size; the two take turns.

    Raises `RecastError` for an example without images (B, C, H, W), and where strides go: maps change their size there.
    """
    if images_of(example).dim() != 4:
        raise RecastError(f"milliseconds are measured on a batch of images (B, C, H, W), got {shown(example)}")
    if config.stride != "keep":
        raise RecastError("milliseconds are measured layer by layer, and stride changes all: use stride='keep'")
    like = next((p for p in model.parameters() if p.is_floating_point()), images_of(example))
    generator = torch.Generator().manual_seed(0)

    def noise(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=generator).to(like.device, like.dtype) if x.dim() == 4 else x

    def seconds(modules: dict[str, nn.Module], shape: Sequence[int]) -> dict[str, float]:
        images = torch.randn(BATCH, *shape, generator=generator).to(like.device, like.dtype)
        with in_eval(*modules.values()):
            return {name: statistics.median(times) for name, times in time_models(modules, images, SECONDS).items()}

    alike: dict[object, float] = {}
    for step in steps:
        if (kind := _kind(step)) in alike:
            continue
        convolution = model.get_submodule(step.name)
        layer = convert(convolution, config)
        if isinstance(layer, GPSA):
            for gate in (layer.gamma, layer.spread) if config.gate == "linear" else ():
                gate.fill_(0.5)
            layer.eval()
        else:
            layer.set_size_(*step.input[1:])
        found = seconds({"convolution": convolution, "layer": layer.to(like.device)}, step.input)
        alike[kind] = 1000 / BATCH * (found["layer"] - found["convolution"])
    batch = tree_map_only(Tensor, noise, part_of(example, torch.arange(BATCH) % batch_of(example)))
    args, kwargs = arguments_of(batch)
    with in_eval(model):
        whole = time_models({"model": lambda _: model(*args, **kwargs)}, images_of(batch), SECONDS)["model"]
    return Times(
        1000 / BATCH * statistics.median(whole), {step.name: step.calls * alike[_kind(step)] for step in steps}
    )


def _kind(step: Step) -> object:
    """What layers have in common that take the same time: those are measured once, and differ by no noise."""
    return step.rule, step.parent_geometry, step.groups, step.input, step.output
