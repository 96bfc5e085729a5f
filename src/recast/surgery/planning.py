"""`plan` looks at a model and says what would be recast, at what cost, and why the rest stays. It changes nothing."""

from __future__ import annotations

import json
from dataclasses import fields

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from recast.errors import RecastError
from recast.layers.cmhsa import CMHSA, RecastLayer
from recast.layers.geometry import Geometry
from recast.run.config import PoolConfig, RecastConfig
from recast.surgery.budget import Budget, keep_within
from recast.surgery.plan import Edited, Left, Plan, Step, asked_pool
from recast.surgery.pooling.costs import pool_cost, pool_input
from recast.surgery.rules import Sharing, computes_weight, find_rule, is_convolution, refusal
from recast.surgery.select import NOT_CALLED, Where, is_spatial, select
from recast.surgery.stride import Edit, plan_stride_edits, set_geometry_
from recast.tracing.cost import Cost, count_parameters
from recast.tracing.layer_costs import LayerCosts, on_meta
from recast.tracing.observe import Call, Example, Observation, observe

NOT_SELECTED = "not selected by none"


def plan(
    model: nn.Module,
    example: Example,
    config: RecastConfig | None = None,
    *,
    where: Where | None = None,
    budget: Budget | str | int | None = None,
    pool: PoolConfig | None = None,
) -> Plan:
    """Say which convolutions of `model` become GPSA, at what cost, and why the others stay. Reads only.

    `example` is a batch (B, C, H, W), a tuple of arguments or a mapping of keyword arguments; its shapes alone matter.
    `where` is "last_stage" (the default and the papers' choice: every convolution with more than one tap whose output
    has the smallest size), "all", "stage:N" (as timm's `out_indices`; -1 is the last), names, globs, "re:REGEX", or a
    predicate `f(name, module)`. `budget` limits the tokens of a layer (default 1024) and the MACs, parameters and
    activation memory of the recast model (`surgery.budget.Budget`); layers are taken from the end. With `pool` the
    network's own pooling becomes attention too; `where="none"` then leaves every convolution as it is. Raises
    `RecastError` for a selection that matches nothing, a budget that leaves nothing, an example that does not fit, a
    stride that cannot go, or pooling that cannot be replaced.
    """
    config, limits, pool = config or RecastConfig(), Budget.parse(budget), asked_pool(pool)
    if is_none(where):
        return _plan_pool(model, example, config, pool)
    convolutions = {name: module for name, module in model.named_modules() if _is_layer(name, module)}
    if already := [name for name, module in convolutions.items() if isinstance(module, RecastLayer)]:
        name, reason = already[0], refusal(convolutions[already[0]])
        raise RecastError(f"{name or 'the model'} {reason}: plan from the parent, a layer is recast once")
    if not convolutions and isinstance(model, torch.jit.ScriptModule):
        raise RecastError(f"{type(model).__name__} {refusal(model)}")
    if not convolutions:
        raise RecastError(f"{type(model).__name__} has no convolution")
    watched = {name for name, module in convolutions.items() if not isinstance(module, torch.jit.ScriptModule)}
    parent = seen = observe(model, example, watched)
    _check_batched(convolutions, seen)
    chosen = select(where, model, convolutions, seen)
    left = dict(chosen.left)
    layers: dict[str, RecastLayer] = {}
    sharing = Sharing(model)
    reasons = {name: _why_not(name, model, convolutions, seen, sharing) for name in chosen.names}
    for name in chosen.names:
        if reasons[name] is None:
            found = _try_rule(convolutions[name], config)
            if isinstance(found, RecastLayer):
                layers[name] = found
            else:
                reasons[name] = found
    names = _keep_possible(reasons, chosen.explicit, left)

    geometries: dict[str, Geometry] = {}
    edits: list[Edit] = []
    if config.stride != "keep":
        spatial = {n: m for n, m in convolutions.items() if is_spatial(m) and n in seen.calls}
        geometries, edits = plan_stride_edits(model, names, spatial, seen.calls, config.stride)
        seen = _observe_edited(model, example, convolutions, geometries, edits, config)

    costs = LayerCosts()
    steps: list[Step] = []
    added: dict[str, Cost] = {}
    for name in names:
        step, added[name] = _step(name, convolutions[name], layers[name], parent, seen, geometries.get(name), costs)
        steps.append(step)
    fixed = sum(
        costs.of(on_meta(convolutions[name]), calls, parent.batch).fixed_bytes
        for name, calls in parent.calls.items()
        if computes_weight(convolutions[name])
    )
    before = _whole(model, parent, fixed)
    start = _whole(model, seen, fixed)
    pooling = None
    if pool is not None:
        pooling = pool_cost(model, example, pool, seen, names, lambda copy: apply_edits_(copy, geometries, edits))
        start = start + pooling
    steps, over = keep_within(steps, added, list(seen.calls), chosen.explicit, limits, start, before)
    left |= over
    kept = {step.name for step in steps}
    edited = {edit.name for edit in edits}
    # a layer that the budget left is a convolution still, and must fit to the denser map
    edits += [Edit(n, "geometry", g.to_dict()) for n, g in geometries.items() if n not in kept | edited]
    after = sum((added[name] for name in kept), start)
    note = f"planned from one real pass in eval mode, the shape-only pass failed ({seen.note})" if seen.real else ""
    ordered = tuple(Left(name, left[name]) for name in convolutions if name in left)
    return Plan(type(model).__name__, config, tuple(steps), ordered, tuple(edits), before, after, note, pool, pooling,
                None if pool is None else pool_input(example))  # fmt: skip


def is_none(where: Where | None) -> bool:
    """Whether a selection is "none": no convolution."""
    return where == "none" or (isinstance(where, list | tuple) and list(where) == ["none"])


def _plan_pool(model: nn.Module, example: Example, config: RecastConfig, pool: PoolConfig | None) -> Plan:
    """A plan without steps: attention pooling alone."""
    if pool is None:
        raise RecastError(
            "where='none' recasts no convolution, and the pooling stays the network's own: nothing is left to do; "
            "select layers, or take pool.kind=single or per_class"
        )
    seen = observe(model, example, set())
    before, added = _whole(model, seen, 0), pool_cost(model, example, pool, seen)
    left = tuple(Left(name, NOT_SELECTED) for name, module in model.named_modules() if _is_layer(name, module))
    return Plan(
        type(model).__name__, config, (), left, (), before, before + added, "", pool, added, pool_input(example)
    )


def _whole(model: nn.Module, seen: Observation, fixed: int) -> Cost:
    """Cost of a model for one image, when a pass over the batch kept `fixed` bytes that do not depend on it."""
    each = max(0, seen.activation_bytes - fixed // seen.batch)
    return Cost(count_parameters(model), seen.macs, each, fixed)


def replan(model: nn.Module, example: Example, edited: Edited) -> Plan:
    """The plan that an edited one asks for (`Plan.read_edited`): its settings, the layers of its steps, new costs.

    A step needs no more than its `name`; what else it says of the layer must be so. Raises `RecastError` otherwise.
    """
    if not edited.steps and edited.pool is None:
        raise RecastError("the plan has no step: name at least one layer to recast")
    where = list(edited.steps) or "none"
    planned = plan(model, example, edited.config, where=where, budget=Budget(tokens=None), pool=edited.pool)
    for step in planned.steps:
        found = json.loads(json.dumps(step.to_dict()))
        stated = edited.steps[step.name]
        for key in ("rule", "groups", *(field.name for field in fields(Geometry))):
            if key in stated and stated[key] != found[key]:
                raise RecastError(
                    f"{step.name} has {key} {found[key]}, the plan says {stated[key]}: steps can be taken out or added "
                    "by name, and the config can be changed; the rest follows from the model"
                )
    return planned


def _check_batched(convolutions: dict[str, nn.Module], seen: Observation) -> None:
    """Raise where no two-dimensional convolution got a batch of maps."""
    shapes = [calls[0].input for n, calls in seen.calls.items() if _is_planar(convolutions[n])]
    if shapes and all(len(shape) != 4 for shape in shapes):
        raise RecastError(f"the first convolution got {shapes[0]}: expected (batch, C, H, W)")


def _is_planar(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d | nn.ConvTranspose2d)


def _is_layer(name: str, module: nn.Module) -> bool:
    """Convolutions, but not the helpers inside a parametrisation of one."""
    return is_convolution(module) and ".parametrizations." not in f".{name}."


def _why_not(
    name: str, model: nn.Module, convolutions: dict[str, nn.Module], seen: Observation, sharing: Sharing
) -> str | None:
    """Why a selected convolution cannot be recast, or None."""
    module = convolutions[name]
    if reason := refusal(module):
        return reason
    if name not in seen.calls:
        return NOT_CALLED
    if any(len(call.input) != 4 for call in seen.calls[name]):
        return f"got {seen.calls[name][0].input}, expected (batch, C, H, W)"
    if any(call.num_arguments > 1 for call in seen.calls[name]):
        return "is called with more than its input (output_size?), which the new layer does not take"
    if other := sharing.elsewhere(module):
        return f"shares its {other}, and would stop doing so"
    if isinstance(_parent_of(model, name), OptimizedModule):
        return "is compiled by itself, and its wrapper would go on running it: recast first, then compile"
    return None


def _parent_of(model: nn.Module, name: str) -> nn.Module | None:
    return model.get_submodule(name.rpartition(".")[0]) if name else None


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


def _try_rule(module: nn.Module, config: RecastConfig) -> RecastLayer | str:
    """The layer that a module becomes, on the meta device; or why it cannot be."""
    found = find_rule(module)
    assert found is not None
    try:
        return found[1](on_meta(module), config)
    except RecastError as error:
        return str(error)


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


def _step(
    name: str,
    module: nn.Module,
    layer: RecastLayer,
    parent: Observation,
    seen: Observation,
    geometry: Geometry | None,
    costs: LayerCosts,
) -> tuple[Step, Cost]:
    """The step, and what it adds to the cost of the model whose strides are edited already."""
    found = find_rule(module)
    assert found is not None
    parent_geometry, config = layer.geometry, layer.config
    geometry = geometry or parent_geometry
    convolution = on_meta(module)
    before = costs.of(convolution, parent.calls[name], parent.batch)
    if geometry != parent_geometry:
        layer.set_geometry_(geometry)
        assert isinstance(convolution, nn.Conv2d)
        set_geometry_(convolution, geometry)
    size = _largest(seen.calls[name])
    if isinstance(layer, CMHSA):
        layer.set_size_(*size)
    replaced = costs.of(convolution, seen.calls[name], seen.batch)
    after = costs.of(layer, seen.calls[name], seen.batch)
    starts_closed = config.gate == "linear" and (config.gamma_init, config.s_init) == (0.0, 0.0)
    step = Step(
        name, found[0].__name__, parent_geometry, geometry, layer.groups,
        (layer.in_channels, *size), (layer.out_channels, *geometry.output_size(*size)),
        before, after, starts_closed and geometry == parent_geometry, len(seen.calls[name]),
    )  # fmt: skip
    return step, after - replaced


def _largest(calls: list[Call]) -> tuple[int, int]:
    """Rows and columns that hold the inputs of all calls: those of the largest, unless one is wide and one is high."""
    return max(call.input[-2] for call in calls), max(call.input[-1] for call in calls)
