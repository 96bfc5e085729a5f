"""What layers add to the time that an image takes, measured here and now."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recast.errors import RecastError, shown
from recast.layers.gpsa import GPSA
from recast.run.config import RecastConfig
from recast.surgery.records import Step
from recast.surgery.rules import convert
from recast.tracing.hooks import in_eval
from recast.tracing.observe import Example
from recast.tracing.timing import time_models

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


@torch.no_grad()
def measure_times(model: nn.Module, example: Example, steps: Sequence[Step], config: RecastConfig) -> Times:
    """Time the network, and every layer beside its convolution on maps of its size; the two take turns.

    Raises `RecastError` for an example that is no batch of images, and where strides go: maps change their size there.
    """
    if not isinstance(example, Tensor) or example.dim() != 4:
        raise RecastError(f"milliseconds are measured on a batch of images (B, C, H, W), got {shown(example)}")
    if config.stride != "keep":
        raise RecastError("milliseconds are measured layer by layer, and stride changes all: use stride='keep'")
    like = next((p for p in model.parameters() if p.is_floating_point()), example)
    generator = torch.Generator().manual_seed(0)

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
    whole = 1000 / BATCH * seconds({"model": model}, example.shape[1:])["model"]
    return Times(whole, {step.name: step.calls * alike[_kind(step)] for step in steps})


def _kind(step: Step) -> object:
    """What layers have in common that take the same time: those are measured once, and differ by no noise."""
    return step.rule, step.parent_geometry, step.groups, step.input, step.output
