"""`recast_`: apply a plan to a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from recast.config import typed
from recast.errors import RecastError, suggest
from recast.layers.beside import AttentionBeside
from recast.layers.cmhsa import CMHSA, RecastLayer
from recast.names import modules_by_name
from recast.surgery.folding.forms import as_folded, guard_merging_
from recast.surgery.places import places, planned_places
from recast.surgery.plan import NOTHING, Plan, plan_of, set_plan_
from recast.surgery.pooling.swap import put_pool_
from recast.surgery.records import Step
from recast.surgery.rules import check_finite, convert, planned_geometry, refusal
from recast.surgery.stride import Edit, apply_edits_, check_edits, replace_module_
from recast.surgery.wrappers import changeable
from recast.tracing.examples import check_not_lazy


@typed("model", "plan", "steps")
@torch.inference_mode(False)
def recast_(model: nn.Module, plan: Plan, *, steps: Sequence[str] | None = None) -> nn.Module:
    """Put attention beside the planned convolutions of `model`, or replace them (and the planned pooling) by it.

    In place. With gate="beside", and with the initial linear gate and `stride="keep"`, the model computes exactly the
    same function; attention pooling that starts as the average adds rounding. Beside attention, a convolution stays the
    same object with the same parameters. A network in torch.compile, DataParallel or an average of weights is recast
    inside its wrapper.

    Kernels and biases stay the same `Parameter` objects (unless they are computed, or transposed), but an optimizer
    created before lacks the new parameters: create it afterwards, or use `recast_during_training_`.

    Args:
        model: the network that was planned.
        plan: from `plan`.
        steps: names of the steps to take now. Default: all, and the pool. Later calls with the same plan may take
            others, and `attention_pool_(model, config=plan.pool)` the pool.

    Returns:
        The model; a new one if it is a convolution itself.

    Raises:
        RecastError: before any change, if the plan is for another model, a layer or the pooling is already recast,
            weights are not finite, or the model is in DistributedDataParallel.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> images = torch.randn(2, 3, 8, 8)
        >>> before = model(images)
        >>> model = recast.recast_(model, recast.plan(model, images)).eval()
        >>> type(model[0]).__name__, torch.equal(model(images), before)
        ('AttentionBeside', True)
    """
    if steps is not None and not steps:
        return model
    if (network := changeable(model)) is not model:
        if any(step.name == "" for step in plan.steps):
            raise RecastError(
                f"{type(model).__name__} wraps the convolution itself: recast the convolution, and wrap it again"
            )
        recast_(network, plan, steps=steps)
        return model
    chosen = plan if steps is None else plan.only(steps).without_pool()
    check_not_lazy(model)
    with places(planned_places(chosen.steps), model):
        return _recast_(model, plan, chosen)


def _recast_(model: nn.Module, plan: Plan, chosen: Plan) -> nn.Module:
    """Take the `chosen` part of a plan, in a network that has no wrapper and every layer."""
    done = plan_of(model)
    modules, layers = check_recast(model, plan, chosen)
    edits = () if done is not None and done.steps else _edits(plan, chosen.steps)
    check_edits(model, edits, plan.model)
    if chosen.pool is not None:  # before the steps: it may raise, and nothing has changed yet
        if chosen.place is None:
            raise RecastError("the plan has a pool without a place: plan again")
        put_pool_(model, chosen.pool, chosen.place)

    apply_edits_(model, edits)
    for name, layer in layers.items():
        _keep_parameters_(modules[name], layer)
        if name == "":
            model = layer
        else:
            replace_module_(model, modules[name], layer)
    guard_merging_(model)
    set_plan_(model, _applied(plan, chosen, done))
    return model


def check_recast(model: nn.Module, plan: Plan, chosen: Plan) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Return the convolutions of the `chosen` steps of `plan` and their new layers; `model` is only read.

    Raises `RecastError` as `recast_` does.
    """
    if not chosen.steps and chosen.pool is None and plan.model != (kind := type(model).__name__):
        raise RecastError(f"the plan is for another model, {plan.model} and not {kind}, and has no step")
    done, by_name = plan_of(model), modules_by_name(model)
    begun = done is not None and bool(done.steps)
    if done is not None and begun and chosen.steps:  # a partly recast model continues with its plan
        taken = {step.name for step in done.steps}
        if again := [step.name for step in chosen.steps if step.name in taken]:
            if not isinstance(by_name[again[0]], RecastLayer):
                raise RecastError(f"{again[0]} was recast and folded: recast the network as it was before fold_")
            raise RecastError(f"{again[0] or 'the model'} is already recast: a plan is applied once")
        if done.config != plan.config or plan.edits != done.edits[: len(plan.edits)]:
            raise RecastError("the model was recast with another plan: use that one, or start from the parent")
    modules = {step.name: _checked(model, by_name, plan, step) for step in chosen.steps}
    layers = {step.name: _layer(modules[step.name], plan, step, continued=begun) for step in chosen.steps}
    return modules, layers


def _checked(model: nn.Module, modules: dict[str, nn.Module], plan: Plan, step: Step) -> nn.Module:
    """Return the convolution of a step. Raises `RecastError` if it is not the planned one."""
    if (module := modules.get(step.name)) is None:
        raise RecastError(
            f"the plan is for another model: {type(model).__name__} has no layer {step.name!r} "
            f"(planned for {plan.model}).{suggest(step.name, modules)}"
        )
    if isinstance(module, RecastLayer):
        raise RecastError(f"{step.name or 'the model'} is already recast: a plan is applied once")
    if reason := refusal(module, plan.config):
        raise RecastError(f"{step.name} cannot be recast: {reason}")
    check_finite(step.name, module)
    return module


def _layer(module: nn.Module, plan: Plan, step: Step, continued: bool) -> nn.Module:
    """Return the new layer of a step; `module` is only read.

    In a model that is partly recast already (`continued`) it has the step's new geometry.
    """
    layer = convert(module, plan.config)
    expected = step.geometry if continued else step.parent_geometry
    geometry = planned_geometry(module, layer)
    shape = (layer.in_channels, layer.out_channels, geometry, layer.groups)
    if shape != (step.input[0], step.output[0], expected, step.groups):
        raise RecastError(
            f"the plan is for another model: {step.name} is {shape[0]} → {shape[1]} {shape[2]}, "
            f"planned {step.input[0]} → {step.output[0]} {expected}"
        )
    if geometry != step.geometry and not isinstance(layer, AttentionBeside):
        layer.set_geometry_(step.geometry)
    if isinstance(layer, CMHSA):
        layer.set_size_(*step.input[1:])
    return layer if step.fold is None or isinstance(layer, CMHSA) else as_folded(layer, step.fold)


def _keep_parameters_(convolution: nn.Module, layer: nn.Module) -> None:
    """Put the convolution's parameters in the places of equal ones: an optimizer goes on training them."""
    for name, own in convolution._parameters.items():
        made = layer._parameters.get(name)
        if own is not None and made is not None and own.shape == made.shape and torch.equal(own, made):
            layer.register_parameter(name, own)


def _applied(plan: Plan, chosen: Plan, done: Plan | None) -> Plan:
    """Return the plan of the model as it is now, for a replay.

    It holds the steps taken so far, the new geometries of waiting steps as edits, the pool, and their costs.
    """
    if done is not None and not chosen.steps:
        if chosen.pool is None:  # nothing was done
            return done
        added = plan.pool_cost or NOTHING
        return replace(done, pool=plan.pool, pool_cost=plan.pool_cost, place=plan.place, after=done.after + added)
    inside = None if done is None else done.pool
    if chosen.pool is None and inside != plan.pool:
        plan = replace(plan.without_pool(), pool=inside, place=None if done is None else done.place)
    steps = chosen.steps if done is None else done.steps + chosen.steps
    after = sum((step.before - step.after for step in _waiting(plan, steps)), plan.after)
    return replace(plan, steps=steps, edits=_edits(plan, steps), after=after)


def _waiting(plan: Plan, taken: Sequence[Step]) -> list[Step]:
    names = {step.name for step in taken}
    return [step for step in plan.steps if step.name not in names]


def _edits(plan: Plan, taken: Sequence[Step]) -> tuple[Edit, ...]:
    """Return the edits of the plan, and the new geometries of convolutions whose step is not taken yet."""
    changed = [step for step in _waiting(plan, taken) if step.geometry != step.parent_geometry]
    return (*plan.edits, *(Edit(step.name, "geometry", step.geometry) for step in changed))
