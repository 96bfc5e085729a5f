"""`verify`: compare parent and child, layer by layer and end to end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from recast.config import typed
from recast.errors import RecastError
from recast.layers.attention_pool import attention_pools
from recast.layers.cmhsa import RecastLayer, gated_layers, recast_layers
from recast.layers.config import Backend
from recast.modes import in_eval
from recast.names import modules_by_name
from recast.surgery.compare import equal_predictions, paired_tensors, relative_error, worst_channel
from recast.surgery.controls import changed_layer, shifted_queries
from recast.surgery.exactness import Exactness
from recast.surgery.places import places, planned_places
from recast.surgery.plan import Plan, applied_plan
from recast.surgery.records import Step
from recast.surgery.rules import convert, is_convolution, planned_geometry
from recast.tracing.examples import Example, arguments_of, batch_of, check_values, run_example
from recast.tracing.hooks import captured_outputs, full_precision, hooked, undisturbed
from recast.tracing.observe import on_meta
from recast.tracing.outputs import tensors_of

LARGEST = 1e6
"""Values of images beyond which a comparison proves nothing: biases are lost in rounding."""
_LOCK = RLock()
"""A comparison sets modes and backends and restores them: two at once would restore each other's."""


@dataclass(frozen=True)
class Trace:
    """Outputs of a model for a batch: its own, and those of every call of a planned layer."""

    output: Any
    layers: dict[str, list[Tensor]]
    ranges: dict[str, list[Tensor]]
    """max|output − bias| of every channel (C,), of each call."""
    signal: dict[str, float]
    """Share of `ranges` that comes from what varies in the input (`Exactness.signal`)."""


@typed("model", "plan")
@torch.no_grad()
def trace(model: nn.Module, plan: Plan, batch: Example) -> Trace:
    """Run `batch` in eval mode and keep the outputs that `verify` compares. Use it before an in-place recast.

    Args:
        model: the parent.
        plan: the plan that will be applied.
        batch: images (B, C, H, W), or another example as `plan` takes it.

    Returns:
        A `Trace`, the `parent` argument of `verify`.

    Raises:
        RecastError: for a model without the plan's layers, one that is already recast, and a batch without images.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> images = torch.randn(2, 3, 8, 8)
        >>> plan = recast.plan(model, images)
        >>> before = recast.trace(model, plan, images)
        >>> recast.verify(before, recast.recast_(model, plan), images).ok()
        True
    """
    check_values(batch, model)
    ranges: dict[str, list[Tensor]] = {}
    signal: dict[str, float] = {}
    shows = _can_show(batch)

    def measure(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        if inputs[0].dim() != 4:
            got = tuple(inputs[0].shape)
            raise RecastError(f"{name or 'the model'} got {got}, expected (B, C, H, W): pass image[None] for one image")
        sizes, share = _signal(module, inputs, output)
        ranges.setdefault(name, []).append(sizes)
        signal[name] = max(signal.get(name, 0.0), share if shows else 0.0)

    with _LOCK, places(planned_places(plan.steps), model):
        layers = _layers_of(model, plan)
        done = [name for name, layer in layers.items() if isinstance(layer, RecastLayer)]
        done += attention_pools(model) if plan.pool is not None else []
        if done and len(done) == len(layers) + (plan.pool is not None):  # else only layers or pool are new
            raise RecastError(f"this network is already recast ({done[0] or 'the model'}): pass its parent")
        with hooked(layers.items(), after=measure):
            output, outputs = _run(model, layers, batch)
    if planned_places(plan.steps):  # the parent itself has no such layer, and may count the parts of a sequence
        output, _ = _run(model, {}, batch)
    return Trace(output, outputs, ranges, signal)


@typed("parent", "child", "backend")
def verify(
    parent: nn.Module | Trace,
    child: nn.Module,
    batch: Example,
    *,
    backend: Backend | None = None,
    control: bool = False,
) -> Exactness:
    """Compare `child` with its parent on `batch`: outputs, and the outputs of every recast layer.

    Runs in eval mode without TF32, and restores modes, buffers and torch's random state. Where a stride was
    removed, layers are compared at the parent's positions, the even ones of the child.

    Args:
        parent: the network before `recast_`, or a `trace` of it.
        child: the recast network.
        batch: images (B, C, H, W), or another example as `plan` takes it. Outputs may be any nest of tensors: mappings,
            lists, objects with tensors in their attributes.
        backend: compute every layer with this backend.
        control: compare again with two heads of one layer swapped, or with the attention beside a convolution added
            once (without recast layers: with the pooling's queries shifted). A comparison that does not detect this
            change is inconclusive.

    Returns:
        `Exactness`. Its `ok()` is True only if a signal reached every layer; `telling` says where the control differed.

    Raises:
        RecastError: if the outputs cannot be compared, if parent and child are the same object, or if the parent is
            another network or recast itself.

    Example:
        >>> parent = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> images = torch.randn(2, 3, 8, 8)
        >>> child = recast.recast_(copy.deepcopy(parent), recast.plan(parent, images))
        >>> recast.verify(parent, child, images).ok()
        True
        >>> recast.verify(parent, child, images, control=True).telling
        'outputs'
    """
    with _LOCK:
        result = _verify(parent, child, batch, backend)
        if control:
            with changed_layer(child) if applied_plan(child).steps else shifted_queries(child):
                result = replace(result, control=_verify(parent, child, batch, backend))
    return result


def _verify(parent: nn.Module | Trace, child: nn.Module, batch: Example, backend: Backend | None) -> Exactness:
    """Compare once."""
    plan = applied_plan(child)
    attention = {child, *recast_layers(child).values(), *attention_pools(child).values()}
    if not isinstance(parent, Trace) and (parent in child.modules() or not attention.isdisjoint(parent.modules())):
        raise RecastError("parent and child are the same network: recast a copy, recast_(copy.deepcopy(parent), plan)")
    check_values(batch, child)
    before = parent if isinstance(parent, Trace) else trace(parent, plan, batch)
    with use_backend(child, backend):
        output, outputs = _run(child, _layers_of(child, plan), batch)
        with in_eval(child), torch.no_grad():  # as it just ran
            backends = sorted({layer.chosen_backend() for layer in recast_layers(child).values()})
    if silent := [name for name in before.layers if name not in outputs]:
        raise RecastError(f"the child never calls {silent[0] or 'its layer'}: another module still calls the old layer")
    tensors = paired_tensors(output, before.output)
    equal = equal_predictions(output, before.output, tensors, batch_of(batch))
    layers = {name: _layer_error(outputs[name], ys, before.ranges[name]) for name, ys in before.layers.items()}
    signal = {step.name: before.signal.get(step.name, 0.0) for step in plan.steps}
    if plan.pool is not None:
        signal[next(iter(attention_pools(child)))] = _pool_signal(child, batch, output)
    errors = {path: worst_channel(a, b) for path, (a, b) in tensors.items()}
    path, (error, channel) = max(errors.items(), key=lambda item: item[1][0])
    worst = f"output{path}" + ("" if channel is None else f", channel {channel}")
    return Exactness(
        images=batch_of(batch),
        max_relative_error=error,
        bitwise=not error and all(torch.equal(a, b) for a, b in tensors.values()) and not any(layers.values()),
        argmax_agreement=float(equal.double().mean()),
        backend=", ".join(backends) or ("convolution" if plan.pool is None else "attention pooling"),
        layers=layers,
        predictions=equal.numel(),
        signal=signal,
        worst=worst if error > 0 else "",
    )


# --- running ----------------------------------------------------------------------------------------------------------


@contextmanager
def use_backend(model: nn.Module, backend: Backend | None) -> Iterator[None]:
    """Let every layer with gates compute with `backend` (None: each keeps its own); C-MHSA has only one."""
    before = [(layer, layer.backend) for layer in gated_layers(model).values()]
    try:
        for layer, original in before:
            layer.backend = backend or original
        yield
    finally:
        for layer, original in before:
            layer.backend = original


@torch.no_grad()
def _run(model: nn.Module, layers: dict[str, nn.Module], batch: Example) -> tuple[Any, dict[str, list[Tensor]]]:
    """Return the model's output, and those of the layers."""
    with _LOCK, in_eval(model), undisturbed(model), full_precision(), captured_outputs(layers.items()) as outputs:
        output = run_example(model, batch)
    return tree_map_only(Tensor, torch.clone, output), outputs


# --- layers and signals -----------------------------------------------------------------------------------------------


def _layers_of(model: nn.Module, plan: Plan) -> dict[str, nn.Module]:
    """Return the layers of the plan's steps in a model, inside any wrapper (torch.compile, DataParallel, the user's).

    Raises `RecastError` if one is missing.
    """
    modules = modules_by_name(model)
    first = plan.steps[0].name if plan.steps else ""
    prefixes = [n.removesuffix(first) for n in modules if f".{n}".endswith(f".{first}")] if first else [""]
    missing = first
    for prefix in prefixes:
        wanted = {step.name: prefix + step.name for step in plan.steps}
        lacking = [s.name for s in plan.steps if not _is_layer(modules.get(wanted[s.name]), plan, s)]
        if not lacking:
            return {name: modules[place] for name, place in wanted.items()}
        missing = lacking[0]
    raise RecastError(
        f"{type(model).__name__} lacks layer {missing!r} of the plan for {plan.model}: pass the network that was "
        "recast, and its parent"
    )


def _is_layer(module: nn.Module | None, plan: Plan, step: Step) -> bool:
    """Return True if a module is the convolution of a step, or the layer that it became."""
    if module is None or isinstance(module, RecastLayer) or not is_convolution(module):
        return isinstance(module, RecastLayer) or (step.fold is not None and isinstance(module, nn.Sequential))
    layer = convert(copied := on_meta(module), plan.config)
    shape = layer.in_channels, layer.out_channels, layer.groups, planned_geometry(copied, layer).kernel
    return shape == (step.input[0], step.output[0], step.groups, step.parent_geometry.kernel)


def _can_show(batch: Example) -> bool:
    """Return True if an image has two different pixels and none has values above `LARGEST`.

    Images are the tensors with three axes or more.
    """
    images = [t for t in tensors_of(arguments_of(batch)) if t.dim() > 2 and t.numel()]
    if any(t.is_floating_point() and float(t.abs().max()) > LARGEST for t in images):
        return False
    return not images or any(bool((t != t[..., :1, :1]).any()) for t in images)


def _signal(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> tuple[Tensor, float]:
    """Return max|output − bias| of every channel, and the share of the largest that varies with the input.

    The layer is linear in its input. The varying part vanishes when every pixel of all images is their mean. Of a layer
    that takes more than its input, both are what varies in the output.
    """
    x = inputs[0]
    if not output.numel():  # no boxes were found: nothing to differ
        return output.new_zeros(output.shape[1]), 0.0
    if len(inputs) > 1:
        sizes = (output - output.mean((0, 2, 3), keepdim=True)).abs().amax((0, 2, 3))
        return sizes, float(sizes.max() > 0)
    image = x[:1]
    mean = (x.mean((0, 2, 3), keepdim=True) if x.numel() > x.shape[1] else 0) + torch.zeros_like(image)
    sizes, varied = ((output - module.forward(flat)).abs().amax((0, 2, 3)) for flat in (torch.zeros_like(image), mean))
    scale = float(sizes.max())
    return sizes, float(varied.max()) / scale if scale > 0 else 0.0


def _pool_signal(child: nn.Module, batch: Example, output: Any) -> float:
    """Return how much the outputs change when the queries of the attention pooling are shifted."""
    if not _can_show(batch):
        return 0.0
    with shifted_queries(child), in_eval(child), undisturbed(child), torch.no_grad():
        moved = paired_tensors(run_example(child, batch), output)
    return max(relative_error(a, b) for a, b in moved.values())


def _layer_error(child: Sequence[Tensor], parent: Sequence[Tensor], ranges: Sequence[Tensor]) -> float:
    """Return the error over all calls of a layer; of a map s times denser, every s-th pixel is compared."""
    if len(child) != len(parent):
        return float("inf")
    errors = []
    for a, b, sizes in zip(child, parent, ranges, strict=True):
        if a.dim() == 4 and a.shape != b.shape:
            s0, s1 = (-(-c // p) for c, p in zip(a.shape[2:], b.shape[2:], strict=True))
            a = a[:, :, ::s0, ::s1]
        errors.append(relative_error(a, b, sizes))
    return max(errors)
