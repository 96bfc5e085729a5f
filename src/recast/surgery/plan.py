"""A plan as data: settings, steps, costs, the table that people read and the JSON that replays it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from pydantic import ConfigDict
from torch import nn

from recast.config import adapter, read
from recast.errors import RecastError, listed, shown
from recast.json_text import parse_json
from recast.layers.config import RecastConfig
from recast.layers.geometry import Geometry
from recast.layers.pool_config import AttentionPooling
from recast.surgery import table
from recast.surgery.records import Left, Place, Step
from recast.surgery.stride import Edit
from recast.surgery.wrappers import unwrapped
from recast.tracing.cost import Cost

VERSION = 7
NOTHING = Cost(0, 0, 0)
GEOMETRY = tuple(entry.name for entry in fields(Geometry))


@dataclass(frozen=True)
class Plan:
    """The layers that get attention by `recast_`, as data: printed, reviewed, stored and replayed.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> plan = recast.plan(model, torch.randn(1, 3, 8, 8))
        >>> recast.Plan.from_json(plan.to_json()) == plan
        True
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    model: str
    """Class name of the model it was made for."""
    config: RecastConfig
    steps: tuple[Step, ...]
    left: tuple[Left, ...]
    edits: tuple[Edit, ...]
    before: Cost
    after: Cost
    note: str = ""
    pool: AttentionPooling | None = None
    """Attention pooling that replaces the network's own (`recast.surgery.pooling.swap.attention_pool_`)."""
    pool_cost: Cost | None = None
    """Cost of the pooling, part of `after`. None: not counted separately (no image was given, or it was there)."""
    place: Place | None = None
    """Where the pooling goes; set with every pool."""

    def __post_init__(self) -> None:
        names = [step.name for step in self.steps]
        if len(set(names)) < len(names):
            raise RecastError(f"a plan must name every layer once, got {shown(names)}")

    def to_json(self) -> str:
        """Return everything needed to replay the plan, as indented JSON."""
        document = (
            {"version": VERSION}
            | adapter(Plan).dump_python(self, mode="json")
            | {"steps": [step.to_dict() for step in self.steps]}
        )
        document["totals"] = {"before": document.pop("before"), "after": document.pop("after")}
        return json.dumps(document, indent=1)

    @classmethod
    def from_json(cls, text: str, source: str = "the text") -> Plan:
        """Read the text of `to_json`. Raises `RecastError`, naming the `source`, if it is no plan of this version."""
        if not isinstance(text, str):
            raise RecastError(f"a plan must be text in JSON, as its to_json gives, got {shown(text)}")
        try:
            data = parse_json(text, "it")
        except RecastError as error:
            raise RecastError(f"{source} is not a plan: {error}") from None
        if not isinstance(data, dict) or not isinstance(data.get("steps"), list):
            raise RecastError(f"{source} is not a plan: expected an object with a list of steps")
        if (version := data.pop("version", None)) != VERSION:
            raise RecastError(f"{source} is a plan of version {shown(version)}, expected {VERSION}: plan again")
        try:
            totals, steps = data.pop("totals"), [_step_fields(step) for step in data.pop("steps")]
            return read(cls, data | totals | {"steps": steps}, source)
        except RecastError:
            raise
        except (AttributeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise RecastError(f"{source} is not a plan ({type(error).__name__}: {error})") from error

    def only(self, names: Sequence[str]) -> Plan:
        """Return the plan with some of its steps. Raises `RecastError` for a name that is no step."""
        all_names = [step.name for step in self.steps]
        if unknown := [name for name in names if name not in all_names]:
            raise RecastError(f"the plan has no step {unknown[0]!r}; its steps are {', '.join(all_names) or 'none'}")
        return replace(self, steps=tuple(step for step in self.steps if step.name in names))

    def without_steps(self) -> Plan:
        """Return the plan without steps, as of a network in which only the pooling is replaced."""
        return replace(self, steps=(), edits=(), after=self.before + (self.pool_cost or NOTHING))

    def without_pool(self) -> Plan:
        """Return the plan with the network's own pooling."""
        return replace(self, pool=None, pool_cost=None, place=None, after=self.after - (self.pool_cost or NOTHING))

    def __str__(self) -> str:
        """Say what each convolution becomes, with shapes, tokens and costs before → after, and why the others stay."""
        after = [step.name for step in self.steps if step.is_after_block]
        title = f"{self.model}: {len(self.steps)} of {len(self.steps) + len(self.left)} convolutions recast"
        if after:
            title = f"{self.model}: attention after blocks ({', '.join(after)}), all convolutions stay"
        parts = [title + ("" if self.pool is None else ", attention pooling")]
        if self.before.parameters:  # 0: costs were not counted
            parts[0] += "\n" + table.layers(self.steps, self.before, self.after)
        if self.pool is not None:
            parts.append(table.pooling(self.pool, self.pool_cost))
        if self.edits:
            parts.append("also changed: " + "; ".join(f"{e.name} ({e.action.replace('_', ' ')})" for e in self.edits))
        if self.left:
            parts.append(table.left(self.left))
        parts += [f"note: {note}" for note in (self.note, nothing_to_see(self)) if note]
        if self.before.parameters:
            parts.append(table.cost(self.before, self.after))
        return "\n\n".join(parts)


def nothing_to_see(plan: Plan) -> str:
    """Return a sentence on the layers that see a single pixel at the example's size; empty if none does."""
    alone = [step.name for step in plan.steps if step.input[1:] == (1, 1)]
    if not alone:
        return ""
    layers = f"{len(alone)} of {len(plan.steps)} layers see{'s' if len(plan.steps) == 1 else ''} a single pixel"
    return f"{layers} ({listed(alone, 3)}), where attention has nothing to choose: larger images, or earlier layers"


def _step_fields(step: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a `Step` from its `to_dict`."""
    geometry = {name: step[name] for name in GEOMETRY}
    return {entry.name: step[entry.name] for entry in fields(Step) if entry.name != "geometry"} | {"geometry": geometry}


def plan_of(model: nn.Module) -> Plan | None:
    """Return the plan that was applied to `model`; None for a model that was never recast."""
    plan = getattr(unwrapped(model), "recast_plan", None)
    return plan if isinstance(plan, Plan) else None


def applied_plan(model: nn.Module) -> Plan:
    """Return the plan that was applied to `model`. Raises `RecastError` for a model that was never recast."""
    plan = plan_of(model)
    if plan is None:
        raise RecastError(f"{type(model).__name__} was not recast by this library: call recast_(model, plan) first")
    return plan


def set_plan_(model: nn.Module, plan: Plan) -> None:
    """Attach the plan that turns the parent into this model, for `save` and for later changes."""
    unwrapped(model).recast_plan = plan  # type: ignore[assignment]
