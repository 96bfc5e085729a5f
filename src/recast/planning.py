"""`plan` looks at a model and says what would be recast, at what cost, and why the rest stays. It changes nothing."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from recast.config import RecastConfig
from recast.cost import Cost, count_parameters, layer_cost
from recast.errors import RecastError
from recast.geometry import Geometry
from recast.gpsa import GPSA
from recast.rules import find_rule, is_convolution, refusal
from recast.selection import Budget, Where, is_spatial, select
from recast.shapes import Call, Example, Observation, observe
from recast.strides import Edit, plan_stride_edits, set_geometry_

VERSION = 1


@dataclass(frozen=True)
class Step:
    """One convolution that becomes GPSA. Sizes are (channels, rows, columns) at the example; costs are per image."""

    name: str
    rule: str
    parent_geometry: Geometry
    geometry: Geometry
    groups: int
    input: tuple[int, int, int]
    output: tuple[int, int, int]
    before: Cost
    after: Cost
    exact: bool
    calls: int = 1
    bias_added: bool = False
    """Calibration gave the layer a bias that the convolution did not have."""
    folded: bool = False
    """The layer was folded back into a convolution."""

    @property
    def queries(self) -> int:
        """Output pixels."""
        return self.output[1] * self.output[2]

    @property
    def keys(self) -> int:
        """Tokens: pixels of the explicitly padded input."""
        rows, columns = self.geometry.padded_size(*self.input[1:])
        return rows * columns

    def to_dict(self) -> dict[str, Any]:
        """JSON-able fields, with what a reader wants to see beside what a replay needs."""
        fields = {k: getattr(self, k) for k in ("name", "rule", "groups", "exact", "calls", "bias_added", "folded")}
        return {
            **fields,
            **self.geometry.to_dict(),
            "parent_geometry": self.parent_geometry.to_dict(),
            "input": self.input,
            "output": self.output,
            "heads": self.geometry.num_heads,
            "queries": self.queries,
            "keys": self.keys,
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
        }

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Step:
        """The inverse of `to_dict`."""
        geometry = {k: d[k] for k in ("kernel", "stride", "padding", "padding_mode", "dilation")}
        return cls(
            d["name"], d["rule"], Geometry.from_dict(d["parent_geometry"]), Geometry.from_dict(geometry), d["groups"],
            tuple(d["input"]), tuple(d["output"]), Cost(**d["before"]), Cost(**d["after"]), d["exact"], d["calls"],
            d["bias_added"], d["folded"],
        )  # fmt: skip


@dataclass(frozen=True)
class Left:
    """A convolution that stays as it is, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """What `recast_` will do, as data: printed, reviewed, stored and replayed."""

    model: str
    """Class name of the model it was made for."""
    config: RecastConfig
    steps: tuple[Step, ...]
    left: tuple[Left, ...]
    edits: tuple[Edit, ...]
    before: Cost
    after: Cost
    note: str = ""

    def to_json(self) -> str:
        """Everything needed to replay the plan, as indented JSON."""
        document = {
            "version": VERSION,
            "model": self.model,
            "config": asdict(self.config),
            "steps": [step.to_dict() for step in self.steps],
            "left": [asdict(item) for item in self.left],
            "edits": [asdict(edit) for edit in self.edits],
            "totals": {"before": self.before.to_dict(), "after": self.after.to_dict()},
            "note": self.note,
        }
        return json.dumps(document, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The inverse of `to_json`. Raises `RecastError` if the text is not a plan of this version."""
        try:
            d = json.loads(text)
            if d["version"] != VERSION:
                raise RecastError(f"a plan of version {VERSION} was expected, got version {d['version']}: plan again")
            config = dict(d["config"])
            if config["gate_range"] is not None:
                config["gate_range"] = tuple(config["gate_range"])
            return cls(
                d["model"], RecastConfig(**config), tuple(map(Step.from_dict, d["steps"])),
                tuple(Left(**item) for item in d["left"]), tuple(Edit(**edit) for edit in d["edits"]),
                Cost(**d["totals"]["before"]), Cost(**d["totals"]["after"]), d["note"],
            )  # fmt: skip
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise RecastError(f"this is not a plan ({type(error).__name__}: {error})") from error

    def only(self, names: list[str]) -> Plan:
        """The same plan with some of its steps. Raises `RecastError` for a name that is no step."""
        known = {step.name for step in self.steps}
        if unknown := [name for name in names if name not in known]:
            raise RecastError(f"the plan has no step {unknown[0]!r}; its steps are {', '.join(known) or 'none'}")
        return replace(self, steps=tuple(step for step in self.steps if step.name in names))

    def __str__(self) -> str:
        from recast.table import plan_table

        return plan_table(self)


def plan(
    model: nn.Module,
    example: Example,
    config: RecastConfig | None = None,
    *,
    where: Where | None = None,
    budget: Budget | str | int | None = None,
) -> Plan:
    """Say which convolutions of `model` become GPSA, at what cost, and why the others stay. Reads only.

    `example` is a batch (B, C, H, W), a tuple of arguments or a mapping of keyword arguments; only its shapes matter.
    `where` is "last_stage" (the default and the papers' choice: every convolution with a kernel larger than 1×1 whose output
    has the smallest size), "all", names, globs, or a predicate `f(name, module)`. `budget` limits tokens per layer (default
    1024) and added activation memory (`recast.selection.Budget`). Raises `RecastError` for a selection that matches nothing,
    a budget that leaves nothing, an example that does not fit, or a stride that cannot be taken out.
    """
    config, limits = config or RecastConfig(), Budget.parse(budget)
    convolutions = {name: module for name, module in model.named_modules() if _own(name, module)}
    if already := [name for name, module in convolutions.items() if isinstance(module, GPSA)]:
        raise RecastError(f"{already[0] or 'the model'} is already GPSA: plan from the parent, a layer is recast once")
    if not convolutions:
        raise RecastError(f"{type(model).__name__} has no convolution")
    parent = seen = observe(model, example, set(convolutions))
    chosen = select(where, convolutions, seen.calls)
    left = dict(chosen.left)
    names = _keep_possible(chosen.names, chosen.explicit, convolutions, seen, left)

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
    before = Cost(count_parameters(model), parent.macs, parent.activation_bytes)
    added = Cost(0, seen.macs, seen.activation_bytes) - Cost(0, parent.macs, parent.activation_bytes)
    for step in steps:
        added = added + step.after - _convolution_cost(convolutions[step.name], step.geometry, step.input, step.calls)
    if limits.memory is not None and added.activation_bytes > limits.memory:
        raise RecastError(
            f"the plan adds {added.activation_bytes:,} bytes of activation memory per image, {limits.memory:,} are allowed: "
            "recast fewer layers, lower the resolution, or raise the budget (memory=…)"
        )
    note = f"planned from one real pass in eval mode, the shape-only pass failed ({seen.note})" if seen.real else ""
    ordered = tuple(Left(name, left[name]) for name in convolutions if name in left)
    return Plan(type(model).__name__, config, tuple(steps), ordered, tuple(edits), before, before + added, note)


def _own(name: str, module: nn.Module) -> bool:
    """Convolutions, but not the helpers inside a parametrisation of one."""
    return is_convolution(module) and ".parametrizations." not in f".{name}."


def _keep_possible(
    names: list[str], explicit: set[str], convolutions: dict[str, nn.Module], seen: Observation, left: dict[str, str]
) -> list[str]:
    kept: list[str] = []
    for name in names:
        reason = refusal(convolutions[name])
        if reason is None and name not in seen.calls:
            reason = "not reached by the example"
        if reason is None:
            kept.append(name)
        elif name in explicit:
            raise RecastError(f"{name} cannot be recast: {reason}")
        else:
            left[name] = reason
    if not kept:
        raise RecastError(f"nothing can be recast: {names[0]} {left[names[0]]}")
    return kept


def _keep_within(steps: list[Step], explicit: set[str], limits: Budget, left: dict[str, str]) -> list[Step]:
    kept: list[Step] = []
    reason = ""
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
        raise RecastError(f"nothing is within the budget: {steps[0].name} has {reason}")
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
            f"stride={config.stride!r}: the network does not fit together without the stride of {next(iter(geometries))} "
            f"(a shortcut that is not a module?); use stride='keep'. {error}"
        ) from error


def apply_edits_(model: nn.Module, geometries: dict[str, Geometry], edits: list[Edit] | tuple[Edit, ...]) -> None:
    """Give the named convolutions their new geometry and carry out the edits."""
    for name, geometry in geometries.items():
        conv = model.get_submodule(name)
        assert isinstance(conv, nn.Conv2d)
        set_geometry_(conv, geometry)
    for edit in edits:
        edit.apply_(model)


def _convolution_cost(module: nn.Module, geometry: Geometry, shape: tuple[int, int, int], calls: int) -> Cost:
    """Cost of the convolution that a layer replaces, at the geometry and input it has at that moment."""
    assert isinstance(module, nn.Conv2d)
    conv = module

    def make() -> nn.Module:
        top, bottom, left, right = geometry.padding
        symmetric = (top, left) == (bottom, right)
        return nn.Conv2d(
            conv.in_channels, conv.out_channels, geometry.kernel, geometry.stride, (top, left) if symmetric else "same",
            geometry.dilation, conv.groups, conv.bias is not None, geometry.padding_mode, device="meta",
        )  # fmt: skip

    return layer_cost(make, *shape, calls)


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
    shape, output = _chw(after[0].input), _chw(after[0].output)
    return Step(
        name, found[0].__name__, parent_geometry, geometry, conv.groups, shape, output,
        _convolution_cost(conv, parent_geometry, _chw(before[0].input), len(before)),
        layer_cost(attention, *shape, len(after)),
        starts_closed and geometry == parent_geometry, len(after),
    )  # fmt: skip


def _chw(shape: tuple[int, ...]) -> tuple[int, int, int]:
    return shape[-3], shape[-2], shape[-1]
