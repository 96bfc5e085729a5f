"""`plan` looks at a model and says what would be recast, at what cost, and why the rest stays. It changes nothing."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from recast.errors import RecastError
from recast.fields import typed
from recast.layers.cmhsa import CMHSA, RecastLayer
from recast.layers.config import PoolConfig, RecastConfig
from recast.layers.geometry import Geometry
from recast.surgery.budget import keep_within
from recast.surgery.limits import Budget
from recast.surgery.plan import GEOMETRY, Edited, Plan
from recast.surgery.pooling.find import find_place
from recast.surgery.pooling.swap import check_change, noise, put_pool_
from recast.surgery.records import Left, Place, Step
from recast.surgery.rules import computes_weight, find_rule, is_convolution, refusal
from recast.surgery.select import Where, is_none, is_spatial, select
from recast.surgery.stride import Edit, apply_edits_, plan_stride_edits, set_geometry_
from recast.surgery.wrappers import unwrapped
from recast.tracing.cost import Cost, cost_of_calls, count_parameters
from recast.tracing.examples import Example
from recast.tracing.hooks import undisturbed
from recast.tracing.observe import Call, Observation, observe, on_meta


@typed("model", "config", "budget", "pool")
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

    `example` is a batch (B, C, H, W), a tuple of arguments, a mapping of keyword arguments or a list of images, as
    detectors take them (`recast.tracing.examples`); its shapes alone matter.
    `where` is "last_stage" (the default and the papers' choice: every convolution with more than one tap whose output
    has the smallest size), "all", "stage:N" (as timm's `out_indices`; -1 is the last), names, globs, "re:REGEX", or a
    predicate `f(name, module)`. `budget` limits the tokens of a layer (default 1024) and the MACs, parameters and
    activation memory of the recast model (`surgery.limits.Budget`); layers are taken from the end. With `pool` the
    network's own pooling becomes attention too; `where="none"` then leaves every convolution as it is.

    Raises `RecastError` for a selection that matches nothing, a budget that leaves nothing, an
    example that does not fit, a stride that cannot go, or pooling that cannot be replaced.
    """
    pool, model = pool if pool is not None and pool.is_on else None, unwrapped(model)
    with torch.inference_mode(False), undisturbed(model):
        return _plan(model, example, config or RecastConfig(), where, Budget.parse(budget), pool)


def _plan(
    model: nn.Module,
    example: Example,
    config: RecastConfig,
    where: Where | None,
    limits: Budget,
    pool: PoolConfig | None,
) -> Plan:
    if is_none(where) and pool is None:
        raise RecastError(
            "where='none' recasts no convolution, and the pooling stays the network's own: nothing is left to do; "
            "select layers, or take pool.kind=single or per_class"
        )
    convolutions = _convolutions(model, needed=not is_none(where))
    watched = {name for name, module in convolutions.items() if not isinstance(module, torch.jit.ScriptModule)}
    parent = seen = observe(model, example, watched)
    planar = [n for n in seen.calls if isinstance(convolutions[n], nn.Conv2d | nn.ConvTranspose2d)]
    if planar and all(len(seen.calls[name][0].input) != 4 for name in planar):
        raise RecastError(
            f"the first convolution got {seen.calls[planar[0]][0].input}: expected (batch, C, H, W), for one image "
            "image[None]"
        )
    layers, explicit, reasons = select(where, model, convolutions, seen, config)

    edits: list[Edit] = []
    if config.stride != "keep" and layers:
        maps = [name for name in planar if len(seen.calls[name][0].input) == 4]
        spatial = {n: m for n, m in convolutions.items() if n in maps and is_spatial(m)}
        edits = plan_stride_edits(model, list(layers), spatial, seen.calls, config.stride)
        try:
            seen = observe(model, example, watched, lambda subject: apply_edits_(subject, edits))
        except RecastError as error:
            first = next(edit.name for edit in edits if edit.geometry is not None)
            raise RecastError(
                f"stride={config.stride!r}: the network does not fit together without the stride of {first} (a "
                f"shortcut that is not a module?); use stride='keep'. {error}"
            ) from error

    geometries = {edit.name: edit.geometry for edit in edits}
    steps: list[Step] = []
    added: dict[str, Cost] = {}
    for name, layer in layers.items():
        step, added[name] = _step(name, convolutions[name], layer, parent, seen, geometries.get(name))
        steps.append(step)
    fixed = sum(
        _cost(on_meta(convolutions[name]), calls, parent.batch).fixed_bytes
        for name, calls in parent.calls.items()
        if computes_weight(convolutions[name])
    )
    before, after = _whole(model, parent, fixed), _whole(model, seen, fixed)
    place, pool_cost = None, None
    if pool is not None:
        place, pool_cost = _pool(model, example, pool, seen, layers, edits)
        after += pool_cost
    steps, over, after = keep_within(steps, added, list(seen.calls), explicit, limits, after, before)
    reasons |= over
    kept = {step.name for step in steps}
    # a layer that the budget left is a convolution still, and must fit to the denser map
    edits = [edit for edit in edits if edit.geometry is None or edit.name not in kept]
    left = tuple(Left(name, reasons[name]) for name in convolutions if name in reasons)
    failed = f"planned from one real pass in eval mode, the shape-only pass failed ({seen.failure})"
    note = failed if seen.failure else ""
    return Plan(
        type(model).__name__, config, tuple(steps), left, tuple(edits), before, after, note, pool, pool_cost, place
    )


def replan(model: nn.Module, example: Example, edited: Edited) -> Plan:
    """The plan that an edited one asks for (`Plan.read_edited`): its settings, the layers of its steps, new costs.

    A step needs no more than its `name`; what else it says of the layer must be so. Raises `RecastError` otherwise.
    """
    if not edited.steps and (edited.pool is None or not edited.pool.is_on):
        raise RecastError("the plan has no step: name at least one layer to recast")
    where = list(edited.steps) or "none"
    planned = plan(model, example, edited.config, where=where, budget=Budget(tokens=None), pool=edited.pool)
    for step in planned.steps:
        found = json.loads(json.dumps(step.to_dict()))
        stated = edited.steps[step.name]
        for key in ("rule", "groups", *GEOMETRY):
            if key in stated and stated[key] != found[key]:
                raise RecastError(
                    f"{step.name} has {key} {found[key]}, the plan says {stated[key]}: steps can be taken out or added "
                    "by name, and the config can be changed; the rest follows from the model"
                )
    return planned


def _convolutions(model: nn.Module, needed: bool) -> dict[str, nn.Module]:
    """A model's convolutions by name, but not the helpers inside a parametrisation of one.

    Raises `RecastError` where they are `needed` and there is none, or one is recast already.
    """
    found = {n: m for n, m in model.named_modules() if is_convolution(m) and ".parametrizations." not in f".{n}."}
    for name, module in found.items() if needed else ():
        if isinstance(module, RecastLayer):
            raise RecastError(f"{name or 'the model'} {refusal(module)}: plan from the parent, a layer is recast once")
    if needed and not found:
        scripted = isinstance(model, torch.jit.ScriptModule)
        raise RecastError(f"{type(model).__name__} {refusal(model) if scripted else 'has no convolution'}")
    return found


# --- costs ------------------------------------------------------------------------------------------------------------


def _whole(model: nn.Module, seen: Observation, fixed: int) -> Cost:
    """Cost of a model for one image, when a pass over the batch kept `fixed` bytes that do not depend on it."""
    each = max(0, seen.activation_bytes - fixed // seen.batch)
    return Cost(count_parameters(model), seen.macs, each, fixed)


def _cost(layer: nn.Module, calls: list[Call], images: int) -> Cost:
    return cost_of_calls(layer, (call.input for call in calls), images)


def _step(
    name: str, module: nn.Module, layer: RecastLayer, parent: Observation, seen: Observation, new: Geometry | None
) -> tuple[Step, Cost]:
    """The step, and what it adds to the cost of the model whose strides are edited already; `new` is its geometry."""
    rule, geometry, config, calls = find_rule(module), layer.geometry, layer.config, seen.calls[name]
    assert rule is not None
    convolution = on_meta(module)
    replaced = before = _cost(convolution, parent.calls[name], parent.batch)
    if new is not None:
        layer.set_geometry_(new)
        assert isinstance(convolution, nn.Conv2d)
        set_geometry_(convolution, new)
    if seen is not parent:
        replaced = _cost(convolution, calls, seen.batch)
    # a size that holds the inputs of all calls: that of the largest, unless one is wide and one is high
    size = max(call.input[-2] for call in calls), max(call.input[-1] for call in calls)
    if isinstance(layer, CMHSA):
        layer.set_size_(*size)
    after = _cost(layer, calls, seen.batch)
    starts_closed = config.gate == "linear" and (config.gamma_init, config.s_init) == (0.0, 0.0)
    step = Step(
        name, rule[0].__name__, geometry, layer.geometry, layer.groups,
        (layer.in_channels, *size), (layer.out_channels, *layer.geometry.output_size(*size)),
        before, after, starts_closed and layer.geometry == geometry, len(calls),
    )  # fmt: skip
    return step, after - replaced


def _noise_like(model: nn.Module, example: Example) -> Example:
    """The example with noise for its images, as its values do not matter; two images where it has nothing else."""
    if isinstance(example, tuple) and len(example) == 1:
        example = example[0]
    if isinstance(example, Tensor):
        return noise(model, tuple(example.shape[1:]) if example.dim() == 4 else None)
    generator = torch.Generator().manual_seed(0)

    def drawn(x: Tensor) -> Tensor:
        is_image = x.dim() == 4 and x.is_floating_point()
        return torch.randn(x.shape, generator=generator).to(x) if is_image and not x.is_meta else x

    return tree_map_only(Tensor, drawn, example)


def _pool(
    model: nn.Module, example: Example, pool: PoolConfig, seen: Observation, names: Collection[str], edits: list[Edit]
) -> tuple[Place, Cost]:
    """Where attention pooling goes, and the parameters, multiply-accumulates and activation memory that it adds.

    `seen` is the pass of the network without it, after `edits`; `names` are the layers that become attention too.
    """
    place = find_place(model, _noise_like(model, example))
    check_change(model, pool, place)
    if pool.kind == "per_class" and place.classifier in names:
        raise RecastError(
            f"{place.classifier} is the classifier, which pool.kind=per_class takes apart: select other layers, or "
            "take pool.kind=single"
        )
    pooled = copy.deepcopy(model)
    put_pool_(pooled, pool, place)
    found = observe(pooled, example, set(), lambda subject: apply_edits_(subject, edits))
    parameters = count_parameters(pooled) - count_parameters(model)
    return place, Cost(parameters, found.macs - seen.macs, found.activation_bytes - seen.activation_bytes)
