"""`fold_`: every layer of a model in its smallest form, and what that changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from recast.errors import RecastError
from recast.fields import typed
from recast.layers.gpsa import GPSA, gpsa_layers
from recast.surgery.exactness import relative_error
from recast.surgery.folding.forms import (
    as_it_is,
    describe,
    fold_layer,
    modules_by_name,
    multiply_in_,
    norms_after,
    plain_name,
    what_remains,
)
from recast.surgery.plan import plan_of, set_plan_
from recast.surgery.proof import note_, proof_of
from recast.surgery.records import Folded
from recast.surgery.stride import replace_module_
from recast.surgery.wrappers import changeable
from recast.tracing.examples import Example, batch_of, read_batches, run_example
from recast.tracing.hooks import captured_inputs, in_eval
from recast.tracing.outputs import answer_of, logits_of, tensors_of

KERNELS = (3, 5, 7, 9, 11)
Batches = list[tuple[Example, Any]]


@typed("model", "tol", "data", "kernel", "batch_norm")
@torch.no_grad()
def fold_(
    model: nn.Module,
    tol: float = 0.0,
    *,
    kernel: int | None = None,
    batch_norm: bool = False,
    data: Tensor | Iterable[Any] | None = None,
) -> list[Folded]:
    """Give every GPSA layer its smallest form, in place; returns what was done to each, in order.

    C-MHSA layers have no gates that could close: they are left alone.

    Maps whose gate is within `tol` are removed, with their parameters (they stay closed in further training). A layer
    without maps becomes a convolution; in the others W_val is multiplied into W_out. With `tol=0` nothing changes but
    rounding. `kernel` (odd: 5, 7, …) also turns layers without content into convolutions of that kernel, which
    approximate their Gaussians. `batch_norm` multiplies the BatchNorm after a layer into it; that needs `data`.
    The layers' parameters are new ones then: make the optimiser after it.

    `data` is one example as `plan` takes it, or a list or loader of examples or of (images, labels), read as `wake_`
    reads them: the report then says how far each layer's output and the model's moved, and with labels the accuracy
    after each. `timm.utils.reparameterize_model` does the same through
    `GPSA.fuse`, at tol = 0 and without the plan; blocks that merge their branches stay where attention is left in them.
    A model that is itself a layer is not replaced: use its `fold()`. Raises `RecastError`, before any change, for an
    even or small `kernel`, a negative or NaN `tol` (infinity closes every gate: what the network is without attention),
    no data where it is needed, and data that the model cannot be measured on.
    """
    if not tol >= 0:
        raise RecastError(f"tol is how far from closed a gate may be, 0 or more; got {tol}")
    if kernel is not None and kernel not in KERNELS:
        raise RecastError(f"kernel must be one of {', '.join(map(str, KERNELS))}, got {kernel}")
    if batch_norm and data is None:
        raise RecastError("batch_norm=True needs data: a forward pass shows which BatchNorm follows which layer")
    model = changeable(model)
    batches: Batches = [] if data is None else list(read_batches(model, data))
    if data is not None and not batches:
        raise RecastError("data holds no batch: pass images, or batches of (images, labels)")
    layers = gpsa_layers(model)
    for layer in layers.values():
        layer.check_closes(tol)
    report: list[Folded] = []
    in_training = [name for name, layer in layers.items() if layer.training]
    with in_eval(model):
        before = _outputs(model, batches)
        if not all(bool(tensor.isfinite().all()) for output in before for tensor in tensors_of(output)):
            raise RecastError(f"{type(model).__name__} gives NaN or infinity for the data: look at the images")
        norms_of = norms_after(model, layers, batches[0][0]) if batch_norm else {}
        for name, layer in layers.items():
            done = _fold_one(model, name, layer, tol, kernel, batches)
            norm = norms_of.get(name)
            if name and norm is not None and _fold_norm(model, model.get_submodule(name), norm):
                done = replace(done, batch_norm=norm)
            if batches:
                change, accuracy = _change_of_outputs(_outputs(model, batches), before, batches)
                done = replace(done, output_error=change, accuracy=accuracy)
            report.append(replace(done, name=plain_name(name)))
    for name in in_training:
        for module in model.get_submodule(name).modules():  # a new one knows eval mode alone
            module.training = True
    if (plan := plan_of(model)) is not None:
        norms, now = {done.name: done.batch_norm for done in report if done.name}, modules_by_name(model)
        steps = tuple(as_it_is(now[s.name], s, norms[s.name]) if s.name in norms else s for s in plan.steps)
        set_plan_(model, replace(plan, steps=steps))
        note_(model, replace(proof_of(model), folded=report))
    return report


def _fold_one(model: nn.Module, name: str, layer: GPSA, tol: float, kernel: int | None, batches: Batches) -> Folded:
    """One layer, replaced in `model`; its own output before and after."""
    inputs: list[Tensor] = []
    if batches:
        with captured_inputs([(name, layer)]) as seen:
            run_example(model, batches[0][0])
        inputs = [x.to(layer.query.dtype) for x in seen.get(name, [])]  # autocast may be the network's own
    expected = [layer(x) for x in inputs]
    dropped, heads = layer.gate_sizes(), layer.num_heads
    dropped = dropped[dropped <= tol]
    new = fold_layer(layer, tol, kernel)
    if not name:  # the model itself is not replaced
        new = layer
    elif new is not layer:
        replace_module_(model, layer, new)
    form = describe(new)
    gaussian, content = form.gaussian_heads, form.content_heads
    closed = 0 if isinstance(new, GPSA) and layer.config.gate == "sigmoid" else heads - len({*gaussian, *content})
    return Folded(
        name, closed, heads, form.convolution, float(dropped.max()) if len(dropped) else 0.0,
        len(gaussian), len(content), form.kernel,
        layer_error=max((relative_error(new(x), y) for x, y in zip(inputs, expected, strict=True)), default=None),
    )  # fmt: skip


def _outputs(model: nn.Module, batches: Batches) -> list[Any]:
    """What the model gives for every batch. Raises `RecastError` for data that it cannot be measured on."""
    outputs = []
    for images, labels in batches:
        count = batch_of(images)
        output = run_example(model, images)
        if not tensors_of(output):
            raise RecastError(f"fold_ measures outputs with tensors, got {type(output).__name__}: drop data")
        if labels is not None and (found := tuple(getattr(labels, "shape", ()))) != (count,):
            raise RecastError(f"data gives labels of shape {found} for {count} images: expected one an image")
        if labels is not None:
            logits_of(output, model, "accuracy")
        outputs.append(output)
    return outputs


def _change_of_outputs(now: list[Any], before: list[Any], batches: Batches) -> tuple[float, float | None]:
    """How far the outputs are from those before, and the accuracy where there are labels."""
    right = count = 0
    for outputs, (_, labels) in zip(now, batches, strict=True):
        if labels is not None:
            right += int((answer_of(outputs).argmax(-1) == labels).sum())
            count += len(labels)
    pairs = [pair for outputs in zip(now, before, strict=True) for pair in zip(*map(tensors_of, outputs), strict=True)]
    error = max(relative_error(a, b) for a, b in pairs)
    return error, 100 * right / count if count else None


def _fold_norm(model: nn.Module, layer: nn.Module, name: str) -> bool:
    """Multiply the BatchNorm of this name into `layer`; whether it could be."""
    norm = model.get_submodule(name)
    if not multiply_in_(layer, norm):
        return False
    replace_module_(model, norm, what_remains(norm))
    return True
