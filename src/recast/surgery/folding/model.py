"""`fold_`: every layer of a model in its smallest form, and what that changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from recast.errors import RecastError
from recast.layers.gpsa import GPSA, gpsa_layers
from recast.surgery.folding.forms import describe, fold_layer, multiply_in_, norms_after, what_remains
from recast.surgery.plan import Plan, plan_of, set_plan_
from recast.surgery.stride import replace_module_
from recast.surgery.verify import relative_error
from recast.tracing.hooks import captured_inputs, in_eval

KERNELS = (3, 5, 7, 9, 11)
HAS_ANOTHER_READER = 1e-3
"""A BatchNorm whose removal changes the outputs by more than this (relative) had another reader: it stays."""

Batches = list[tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Folded:
    """What `fold_` did to a layer: its heads, how many of them are closed, and the form it has now."""

    name: str
    closed: int
    heads: int
    convolution: bool
    change: float
    """Largest dropped gate, max(|γ|, |s|) of the maps that were removed: 0 where the fold is exact."""
    gaussian: int = 0
    """Heads that keep a Gaussian map."""
    content: int = 0
    """Heads that keep a content map."""
    kernel: tuple[int, int] = (0, 0)
    batch_norm: str | None = None
    """The BatchNorm that was multiplied into the layer."""
    layer_error: float | None = None
    """Relative change of the layer's output on the data's first batch, max|a−b| / max|b|."""
    output_error: float | None = None
    """Relative change of the model's outputs on the data, by this layer and those before it."""
    accuracy: float | None = None
    """Top-1 on the data after this layer and those before it were folded, in percent."""


@torch.no_grad()
def fold_(
    model: nn.Module,
    tol: float = 0.0,
    *,
    kernel: int | None = None,
    batch_norm: bool = False,
    data: Tensor | Iterable[tuple[Tensor, Tensor]] | None = None,
) -> list[Folded]:
    """Give every GPSA layer its smallest form, in place; returns what was done to each, in order.

    C-MHSA layers have no gates that could close: they are left alone.

    Maps whose gate is within `tol` are removed, with their parameters (they stay closed in further training). A layer
    without maps becomes a convolution; in the others W_val is multiplied into W_out. With `tol=0` nothing changes but
    rounding. `kernel` (odd: 5, 7, …) also turns layers without content into convolutions of that kernel, which
    approximate their Gaussians. `batch_norm` multiplies the BatchNorm after a layer into it; that needs `data`.

    `data` is a batch of images, or batches of (images, labels): the report then says how far each layer's output and
    the model's moved, and with labels the accuracy after each. `timm.utils.reparameterize_model` does the same through
    `GPSA.fuse`, at tol = 0 and without the plan (`save` cannot replay it). A model that is itself a layer is not
    replaced: use its `fold()`. Raises `RecastError` for an even or small `kernel`, a negative `tol`, or no data where
    it is needed.
    """
    if tol < 0:
        raise RecastError(f"tol is how far from closed a gate may be, 0 or more; got {tol}")
    if kernel is not None and kernel not in KERNELS:
        raise RecastError(f"kernel must be one of {', '.join(map(str, KERNELS))}, got {kernel}")
    if batch_norm and data is None:
        raise RecastError("batch_norm=True needs data: a forward pass shows which BatchNorm follows which layer")
    batches = _batches(data)
    report: list[Folded] = []
    with in_eval(model):
        before = [model(images) for images, _ in batches]
        for name, layer in gpsa_layers(model).items():
            report.append(_fold_one(model, name, layer, tol, kernel, batches))
            if batches:
                change, accuracy = _change_of_outputs(model, batches, before)
                report[-1] = replace(report[-1], output_error=change, accuracy=accuracy)
        if batch_norm:
            report = _fold_norms(model, report, batches)
    if (plan := plan_of(model)) is not None:
        set_plan_(model, _noted(model, plan, report))
    return report


def _batches(data: Tensor | Iterable[tuple[Tensor, Tensor]] | None) -> Batches:
    if data is None:
        return []
    batches: Batches = [(data, None)] if isinstance(data, Tensor) else list(data)
    if not batches:
        raise RecastError("data holds no batch: pass images, or batches of (images, labels)")
    return batches


def _fold_one(model: nn.Module, name: str, layer: GPSA, tol: float, kernel: int | None, batches: Batches) -> Folded:
    """One layer, replaced in `model`; its own output before and after."""
    inputs: list[Tensor] = []
    if batches:
        with captured_inputs([(name, layer)]) as seen:
            model(batches[0][0])
        inputs = seen.get(name, [])
    expected = [layer(x) for x in inputs]
    dropped, heads = layer.gate_sizes(), layer.num_heads
    dropped = dropped[dropped <= tol]
    new = fold_layer(layer, tol, kernel)
    if not name:  # the model itself is not replaced
        new = layer
    elif new is not layer:
        replace_module_(model, layer, new)
    maps, closed = (0, 0), heads
    if isinstance(new, GPSA):
        maps = len(new.gaussian_heads), len(new.content_heads)
        closed = 0 if layer.config.gate == "sigmoid" else heads - len({*new.gaussian_heads, *new.content_heads})
    form = describe(new)
    return Folded(
        name, closed, heads, form.convolution, float(dropped.max()) if len(dropped) else 0.0, *maps, form.kernel,
        layer_error=max((relative_error(new(x), y) for x, y in zip(inputs, expected, strict=True)), default=None),
    )  # fmt: skip


def _change_of_outputs(model: nn.Module, batches: Batches, before: list[Tensor]) -> tuple[float, float | None]:
    """How far the outputs are from those before, and the accuracy where there are labels."""
    error, right, count = 0.0, 0, 0
    for (images, labels), expected in zip(batches, before, strict=True):
        outputs = model(images)
        error = max(error, relative_error(outputs, expected))
        if labels is not None:
            right += int((outputs.argmax(-1) == labels).sum())
            count += len(labels)
    return error, 100 * right / count if count else None


def _fold_norms(model: nn.Module, report: list[Folded], batches: Batches) -> list[Folded]:
    """Multiply in what BatchNorm follows each layer, one by one; one with another reader as well is put back."""
    layers, images = {done.name: model.get_submodule(done.name) for done in report if done.name}, batches[0][0]
    follows = norms_after(model, layers, images)
    return [
        replace(done, batch_norm=follows[done.name])
        if done.name in follows and _fold_norm(model, layers[done.name], follows[done.name], images)
        else done
        for done in report
    ]


def _fold_norm(model: nn.Module, layer: nn.Module, name: str, images: Tensor) -> bool:
    """Whether the BatchNorm of this name could be multiplied into `layer`."""
    before, norm = model(images), model.get_submodule(name)
    kept = {key: value.clone() for key, value in layer.state_dict().items()}
    if not multiply_in_(layer, norm):
        return False
    rest = what_remains(norm)
    replace_module_(model, norm, rest)
    if relative_error(model(images), before) <= HAS_ANOTHER_READER:
        return True
    replace_module_(model, rest, norm)
    target: Any = layer[-1] if isinstance(layer, nn.Sequential) else layer
    if not any(key.endswith("bias") for key in kept):
        target.bias = None
    layer.load_state_dict(kept)
    return False


def _noted(model: nn.Module, plan: Plan, report: list[Folded]) -> Plan:
    """The plan with what a replay needs to know."""
    done = {item.name: item for item in report if item.name}
    steps = tuple(
        replace(
            step,
            fold=describe(model.get_submodule(step.name), done[step.name].batch_norm),
            bias_added=step.bias_added or done[step.name].batch_norm is not None,
        )
        if step.name in done
        else step
        for step in plan.steps
    )
    return replace(plan, steps=steps)
