"""Recast one architecture in two steps, the last stage and then everything small enough, and verify after each."""

from __future__ import annotations

import copy
import re
import time
from collections import Counter
from math import prod
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from recast.errors import RecastError
from recast.layers.cmhsa import gated_layers
from recast.layers.config import RecastConfig
from recast.layers.gpsa import GPSA
from recast.surgery.apply import recast_
from recast.surgery.compare import relative_error
from recast.surgery.controls import changed_layer
from recast.surgery.plan import Plan
from recast.surgery.planning import plan
from recast.surgery.select import is_spatial
from recast.surgery.verify import Trace, trace, use_backend, verify
from recast.tracing.cost import count_parameters
from recast.tracing.examples import Example, batch_of, run_example
from recast.tracing.hooks import captured_inputs, full_precision
from zoo.architectures import Instance, instantiate, skeleton, spatial_convolutions
from zoo.rows import ZooRow

HEADS = RecastConfig("linear", content_heads=1)
"""A head for each tap, by the rule of the convolution's class. Attention beside a convolution needs no rule."""
TOLERANCE = 1e-4
"""Relative error of the outputs in fp32; a network above it must stay within FP64_TOLERANCE in fp64."""
FP64_TOLERANCE = 1e-9
CONTROLLED = 1e-5
"""A hundredth of the least change of the outputs by the control."""
LAST_STAGE, EVERYTHING = 4500, 600
"""Most tokens of a layer in the two steps: no patch embedding (its tokens are pixels); all but the earliest layers."""
MAP_BYTES = 2**29
"""Layers with larger attention maps are verified with their closed heads skipped, and not in `dense`."""
MANY_MACS = 4e9
"""A network that needs more for an image is verified on one image instead of two."""
OPEN_LAYERS = 6
"""Layers of different shapes whose heads are opened at random, to compare `split` with `reference`."""
OPEN_MACS = 5e9


def examine(name: str) -> ZooRow:
    """Recast and verify one architecture; an error becomes the row's cause."""
    started, resident = time.perf_counter(), getrusage(RUSAGE_SELF).ru_maxrss
    row = ZooRow(name, "failed")
    try:
        _examine(row)
    except Exception as error:
        row.status = "failed"
        row.cause = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    row.seconds = round(time.perf_counter() - started, 1)
    row.peak_gib = round((getrusage(RUSAGE_SELF).ru_maxrss - resident) / 2**20, 2)
    return row


def _examine(row: ZooRow) -> None:
    bare = skeleton(row.model)
    convolutions = spatial_convolutions(bare)
    row.parameters = count_parameters(bare)
    row.spatial_convolutions = len(convolutions)
    if not convolutions:
        row.status = "no spatial convolution"
        return
    if not any(isinstance(m, nn.Conv2d | nn.ConvTranspose2d) for m in convolutions):
        row.status, row.cause = "no two-dimensional convolution", ", ".join({type(m).__name__ for m in convolutions})
        return
    del bare
    instance = instantiate(row.model)
    row.size = "×".join(map(str, instance.size))
    _last_stage_then_everything(instance, row)
    if row.status == "inexact":
        del instance
        fp64 = ZooRow(row.model, "failed")
        _last_stage_then_everything(instantiate(row.model, torch.float64), fp64)
        row.error_fp64 = max(fp64.output_errors())
        row.status = "exact_fp64" if row.error_fp64 <= FP64_TOLERANCE else "inexact"


def _last_stage_then_everything(instance: Instance, row: ZooRow) -> None:
    torch.manual_seed(1)  # of the queries
    model, single = instance.model, tuple(images[:1] for images in instance.inputs)
    try:
        last = plan(model, single, HEADS, max_tokens=LAST_STAGE)
    except RecastError:  # a patch embedding with overlap may be the only one
        last = plan(model, single, HEADS, max_tokens=None)
    everything = None
    try:
        everything = plan(model, single, HEADS, where="all", max_tokens=EVERYTHING)
        row.all_left = _reasons(everything, model)
    except RecastError as error:  # nothing is small enough
        row.all_left = str(error).split(";")[0]
    batch = instance.inputs if last.after.macs <= MANY_MACS else single
    parent_last = trace(model, last, batch)
    parent_all = trace(model, everything, single) if everything else None
    if not all(bool(t.isfinite().all()) for t in tree_leaves(parent_last.output) if isinstance(t, Tensor)):
        row.cause = "the parent's outputs are not finite with random weights"
        return
    row.last_recast, row.last_left = len(last.steps), _reasons(last, model)
    model = recast_(model, last)
    _verify(row, "last", model, last, parent_last, batch)
    if any(layer.num_heads > 1 for layer in gated_layers(model).values()):
        with changed_layer(model):  # closed heads add nothing, with other weights either
            row.control = verify(parent_last, model, batch, backend="split").max_relative_error
    row.open_layers, row.open_error = _open_error(model, single)
    del parent_last
    if everything and parent_all:
        recast_names = {step.name for step in last.steps}
        steps = [step.name for step in everything.steps if step.name not in recast_names]
        model = recast_(model, everything, steps=steps) if steps else model
        row.all_recast = len(gated_layers(model))
        _verify(row, "all", model, everything, parent_all, single)
    if row.control is None or row.control <= 100 * CONTROLLED:
        row.status, row.cause = "vacuous", f"two swapped heads move the outputs by {row.control or 'nothing'}"
    else:
        row.status = "exact" if max(row.output_errors()) <= TOLERANCE else "inexact"


def _verify(row: ZooRow, stage: str, model: nn.Module, planned: Plan, parent: Trace, batch: Example) -> None:
    """Fill in the row's columns of a stage; those of `dense` only if the attention maps are small enough."""
    maps = [batch_of(batch) * step.geometry.num_heads * step.queries * step.keys for step in planned.steps]
    is_small = 4 * max(maps) <= MAP_BYTES
    split = verify(parent, model, batch, backend="split")
    columns: dict[str, Any] = {"split_bitwise": split.bitwise, "split_error": split.max_relative_error}
    if is_small:
        dense = verify(parent, model, batch, backend="dense")
        columns["dense_error"] = dense.max_relative_error
        columns["dense_layer_error"] = max(dense.layers.values(), default=0.0)
    for name, value in columns.items():
        setattr(row, f"{stage}_{name}", value)


def _reasons(planned: Plan, model: nn.Module) -> str:
    """Return why spatial convolutions of the last stage were not recast, with counts."""
    spatial = [item.reason for item in planned.left if is_spatial(model.get_submodule(item.name))]
    reasons = Counter(re.split(r":| \(", reason)[0] for reason in spatial if not reason.startswith("before the last"))
    return "; ".join(f"{count}× {reason}" for reason, count in reasons.items())


@torch.no_grad()
def _open_error(model: nn.Module, example: Example) -> tuple[int, float | None]:
    """Compare `split` with `reference` in layers of different shapes with random gates, keys and locality.

    Returns the number of layers and the largest error.
    """
    layers = gated_layers(model)
    with captured_inputs(layers.items()) as inputs:
        run_example(model, example)
    by_shape: dict[str, tuple[GPSA, Tensor]] = {}
    for name, layer in layers.items():
        if name in inputs and _reference_macs(layer, x := inputs[name][0]) <= OPEN_MACS:
            by_shape.setdefault(f"{layer} {tuple(x.shape)}", (layer, x))
    errors: list[float] = []
    for layer, x in list(by_shape.values())[:OPEN_LAYERS]:
        layer = copy.deepcopy(layer)
        for name, std in (("gamma", 0.3), ("spread", 0.3), ("key", 0.02), ("raw_alpha", 0.3)):
            if (parameter := layer._parameters.get(name)) is not None:
                parameter.add_(torch.randn_like(parameter), alpha=std)
        outputs = []
        for backend in ("split", "reference"):
            with use_backend(layer, backend), full_precision():
                outputs.append(layer(x))
        errors.append(relative_error(*outputs))
    return len(errors), max(errors, default=None)


def _reference_macs(layer: GPSA, x: Tensor) -> int:
    queries, keys = prod(layer.geometry.output_size(*x.shape[-2:])), prod(layer.geometry.padded_size(*x.shape[-2:]))
    return len(x) * layer.num_heads * queries * layer.in_channels * (keys + layer.out_channels)
