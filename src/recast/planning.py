"""`plan` looks at a model and says what would be recast, at what cost, and why the rest stays. It changes nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from torch import nn

from recast.config import RecastConfig
from recast.cost import Cost, count_parameters, layer_cost
from recast.errors import RecastError
from recast.geometry import Geometry
from recast.gpsa import GPSA
from recast.rules import find_rule, is_convolution, refusal
from recast.selection import Budget, Where, is_spatial, select
from recast.shapes import Call, Example, Observation, observe
from recast.steps import Left, Plan, Step
from recast.strides import Edit, plan_stride_edits, set_geometry_
from recast.table import quantity


def plan(
    model: nn.Module,
    example: Example,
    config: RecastConfig | None = None,
    *,
    where: Where | None = None,
    budget: Budget | str | int | None = None,
) -> Plan:
    """Say which convolutions of `model` become GPSA, at what cost, and why the others stay. Reads only.

    `example` is a batch (B, C, H, W), a tuple of arguments or a mapping of keyword arguments; its shapes alone matter.
    `where` is "last_stage" (the default and the papers' choice: every convolution with more than one tap whose output
    has the smallest size), "all", names, globs, or a predicate `f(name, module)`. `budget` limits the tokens of a layer
    (default 1024) and the added activation memory (`recast.selection.Budget`). Raises `RecastError` for a selection
    that matches nothing, a budget that leaves nothing, an example that does not fit, or a stride that cannot go.
    """
    config, limits = config or RecastConfig(), Budget.parse(budget)
    convolutions = {name: module for name, module in model.named_modules() if _is_layer(name, module)}
    if already := [name for name, module in convolutions.items() if isinstance(module, GPSA)]:
        raise RecastError(f"{already[0] or 'the model'} is already GPSA: plan from the parent, a layer is recast once")
    if not convolutions:
        raise RecastError(f"{type(model).__name__} has no convolution")
    parent = seen = observe(model, example, set(convolutions))
    flat = [n for n, calls in seen.calls.items() if isinstance(convolutions[n], nn.Conv2d) and len(calls[0].input) != 4]
    if flat:
        raise RecastError(f"{flat[0] or 'the model'} got {seen.calls[flat[0]][0].input}: expected (batch, C, H, W)")
    chosen = select(where, convolutions, seen.calls)
    left = dict(chosen.left)
    reasons = {name: _why_not(name, model, convolutions, seen) for name in chosen.names}
    names = _keep_possible(reasons, chosen.explicit, left)

    geometries: dict[str, Geometry] = {}
    edits: list[Edit] = []
    if config.stride != "keep":
        spatial = {n: m for n, m in convolutions.items() if is_spatial(m) and n in seen.calls}
        geometries, edits = plan_stride_edits(model, names, spatial, seen.calls, config.stride)
        seen = _observe_edited(model, example, convolutions, geometries, edits, config)

    steps = [
        _step(name, convolutions[name], parent.calls[name], seen.calls[name], geometries.get(name), config)
        for name in names
    ]
    steps = _keep_within(steps, chosen.explicit, limits, left)
    kept = {step.name for step in steps}
    edited = {edit.name for edit in edits}
    # a layer that the budget left is a convolution still, and must fit to the denser map
    edits += [Edit(n, "geometry", g.to_dict()) for n, g in geometries.items() if n not in kept | edited]
    before = Cost(count_parameters(model), parent.macs, parent.activation_bytes)
    added = Cost(0, seen.macs, seen.activation_bytes) - Cost(0, parent.macs, parent.activation_bytes)
    for step in steps:
        convolution = _convolution_cost(convolutions[step.name], step.geometry, seen.calls[step.name])
        parameters = count_parameters(convolutions[step.name])  # a parametrised weight has more than a plain kernel
        added = added + step.after - Cost(parameters, convolution.macs, convolution.activation_bytes)
    if limits.memory is not None and added.activation_bytes > limits.memory:
        adds, allowed = (quantity(size, "B", 1024) for size in (added.activation_bytes, limits.memory))
        raise RecastError(
            f"the plan adds {adds} of activation memory per image, {allowed} are allowed "
            f"({added.activation_bytes / max(1, limits.memory):.2f}×): "
            "recast fewer layers, lower the resolution, or raise the budget (memory=…)"
        )
    note = f"planned from one real pass in eval mode, the shape-only pass failed ({seen.note})" if seen.real else ""
    ordered = tuple(Left(name, left[name]) for name in convolutions if name in left)
    return Plan(type(model).__name__, config, tuple(steps), ordered, tuple(edits), before, before + added, note)


def _is_layer(name: str, module: nn.Module) -> bool:
    """Convolutions, but not the helpers inside a parametrisation of one."""
    return is_convolution(module) and ".parametrizations." not in f".{name}."


def _why_not(name: str, model: nn.Module, convolutions: dict[str, nn.Module], seen: Observation) -> str | None:
    """Why a selected convolution cannot be recast, or None."""
    module = convolutions[name]
    if reason := refusal(module):
        return reason
    if name not in seen.calls:
        return "not reached by the example"
    # through `_parameters`: a parametrised weight is computed where it is read, and spectral norm takes a step then
    weight = module._parameters.get("weight")
    for other_name, other in model.named_modules():
        if weight is not None and other is not module and other._parameters.get("weight") is weight:
            return f"shares its weight with {other_name}, and would stop doing so"
    return None


def _keep_possible(reasons: dict[str, str | None], explicit: set[str], left: dict[str, str]) -> list[str]:
    kept: list[str] = []
    for name, reason in reasons.items():
        if reason is None:
            kept.append(name)
        elif name in explicit:
            raise RecastError(f"{name} cannot be recast: {reason}")
        else:
            left[name] = reason
    if not kept:
        first = next(iter(reasons))
        raise RecastError(f"nothing can be recast: {first} {left[first]}")
    return kept


def _keep_within(steps: list[Step], explicit: set[str], limits: Budget, left: dict[str, str]) -> list[Step]:
    kept: list[Step] = []
    for step in steps:
        if step.keys <= limits.tokens:
            kept.append(step)
            continue
        reason = (
            f"too many tokens: {step.keys} ({step.keys / limits.tokens:.1f}× the budget of {limits.tokens}); "
            f"lower the resolution or set the budget to tokens={step.keys}"
        )
        if step.name in explicit:
            raise RecastError(f"{step.name}: {reason}")
        left[step.name] = reason
    if not kept:
        smallest = min(steps, key=lambda step: step.keys)
        raise RecastError(f"nothing is within the budget: {smallest.name} has {left[smallest.name]}")
    return kept


def _observe_edited(
    model: nn.Module,
    example: Example,
    convolutions: dict[str, nn.Module],
    geometries: dict[str, Geometry],
    edits: list[Edit],
    config: RecastConfig,
) -> Observation:
    def edit(copy: nn.Module) -> None:
        apply_edits_(copy, geometries, edits)

    try:
        return observe(model, example, set(convolutions), edit)
    except RecastError as error:
        raise RecastError(
            f"stride={config.stride!r}: the network does not fit together without the stride of "
            f"{next(iter(geometries))} (a shortcut that is not a module?); use stride='keep'. {error}"
        ) from error


def apply_edits_(model: nn.Module, geometries: dict[str, Geometry], edits: list[Edit] | tuple[Edit, ...]) -> None:
    """Give the named convolutions their new geometry and carry out the edits."""
    for name, geometry in geometries.items():
        conv = model.get_submodule(name)
        assert isinstance(conv, nn.Conv2d)
        set_geometry_(conv, geometry)
    for edit in edits:
        edit.apply_(model)


def _cost(make: Callable[[], nn.Module], calls: list[Call]) -> Cost:
    """Cost of a layer over all its calls, which may differ in size."""
    total = Cost(0, 0, 0)
    for shape, count in Counter(_chw(call.input) for call in calls).items():
        cost = layer_cost(make, *shape, count)
        total = Cost(cost.parameters, total.macs + cost.macs, total.activation_bytes + cost.activation_bytes)
    return total


def _convolution_cost(module: nn.Module, geometry: Geometry, calls: list[Call]) -> Cost:
    """Cost of the convolution that a layer replaces, at the geometry and inputs it has at that moment."""
    assert isinstance(module, nn.Conv2d)
    conv = module

    def make() -> nn.Module:
        top, bottom, left, right = geometry.padding
        symmetric = (top, left) == (bottom, right)
        return nn.Conv2d(
            conv.in_channels, conv.out_channels, geometry.kernel, geometry.stride, (top, left) if symmetric else "same",
            geometry.dilation, conv.groups, conv.bias is not None, geometry.padding_mode, device="meta",
        )  # fmt: skip

    return _cost(make, calls)


def _step(
    name: str, module: nn.Module, before: list[Call], after: list[Call], geometry: Geometry | None, config: RecastConfig
) -> Step:
    assert isinstance(module, nn.Conv2d)
    found = find_rule(module)
    assert found is not None
    conv, parent_geometry = module, Geometry.of(module)
    geometry = geometry or parent_geometry

    def attention() -> nn.Module:
        return GPSA(
            conv.in_channels, conv.out_channels, geometry, groups=conv.groups, bias=conv.bias is not None,
            config=config, device="meta",
        )  # fmt: skip

    starts_closed = config.gate == "linear" and (config.gamma_init, config.s_init) == (0.0, 0.0)
    largest = max(after, key=lambda call: math.prod(call.input))
    return Step(
        name, found[0].__name__, parent_geometry, geometry, conv.groups, _chw(largest.input), _chw(largest.output),
        _convolution_cost(conv, parent_geometry, before), _cost(attention, after),
        starts_closed and geometry == parent_geometry, len(after),
    )  # fmt: skip


def _chw(shape: tuple[int, ...]) -> tuple[int, int, int]:
    return shape[-3], shape[-2], shape[-1]
