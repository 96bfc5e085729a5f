"""`fold_`: give every layer of a model its smallest form, and report what that changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from recast.config import typed
from recast.errors import RecastError
from recast.layers.gpsa import GPSA, gpsa_layers
from recast.surgery.exactness import relative_error
from recast.surgery.folding.forms import (
    as_it_is,
    describe,
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

Batches = list[tuple[Example, Any]]


@typed("model", "tol", "data", "batch_norm")
@torch.no_grad()
def fold_(
    model: nn.Module,
    tol: float = 0.0,
    *,
    batch_norm: bool = False,
    data: Tensor | Iterable[Any] | None = None,
) -> list[Folded]:
    """Give every GPSA layer its smallest form, in place.

    Maps whose gate is within `tol` are removed, with their parameters. A layer without maps becomes a convolution; in
    the others W_val is multiplied into W_out. With `tol=0` nothing changes but rounding. C-MHSA layers have no gates
    and stay. Parameters are replaced: make the optimiser afterwards.

    `timm.utils.reparameterize_model` does the same through `GPSA.fuse`, at tol = 0 and without the plan; blocks that
    merge their branches stay where attention remains in them. A model that is itself a layer is not replaced: use its
    `fold()`.

    Args:
        model: a recast network.
        tol: largest |γ|, |s| or 1 − σ(λ) of a closed map. Infinity closes every gate.
        batch_norm: multiply the BatchNorm after a layer into it. Requires `data`.
        data: an example as `plan` takes it, or a list or loader of examples or of (images, labels), read as `wake_`
            does, to measure the change of the outputs, and with labels the accuracy, after each layer.

    Returns:
        One `Folded` per layer, in order.

    Raises:
        RecastError: before any change, for a bad `tol`, missing data, and data that the model cannot be
            measured on.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> images = torch.randn(2, 3, 8, 8)
        >>> recast.recast_(model, recast.plan(model, images)).eval()[0].__class__.__name__
        'GPSA'
        >>> recast.fold_(model)[0].convolution, model[0].__class__.__name__
        (True, 'Conv2d')
    """
    if not tol >= 0:  # NaN is not
        raise RecastError(f"tol must be 0 or more, got {tol}")
    if batch_norm and data is None:
        raise RecastError("batch_norm=True requires data: a forward pass shows which BatchNorm follows which layer")
    model = changeable(model)
    batches: Batches = [] if data is None else list(read_batches(model, data))
    if data is not None and not batches:
        raise RecastError("data is empty: pass images, or batches of (images, labels)")
    layers = gpsa_layers(model)
    for layer in layers.values():
        layer.check_closes(tol)
    in_training = [name for name, layer in layers.items() if layer.training]
    with in_eval(model):
        report = _fold_layers_(model, layers, tol, batch_norm, batches)
    for name in in_training:
        for module in model.get_submodule(name).modules():  # new modules are in eval mode
            module.training = True
    _note_folds_(model, report)
    return report


def _fold_layers_(
    model: nn.Module, layers: dict[str, GPSA], tol: float, batch_norm: bool, batches: Batches
) -> list[Folded]:
    """Fold the layers one after the other, and measure the outputs of the model after each."""
    before = _outputs(model, batches)
    if not all(bool(tensor.isfinite().all()) for output in before for tensor in tensors_of(output)):
        raise RecastError(f"{type(model).__name__} returns NaN or infinity for data: check the images and weights")
    norms = norms_after(model, layers, batches[0][0]) if batch_norm else {}
    report: list[Folded] = []
    for name, layer in layers.items():
        folded = _fold_one(model, name, layer, tol, batches)
        norm = norms.get(name)
        if name and norm is not None and _fold_norm(model, model.get_submodule(name), norm):
            folded = replace(folded, batch_norm=norm)
        if batches:
            change, accuracy = _change_of_outputs(_outputs(model, batches), before, batches)
            folded = replace(folded, output_error=change, accuracy=accuracy)
        report.append(replace(folded, name=plain_name(name)))
    return report


def _note_folds_(model: nn.Module, report: list[Folded]) -> None:
    """Write the new forms into the model's plan, and the report into its proof."""
    plan = plan_of(model)
    if plan is None:
        return
    norms, modules = {folded.name: folded.batch_norm for folded in report if folded.name}, modules_by_name(model)
    steps = tuple(as_it_is(modules[s.name], s, norms[s.name]) if s.name in norms else s for s in plan.steps)
    set_plan_(model, replace(plan, steps=steps))
    note_(model, replace(proof_of(model), folded=report))


def _fold_one(model: nn.Module, name: str, layer: GPSA, tol: float, batches: Batches) -> Folded:
    """Fold one layer of `model`, and compare its output before and after."""
    inputs: list[Tensor] = []
    if batches:
        with captured_inputs([(name, layer)]) as captured:
            run_example(model, batches[0][0])
        inputs = [x.to(layer.query.dtype) for x in captured.get(name, [])]  # autocast may be the network's own
    expected = [layer(x) for x in inputs]
    dropped, heads = layer.gate_sizes(), layer.num_heads
    dropped = dropped[dropped <= tol]
    new = layer.fold(tol)
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
    """Return the outputs for every batch. Raises `RecastError` for data that the model cannot be measured on."""
    outputs = []
    for images, labels in batches:
        count = batch_of(images)
        output = run_example(model, images)
        if not tensors_of(output):
            raise RecastError(f"fold_ cannot measure an output of type {type(output).__name__}: drop data")
        if labels is not None and (shape := tuple(getattr(labels, "shape", ()))) != (count,):
            raise RecastError(f"data has labels of shape {shape} for {count} images: expected ({count},)")
        if labels is not None:
            logits_of(output, model, "accuracy")
        outputs.append(output)
    return outputs


def _change_of_outputs(now: list[Any], before: list[Any], batches: Batches) -> tuple[float, float | None]:
    """Return the relative change of the outputs, and the accuracy in percent if there are labels."""
    right = count = 0
    for outputs, (_, labels) in zip(now, batches, strict=True):
        if labels is not None:
            right += int((answer_of(outputs).argmax(-1) == labels).sum())
            count += len(labels)
    pairs = [pair for outputs in zip(now, before, strict=True) for pair in zip(*map(tensors_of, outputs), strict=True)]
    error = max(relative_error(a, b) for a, b in pairs)
    return error, 100 * right / count if count else None


def _fold_norm(model: nn.Module, layer: nn.Module, name: str) -> bool:
    """Multiply the BatchNorm `name` into `layer`; returns False if that is impossible."""
    norm = model.get_submodule(name)
    if not multiply_in_(layer, norm):
        return False
    replace_module_(model, norm, what_remains(norm))
    return True
