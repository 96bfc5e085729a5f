"""One architecture: recast in two steps, the last stage and then everything small enough, verified after each."""

from __future__ import annotations

import copy
import re
import time
from collections import Counter
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from recast.errors import RecastError
from recast.layers.gpsa import GPSA, gpsa_layers
from recast.surgery.apply import recast_, refresh_gates_
from recast.surgery.compare import relative_error
from recast.surgery.controls import swapped_heads
from recast.surgery.plan import Plan
from recast.surgery.planning import plan
from recast.surgery.select import is_spatial
from recast.surgery.verify import Trace, trace, use_backend, verify
from recast.tracing.cost import count_parameters
from recast.tracing.examples import Example, batch_of, run_example
from recast.tracing.hooks import captured_inputs, full_precision
from zoo.architectures import Instance, instantiate, skeleton, spatial_convolutions
from zoo.rows import ZooRow

TOLERANCE = 1e-4
"""Relative error of the outputs in fp32; what exceeds it must keep to FP64_TOLERANCE in fp64."""
FP64_TOLERANCE = 1e-9
CONTROLLED = 1e-5
"""The control must move the outputs by a hundred times this."""
LAST_STAGE, EVERYTHING = 4500, 600
"""Most tokens of a layer in the two steps: no patch embedding (its tokens are pixels); all but the earliest layers."""
MAP_BYTES = 2**29
"""Layers whose attention maps would be larger are verified with their closed heads skipped, and not in `dense`."""
MANY_MACS = 4e9
"""A network that needs more for an image is verified on one image instead of two."""
OPEN_LAYERS = 6
"""Layers of different shapes whose heads are opened at random, to compare `split` with `reference`."""
OPEN_MACS = 5e9


def examine(name: str) -> ZooRow:
    """Recast and verify one architecture; whatever goes wrong becomes the row's cause."""
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
    found = instantiate(row.model)
    row.size = "×".join(map(str, found.size))
    torch.manual_seed(1)  # of the queries
    _last_stage_then_everything(found, row)
    if row.status == "inexact":
        del found
        twice = ZooRow(row.model, "failed")
        torch.manual_seed(1)
        _last_stage_then_everything(instantiate(row.model, torch.float64), twice)
        row.error_fp64 = max(twice.output_errors())
        row.status = "exact_fp64" if row.error_fp64 <= FP64_TOLERANCE else "inexact"


def _last_stage_then_everything(found: Instance, row: ZooRow) -> None:
    model, one = found.model, tuple(images[:1] for images in found.inputs)
    try:
        last = plan(model, one, max_tokens=LAST_STAGE)
    except RecastError:  # a patch embedding with overlap may be all that there is
        last = plan(model, one, max_tokens=None)
    everything = None
    try:
        everything = plan(model, one, where="all", max_tokens=EVERYTHING)
        row.all_left = _left(everything, model)
    except RecastError as error:  # nothing is small enough
        row.all_left = str(error).split(";")[0]
    batch = found.inputs if last.after.macs <= MANY_MACS else one
    parent_last = trace(model, last, batch)
    parent_all = trace(model, everything, one) if everything else None
    if not all(bool(t.isfinite().all()) for t in tree_leaves(parent_last.output) if isinstance(t, Tensor)):
        row.cause = "the parent's outputs are not finite with random weights"
        return
    row.last_recast, row.last_left = len(last.steps), _left(last, model)
    model = recast_(model, last)
    _verify(row, "last", model, last, parent_last, batch)
    if any(layer.num_heads > 1 for layer in gpsa_layers(model).values()):
        with swapped_heads(refresh_gates_(model)):  # closed heads add nothing, with other weights either
            row.control = verify(parent_last, model, batch, backend="split").max_relative_error
    row.open_layers, row.open_error = _open_error(model, one)
    del parent_last
    if everything and parent_all:
        taken = {step.name for step in last.steps}
        rest = [step.name for step in everything.steps if step.name not in taken]
        model = recast_(model, everything, steps=rest) if rest else model
        row.all_recast = len(gpsa_layers(model))
        _verify(row, "all", refresh_gates_(model), everything, parent_all, one)
    if row.control is None or row.control <= 100 * CONTROLLED:
        row.status, row.cause = "vacuous", f"two swapped heads move the outputs by {row.control or 'nothing'}"
    else:
        row.status = "exact" if max(row.output_errors()) <= TOLERANCE else "inexact"


def _verify(row: ZooRow, step: str, model: nn.Module, planned: Plan, parent: Trace, batch: Example) -> None:
    """Fill in the row: whether split is bitwise, its error, dense's at the output and at the worst layer.

    Dense's stay empty where the attention maps would be too large.
    """
    maps = [batch_of(batch) * step.geometry.num_heads * step.queries * step.keys for step in planned.steps]
    largest = 4 * max(maps)
    if largest > MAP_BYTES:
        refresh_gates_(model)
    split = verify(parent, model, batch, backend="split")
    found: dict[str, Any] = {"split_bitwise": split.bitwise, "split_error": split.max_relative_error}
    if largest <= MAP_BYTES:
        dense = verify(parent, model, batch, backend="dense")
        found["dense_error"] = dense.max_relative_error
        found["dense_layer_error"] = max(dense.layers.values(), default=0.0)
    for name, value in found.items():
        setattr(row, f"{step}_{name}", value)


def _left(planned: Plan, model: nn.Module) -> str:
    """Why convolutions with more than one tap were left, with counts; those before the last stage need no reason."""
    spatial = [item.reason for item in planned.left if is_spatial(model.get_submodule(item.name))]
    said = [reason for reason in spatial if not reason.startswith("before the last")]
    reasons = Counter(re.split(r":| \(", reason)[0] for reason in said)
    return "; ".join(f"{count}× {reason}" for reason, count in reasons.items())


@torch.no_grad()
def _open_error(model: nn.Module, example: Example) -> tuple[int, float | None]:
    """Layers of different shapes, their gates, keys and locality random: how many, and the largest error of split to
    reference."""
    layers = gpsa_layers(model)
    with captured_inputs(layers.items()) as seen:
        run_example(model, example)
    chosen: dict[str, tuple[GPSA, Tensor]] = {}
    for name, layer in layers.items():
        if name in seen and _reference_macs(layer, x := seen[name][0]) <= OPEN_MACS:
            chosen.setdefault(f"{layer} {tuple(x.shape)}", (layer, x))
    errors: list[float] = []
    for layer, x in list(chosen.values())[:OPEN_LAYERS]:
        opened = copy.deepcopy(layer)
        moved = (opened.gamma, opened.spread, opened.key, opened.raw_alpha)
        for parameter, std in zip(moved, (0.3, 0.3, 0.02, 0.3), strict=True):
            parameter.add_(torch.randn_like(parameter), alpha=std)
        outputs = []
        for backend in ("split", "reference"):
            with use_backend(opened, backend), full_precision():
                outputs.append(opened(x))
        errors.append(relative_error(*outputs))
    return len(errors), max(errors, default=None)


def _reference_macs(layer: GPSA, x: Tensor) -> float:
    rows, columns = layer.geometry.output_size(*x.shape[-2:])
    padded = layer.geometry.padded_size(*x.shape[-2:])
    queries, keys = rows * columns, padded[0] * padded[1]
    per_head = queries * layer.in_channels * (keys + layer.out_channels)
    return float(len(x) * layer.num_heads * per_head)
