"""`fold_`: give every layer of a model its smallest form, and report what that changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from recast.config import typed
from recast.errors import RecastError
from recast.layers.cmhsa import GatedLayer, gated_layers
from recast.modes import in_eval
from recast.names import modules_by_name, plain_name
from recast.surgery.compare import relative_error
from recast.surgery.folding.batch_norm import batch_norms_after, fold_batch_norm_
from recast.surgery.folding.forms import describe
from recast.surgery.plan import plan_of, set_plan_
from recast.surgery.records import Folded, Step
from recast.surgery.stride import replace_module_
from recast.surgery.wrappers import changeable
from recast.tracing.examples import Example, batch_of, run_example
from recast.tracing.outputs import tensors_of

ROUNDING = 1e-4
"""Relative change of the outputs up to which a BatchNorm counts as folded exactly."""


@typed("model", "tol")
@torch.no_grad()
def fold_(model: nn.Module, tol: float = 0.0, *, data: Example | None = None, batch_norm: bool = False) -> list[Folded]:
    """Give every layer with gates its smallest form, in place.

    Maps whose gate is within `tol` are removed, with their parameters. A layer without maps becomes a convolution:
    beside attention, the caller's own, the same object. In other GPSA layers W_val is multiplied into W_out. With
    `tol=0` nothing changes but rounding. C-MHSA layers have no gates and stay. GPSA's parameters are replaced: make the
    optimiser afterwards.

    `timm.utils.reparameterize_model` does the same through the layers' `fuse`, at tol = 0 and without the plan; blocks
    that merge their branches stay unmerged where attention remains. A model that is itself a layer is not replaced: use
    its `fold()`.

    Args:
        model: a recast network.
        tol: largest |γ|, |s| or 1 − σ(λ) of a closed map. Infinity closes every gate.
        data: an example as `plan` takes it, to measure the change of the outputs after each layer.
        batch_norm: also multiply the BatchNorm after each recast layer into it (beside attention, into both paths),
            where `data` show that this changes the outputs by rounding alone. For export: such a network cannot be
            saved.

    Returns:
        One `Folded` per layer, in order.

    Raises:
        RecastError: before any change, for a bad `tol`, data that the model cannot be measured on, and batch_norm
            without data.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> images = torch.randn(2, 3, 8, 8)
        >>> recast.recast_(model, recast.plan(model, images)).eval()[0].__class__.__name__
        'AttentionBeside'
        >>> recast.fold_(model)[0].convolution, model[0].__class__.__name__
        (True, 'Conv2d')
    """
    if not tol >= 0:  # NaN is not
        raise RecastError(f"tol must be 0 or more, got {tol}")
    if batch_norm and data is None:
        raise RecastError("batch_norm=True requires data: images on which the outputs are compared")
    model = changeable(model)
    layers = gated_layers(model)
    in_training = [name for name, layer in layers.items() if layer.training]
    report: list[Folded] = []
    with in_eval(model):
        before = [] if data is None else _outputs(model, data)
        for name, layer in layers.items():
            folded = _fold_one(model, name, layer, tol)
            if data is not None:
                pairs = zip(_outputs(model, data), before, strict=True)
                folded = replace(folded, output_error=max(relative_error(a, b) for a, b in pairs))
            report.append(folded)
        if batch_norm:
            report = _fold_batch_norms_(model, report, [*layers], data)
    modules = modules_by_name(model)
    for name in in_training:
        for module in modules[name].modules():  # new modules are in eval mode
            module.training = True
    _note_folds_(model, report)
    return report


def _outputs(model: nn.Module, data: Example) -> list[torch.Tensor]:
    """Return the tensors that the model puts out. Raises `RecastError` for data that it cannot be measured on."""
    batch_of(data)
    outputs = tensors_of(run_example(model, data))
    if not outputs or not all(bool(tensor.isfinite().all()) for tensor in outputs):
        raise RecastError(f"{type(model).__name__} returns no tensor, NaN or infinity for data: check it, or drop data")
    return outputs


def _fold_batch_norms_(model: nn.Module, report: list[Folded], names: list[str], data: Any) -> list[Folded]:
    """Fold the BatchNorm after each layer, in place, and note its name; take back what changes the outputs."""
    before, rows, modules = _outputs(model, data), dict(zip(names, report, strict=True)), modules_by_name(model)
    layers = [(name, modules[name]) for name in names]
    for name, norm in batch_norms_after(model, layers, data).items():
        undo = fold_batch_norm_(model, modules[name], model.get_submodule(norm))
        if undo is None:
            continue
        pairs = zip(_outputs(model, data), before, strict=True)
        if max(relative_error(a, b) for a, b in pairs) <= ROUNDING:
            rows[name] = replace(rows[name], batch_norm=plain_name(norm))
        else:  # something else reads the layer's output
            undo()
    return list(rows.values())


def _fold_one(model: nn.Module, name: str, layer: GatedLayer, tol: float) -> Folded:
    """Fold one layer of `model`."""
    dropped, heads = layer.gate_sizes(), layer.num_heads
    dropped = dropped[dropped <= tol]
    new = layer.fold(tol)
    if not name:  # the model itself is not replaced
        new = layer
    elif new is not layer:
        replace_module_(model, layer, new)
    form = describe(new)
    gaussian, content = form.gaussian_heads, form.content_heads
    closed = 0 if isinstance(new, GatedLayer) and layer.config.gate == "sigmoid" else heads - len({*gaussian, *content})
    change = float(dropped.max()) if len(dropped) else 0.0
    return Folded(name, closed, heads, form.convolution, change, len(gaussian), len(content), form.kernel)


def _note_folds_(model: nn.Module, report: list[Folded]) -> None:
    """Write the new forms into the model's plan."""
    plan = plan_of(model)
    if plan is None:
        return
    modules = modules_by_name(model)
    norms = {folded.name: folded.batch_norm for folded in report}

    def noted(step: Step) -> Step:
        if step.name not in norms:
            return step
        before = "" if step.fold is None else step.fold.batch_norm  # by an earlier call
        return replace(step, fold=replace(describe(modules[step.name]), batch_norm=norms[step.name] or before))

    set_plan_(model, replace(plan, steps=tuple(map(noted, plan.steps))))
