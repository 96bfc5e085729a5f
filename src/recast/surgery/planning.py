"""`plan`: the layers to recast, their cost, and the reason why each other convolution stays. Changes nothing."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from recast.config import Count, typed
from recast.errors import RecastError
from recast.layers.beside import AttentionBeside
from recast.layers.cmhsa import CMHSA, RecastLayer
from recast.layers.config import BesideGate, LinearGate, RecastConfig
from recast.layers.geometry import Geometry
from recast.layers.pool_config import AttentionPooling, PoolConfig
from recast.names import modules_by_name
from recast.surgery.places import NO_SEQUENCE, PassThrough, new_layers, places
from recast.surgery.plan import Plan
from recast.surgery.pooling.find import find_place
from recast.surgery.pooling.swap import check_change, put_pool_
from recast.surgery.records import Left, Place, Step
from recast.surgery.rules import computes_weight, find_rule, is_convolution, planned_geometry, refusal
from recast.surgery.select import Where, is_none, is_spatial, select
from recast.surgery.stride import Edit, apply_edits_, plan_stride_edits, set_geometry_
from recast.surgery.wrappers import whole
from recast.tracing.cost import Cost, cost_of_calls, count_parameters
from recast.tracing.examples import Example
from recast.tracing.hooks import undisturbed
from recast.tracing.observe import Call, Observation, observe, on_meta

MAX_TOKENS = 1024
"""Tokens above which a map of a layer takes much memory."""


@typed("model", "config", "max_tokens", "pool")
def plan(
    model: nn.Module,
    example: Example,
    config: RecastConfig | None = None,
    *,
    where: Where | None = None,
    max_tokens: Count | None = MAX_TOKENS,
    pool: PoolConfig | None = None,
) -> Plan:
    """Plan which convolutions of `model` become attention, at what cost, and why the others stay. Reads only.

    Args:
        model: the network, in any wrapper of torch or timm.
        example: images (B, C, H, W), a tuple of arguments, a mapping of keyword arguments, or a list of images, as
            detectors take them (`recast.tracing.examples`). Only its shapes matter.
        config: how a convolution becomes attention. Default: `RecastConfig()`.
        where: "last_stage" (the papers' choice: every convolution with more than one tap whose output has the smallest
            size, of a part named `backbone` if there is one), "last_of_blocks" (of these, the last of each block),
            "last" (of these, the last), "all", "stage:N" (a size of the maps, 0 the largest; -1 is the last), names, or
            globs. "none" requires `pool`. Default: "last_of_blocks" for gate="beside", else "last_stage".
        max_tokens: layers with more tokens (padded pixels) stay convolutions; a layer that `where` names in full must
            not have more. None: any number.
        pool: replace the network's own pooling by attention.

    Returns:
        The `Plan`, for `recast_`.

    Raises:
        RecastError: for a selection that leaves no layer, a layer named in full that has too many tokens, an example
            that the model does not take, a stride that cannot be removed, or pooling that cannot be replaced.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        >>> plan = recast.plan(model, torch.randn(1, 3, 16, 16), where=["2"])
        >>> [step.name for step in plan.steps], plan.steps[0].exact
        (['2'], True)
    """
    attention, model = pool if isinstance(pool, AttentionPooling) else None, whole(model)
    with torch.inference_mode(False), undisturbed(model):
        return _plan(model, example, config or RecastConfig(), where, max_tokens, attention)


def _plan(
    model: nn.Module, example: Example, config: RecastConfig, where: Where | None, max_tokens: int | None,
    pool: AttentionPooling | None, in_full: Collection[str] | None = None,
) -> Plan:  # fmt: skip
    """Plan. `in_full`: layers that must not have more tokens. Default: those that `where` names in full."""
    if is_none(where) and pool is None:
        raise RecastError("where='none' without pool leaves nothing to plan: select layers, or pass a pool")
    convolutions = _convolutions(model, config, needed=not is_none(where))
    parent = _observe_parent(model, example, convolutions)
    layers, explicit, reasons = select(where, model, convolutions, parent, config)
    has_places = all(isinstance(convolutions[name], PassThrough) for name in layers)
    if isinstance(config, BesideGate) and config.beside == "block" and not has_places:
        if not (ends := new_layers(model, example, parent, layers)):
            raise RecastError(f"{[*layers][-1]} is {NO_SEQUENCE}; use beside=convolution")
        in_full, channels = {ends[name][0] for name in explicit & ends.keys()}, dict(ends.values())
        with places(channels, model):
            planned = _plan(model, example, config, [*channels], max_tokens, pool, in_full)
        left = {each.name: each.reason for each in planned.left}
        stay = {name: left.get(end, f"attention follows its blocks ({end})") for name, (end, _) in ends.items()}
        reasons |= {name: stay.get(name, NO_SEQUENCE) for name in layers}
        return replace(planned, left=tuple(Left(name, reasons[name]) for name in convolutions))
    edits = _stride_edits(model, list(layers), convolutions, parent, config)
    edited = _observe_edited(model, example, convolutions, edits) if edits else parent

    geometries = {edit.name: edit.geometry for edit in edits}
    steps: list[Step] = []
    added: dict[str, Cost] = {}
    for name, layer in layers.items():
        step, added[name] = _step(name, convolutions[name], layer, parent, edited, geometries.get(name))
        steps.append(step)
    fixed = _fixed_bytes(convolutions, parent)
    before, after = _whole(model, parent, fixed), _whole(model, edited, fixed)
    place, pool_cost = None, None
    if pool is not None:
        place, pool_cost = _pool(model, example, pool, edited, layers, edits)
        after += pool_cost

    too_large = _too_large(steps, explicit if in_full is None else in_full, max_tokens)
    reasons |= too_large
    steps = [step for step in steps if step.name not in too_large]
    recast = {step.name for step in steps}
    after = sum((added[name] for name in recast), after)
    # a layer that has too many tokens stays a convolution, and must fit the denser map
    edits = [edit for edit in edits if edit.geometry is None or edit.name not in recast]
    unchanged = tuple(Left(name, reasons[name]) for name in convolutions if name in reasons)
    counted = before, after, edited.note
    return Plan(type(model).__name__, config, tuple(steps), unchanged, tuple(edits), *counted, pool, pool_cost, place)


def _too_large(steps: list[Step], explicit: Collection[str], max_tokens: int | None) -> dict[str, str]:
    """Return the reason for every step with too many tokens. Raises `RecastError` for an `explicit` one, or all."""
    reasons = {
        step.name: f"has too many tokens: {step.keys} > max_tokens={max_tokens}; lower the resolution or raise it"
        for step in steps
        if max_tokens is not None and step.keys > max_tokens
    }
    refused = next((name for name in reasons if name in explicit), None)
    if refused is None and steps and len(reasons) == len(steps):
        refused = steps[-1].name
    if refused is not None:
        raise RecastError(f"{refused or 'the model'} {reasons[refused]}")
    return reasons


def _watched(convolutions: dict[str, nn.Module]) -> set[str]:
    """Return the names of the convolutions that hooks can watch: all but those of TorchScript."""
    return {name for name, module in convolutions.items() if not isinstance(module, torch.jit.ScriptModule)}


def _planar(convolutions: dict[str, nn.Module], parent: Observation) -> list[str]:
    """Return the names of the 2-d convolutions of torch that were called."""
    return [name for name in parent.calls if isinstance(convolutions[name], nn.Conv2d | nn.ConvTranspose2d)]


def _observe_parent(model: nn.Module, example: Example, convolutions: dict[str, nn.Module]) -> Observation:
    """Run the example. Raises `RecastError` if the convolutions get an image without its batch dimension."""
    parent = observe(model, example, _watched(convolutions))
    planar = _planar(convolutions, parent)
    if planar and all(len(parent.calls[name][0].input) != 4 for name in planar):
        got = f"{planar[0] or 'the model'} got {parent.calls[planar[0]][0].input}"
        raise RecastError(f"{got}, expected (B, C, H, W): pass image[None] for one image")
    return parent


def _stride_edits(
    model: nn.Module, names: list[str], convolutions: dict[str, nn.Module], parent: Observation, config: RecastConfig
) -> list[Edit]:
    """Return the edits that remove the strides of the layers `names`; none for stride="keep"."""
    if config.stride == "keep" or not names:
        return []
    maps = [name for name in _planar(convolutions, parent) if len(parent.calls[name][0].input) == 4]
    spatial = {name: module for name, module in convolutions.items() if name in maps and is_spatial(module)}
    return plan_stride_edits(model, names, spatial, parent.calls)


def _observe_edited(
    model: nn.Module, example: Example, convolutions: dict[str, nn.Module], edits: list[Edit]
) -> Observation:
    """Run the example through the edited network. Raises `RecastError` if its shapes do not fit together."""
    try:
        return observe(model, example, _watched(convolutions), lambda subject: apply_edits_(subject, edits))
    except RecastError as error:
        first = next(edit.name for edit in edits if edit.geometry is not None)
        problem = f"stride='remove': shapes do not match without the stride of {first}"
        raise RecastError(f"{problem}; use stride='keep'. {error}") from error


def _convolutions(model: nn.Module, config: RecastConfig, needed: bool) -> dict[str, nn.Module]:
    """Return the convolutions of a model by name, without helpers inside parametrisations.

    Raises `RecastError` if they are `needed` and there is none, or one is recast already.
    """
    inside = {m.conv for m in model.modules() if isinstance(m, AttentionBeside)}
    modules = ((name, m) for name, m in modules_by_name(model).items() if m not in inside)
    layers = {name: m for name, m in modules if is_convolution(m) and ".parametrizations." not in f".{name}."}
    for name, module in layers.items() if needed else ():
        if isinstance(module, RecastLayer):
            raise RecastError(f"{name or 'the model'} {refusal(module, config)}: plan its parent instead")
    if needed and not _watched(layers):
        scripted = next((m for m in model.modules() if isinstance(m, torch.jit.ScriptModule)), None)
        reason = "has no convolution" if scripted is None else refusal(scripted, config)
        raise RecastError(f"{type(scripted or model).__name__} {reason}")
    return layers


# --- costs ------------------------------------------------------------------------------------------------------------


def _whole(model: nn.Module, observed: Observation, fixed: int) -> Cost:
    """Return the cost of a model for one image; `fixed` of the observed bytes do not depend on the batch."""
    each = max(0, observed.activation_bytes - fixed // observed.batch)
    return Cost(count_parameters(model), observed.macs, each, fixed)


def _fixed_bytes(convolutions: dict[str, nn.Module], parent: Observation) -> int:
    """Return the bytes of kernels that are computed in the forward pass: kept once, whatever the batch."""
    return sum(
        _cost(on_meta(convolutions[name]), calls, parent.batch).fixed_bytes
        for name, calls in parent.calls.items()
        if computes_weight(convolutions[name])
    )


def _cost(layer: nn.Module, calls: list[Call], images: int) -> Cost:
    return cost_of_calls(layer, (call.input for call in calls), images)


def _step(
    name: str, module: nn.Module, layer: RecastLayer, parent: Observation, edited: Observation, new: Geometry | None
) -> tuple[Step, Cost]:
    """Return the step, and its share in the cost of the model with edited strides; `new` is the edited geometry."""
    geometry = planned_geometry(module, layer)
    rule, config, calls = find_rule(module), layer.config, edited.calls[name]
    convolution = on_meta(module)
    replaced = before = _cost(convolution, parent.calls[name], parent.batch)
    if new is not None:
        layer.set_geometry_(new)
        assert isinstance(convolution, nn.Conv2d)
        set_geometry_(convolution, new)
    if edited is not parent:
        replaced = _cost(convolution, calls, edited.batch)
    # a size that holds the inputs of all calls: that of the largest, unless one is wide and one is high
    size = max(call.input[-2] for call in calls), max(call.input[-1] for call in calls)
    if isinstance(layer, CMHSA):
        layer.set_size_(*size)
    after = _cost(layer, calls, edited.batch)
    is_open = getattr(config, "gamma_init", 0.0) or getattr(config, "s_init", 0.0)
    starts_closed = isinstance(config, BesideGate | LinearGate) and not is_open
    height, width = max((call.output[2:] for call in calls), key=math.prod) if new is None else new.output_size(*size)
    kind = (type(module) if rule is None else rule[0]).__name__
    kind += " (by probing)" if rule is None and not isinstance(layer, AttentionBeside) else ""
    step = Step(
        name, kind, geometry, new or geometry, layer.groups,
        (layer.in_channels, *size), (layer.out_channels, height, width),
        before, after, starts_closed and new is None, len(calls), isinstance(layer, AttentionBeside),
    )  # fmt: skip
    return step, after - replaced


def _noise_like(model: nn.Module, example: Example) -> Example:
    """Return the example with noise for its images, on the device of the model's weights."""
    generator, parameter = torch.Generator().manual_seed(0), next(model.parameters(), None)

    def drawn(x: Tensor) -> Tensor:
        is_image = x.dim() == 4 and x.is_floating_point()
        return torch.randn(x.shape, generator=generator).to(x if parameter is None else parameter) if is_image else x

    return tree_map_only(Tensor, drawn, example)


def _pool(
    model: nn.Module, example: Example, pool: AttentionPooling, edited: Observation, names: Collection[str],
    edits: list[Edit],
) -> tuple[Place, Cost]:  # fmt: skip
    """Return the place of attention pooling, and the parameters, MACs and activation memory that it adds.

    `edited` is the pass without it, after `edits`; `names` are the layers that become attention too.
    """
    place = find_place(model, _noise_like(model, example))
    check_change(model, pool, place)
    if pool.kind == "per_class" and place.classifier in names:
        problem = f"pool.kind=per_class replaces the classifier {place.classifier}, which is also selected"
        raise RecastError(f"{problem}: select other layers, or use pool.kind=single")
    pooled = copy.deepcopy(model)
    put_pool_(pooled, pool, place)
    with_pool = observe(pooled, example, set(), lambda subject: apply_edits_(subject, edits))
    parameters = count_parameters(pooled) - count_parameters(model)
    return place, Cost(parameters, with_pool.macs - edited.macs, with_pool.activation_bytes - edited.activation_bytes)
