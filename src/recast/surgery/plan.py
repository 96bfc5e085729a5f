"""A plan as data: its steps, what it leaves and why, where it pools, and the JSON that replays it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from torch import nn

from recast.errors import RecastError
from recast.layers.geometry import Geometry
from recast.run.config import PoolConfig, RecastConfig
from recast.run.fields import read_fields
from recast.surgery.stride import Edit
from recast.tracing.cost import Cost

VERSION = 5
NOTHING = Cost(0, 0, 0)
GEOMETRY = tuple(entry.name for entry in fields(Geometry))

Layout = Literal["NCHW", "NHWC", "NLC", "flat"]


@dataclass(frozen=True)
class Fold:
    """The form that folding gave a layer: what a replay needs before the weights fit."""

    convolution: bool
    """It is a convolution, with a kernel of `kernel` rows and columns."""
    kernel: tuple[int, int]
    gaussian_heads: tuple[int, ...]
    """Heads that keep a Gaussian map."""
    content_heads: tuple[int, ...]
    """Heads that keep a content map."""
    value: bool
    """W_val is still there (it was not multiplied into W_out)."""
    batch_norm: str | None = None
    """Name of the BatchNorm that was multiplied into the layer."""


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
    fold: Fold | None = None
    """What `fold_` made of the layer."""

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
        """JSON-able fields, those of the geometry among them, and what a reader wants to see beside them."""
        plain = asdict(self)
        shown = {"heads": self.geometry.num_heads, "queries": self.queries, "keys": self.keys}
        return plain | plain.pop("geometry") | shown


@dataclass(frozen=True)
class Left:
    """A convolution that stays as it is, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Place:
    """Where attention pooling goes, as `find_place` found it."""

    how: Literal["module", "append", "head"]
    """module: it replaces the pooling module `name`. append: it follows the last layer of the nn.Sequential `name`, and
    the code that pools after it sees one position. head: before the network's `forward_head`."""
    name: str
    dim: int
    """Channels of what is pooled."""
    takes: Layout
    gives: Layout
    prefix_tokens: int = 0
    """Tokens before those of the patches."""
    classifier: str | None = None
    """The linear layer (or 1×1 convolution) that gives the logits; None where there is no single one."""
    averages: bool = True
    """The network pooled by the mean over all positions and nothing else came between: the average start is exact."""
    positions: int = 0
    """How many are pooled of the images that it was found with."""
    relu: bool = False
    """append: the code applies a ReLU before it averages, so the pooling gets one too."""


@dataclass(frozen=True)
class Edited:
    """A plan as someone left it: the settings, and what the file says of every step. The rest is worked out again."""

    config: RecastConfig = field(default_factory=RecastConfig)
    pool: PoolConfig | None = None
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)


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
    pool: PoolConfig | None = None
    """Attention in the place of the network's own pooling (`recast.surgery.pooling.swap.attention_pool_`)."""
    pool_cost: Cost | None = None
    """What it adds, a part of `after`. None: not counted apart (no image was given, or it was there already)."""
    place: Place | None = None
    """Where it goes: with a pool, always."""

    def to_json(self) -> str:
        """Everything needed to replay the plan, as indented JSON."""
        document = {"version": VERSION} | asdict(self) | {"steps": [step.to_dict() for step in self.steps]}
        document["totals"] = {"before": document.pop("before"), "after": document.pop("after")}
        return json.dumps(document, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The inverse of `to_json`. Raises `RecastError` if the text is not a plan of this version."""
        source = "the text"
        found = _document(text, source)
        try:
            totals, steps = found.pop("totals"), [_step_fields(step) for step in found.pop("steps")]
            return read_fields(cls, found | totals | {"steps": steps}, source)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RecastError(f"{source} is not a plan ({type(error).__name__}: {error})") from error

    @staticmethod
    def read_edited(text: str, source: str = "the plan") -> Edited:
        """What a plan that was edited by hand asks for; settings that it leaves out have their defaults.

        Raises `RecastError`, naming the `source`, if it cannot be read.
        """
        found = _document(text, source)
        steps: dict[str, dict[str, Any]] = {}
        for step in found["steps"]:
            if not isinstance(step, dict) or not isinstance(step.get("name"), str):
                raise RecastError(
                    f'{source}: a step needs the name of its layer, {{"name": "layer4.0.conv2"}}, got {step!r}'
                )
            if step["name"] in steps:
                raise RecastError(f"{source} names {step['name']} twice")
            steps[step["name"]] = step
        asked: dict[str, Any] = {key: found[key] for key in ("config", "pool") if key in found}
        return replace(read_fields(Edited, asked, source), steps=steps)

    def only(self, names: list[str]) -> Plan:
        """The same plan with some of its steps. Raises `RecastError` for a name that is no step."""
        known = [step.name for step in self.steps]
        if unknown := [name for name in names if name not in known]:
            raise RecastError(f"the plan has no step {unknown[0]!r}; its steps are {', '.join(known) or 'none'}")
        return replace(self, steps=tuple(step for step in self.steps if step.name in names))

    def without_steps(self) -> Plan:
        """The plan of a network none of whose convolutions is recast: its pooling may be."""
        return replace(self, steps=(), edits=(), after=self.before + (self.pool_cost or NOTHING))

    def without_pool(self) -> Plan:
        """The plan with the network's own pooling."""
        return replace(self, pool=None, pool_cost=None, place=None, after=self.after - (self.pool_cost or NOTHING))

    def __str__(self) -> str:
        from recast.surgery.table import plan_table

        return plan_table(self)


def _document(text: str, source: str) -> dict[str, Any]:
    """A plan's JSON as it stands, written by `to_json` or by hand; what it may lack is its version."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise RecastError(f"{source} is not a plan: {error}") from None
    version = found.pop("version", VERSION) if isinstance(found, dict) else VERSION
    if version != VERSION:
        raise RecastError(f"{source} is a plan of version {version}, expected {VERSION}: plan again")
    if not isinstance(found, dict) or not isinstance(found.get("steps"), list):
        raise RecastError(f"{source} is not a plan: expected an object with a list of steps")
    return found


def _step_fields(step: dict[str, Any]) -> dict[str, Any]:
    """The fields of a `Step`, of what its `to_dict` gave."""
    geometry = {name: step[name] for name in GEOMETRY}
    return {entry.name: step[entry.name] for entry in fields(Step) if entry.name != "geometry"} | {"geometry": geometry}


def plan_of(model: nn.Module) -> Plan | None:
    """The plan that made `model` what it is; None for a model that was never recast."""
    plan = getattr(model, "recast_plan", None)
    return plan if isinstance(plan, Plan) else None


def applied_plan(model: nn.Module) -> Plan:
    """The plan that made `model` what it is. Raises `RecastError` for a model that was never recast."""
    plan = plan_of(model)
    if plan is None:
        raise RecastError(f"{type(model).__name__} was not recast by this library: call recast_(model, plan) first")
    return plan


def set_plan_(model: nn.Module, plan: Plan) -> None:
    """Note on a model what makes it of its parent: `save` writes it, and whatever changes the model goes on from it."""
    model.recast_plan = plan  # type: ignore[assignment]
