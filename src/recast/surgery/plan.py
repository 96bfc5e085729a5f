"""A plan as data: its steps, what it leaves and why, and the JSON that replays it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from torch import nn

from recast.errors import RecastError
from recast.layers.geometry import Geometry
from recast.run.config import PoolConfig, RecastConfig
from recast.surgery.stride import Edit
from recast.tracing.cost import Cost

VERSION = 4
READABLE = (3, VERSION)
"""Version 3 is the same without attention pooling."""


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

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Fold:
        """From JSON: lists become tuples again."""
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        return cls(**values)


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
        """JSON-able fields, with what a reader wants to see beside what a replay needs."""
        plain = ("name", "rule", "groups", "exact", "calls", "bias_added")
        return {
            **{name: getattr(self, name) for name in plain},
            **self.geometry.to_dict(),
            "parent_geometry": self.parent_geometry.to_dict(),
            "input": self.input,
            "output": self.output,
            "heads": self.geometry.num_heads,
            "queries": self.queries,
            "keys": self.keys,
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "fold": None if self.fold is None else asdict(self.fold),
        }

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Step:
        """The inverse of `to_dict`."""
        geometry = {field.name: d[field.name] for field in fields(Geometry)}
        return cls(
            d["name"], d["rule"], Geometry.from_dict(d["parent_geometry"]), Geometry.from_dict(geometry), d["groups"],
            tuple(d["input"]), tuple(d["output"]), Cost(**d["before"]), Cost(**d["after"]), d["exact"], d["calls"],
            d["bias_added"], None if d["fold"] is None else Fold.from_dict(d["fold"]),
        )  # fmt: skip


@dataclass(frozen=True)
class Left:
    """A convolution that stays as it is, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Edited:
    """A plan as someone left it: the settings, and what the file says of every step. The rest is worked out again."""

    config: RecastConfig
    steps: dict[str, dict[str, Any]]
    pool: PoolConfig | None = None


def _read_config(d: dict[str, Any]) -> RecastConfig:
    lists = {name: tuple(value) for name, value in d.items() if isinstance(value, list)}
    return RecastConfig(**d | lists)


def _read_pool(d: dict[str, Any] | None) -> PoolConfig | None:
    return asked_pool(None if d is None else PoolConfig(**d))


def _read_shape(found: list[int] | None) -> tuple[int, int, int] | None:
    if found is None:
        return None
    channels, height, width = (int(size) for size in found)
    return channels, height, width


def asked_pool(config: PoolConfig | None) -> PoolConfig | None:
    """None for a pool that is the network's own."""
    return config if config is not None and config.is_on else None


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
    pool_input: tuple[int, int, int] | None = None
    """(C, H, W) of the images with which the pooling's place is found again."""
    """What it adds, a part of `after`. None: not counted apart (no image was given, or it was there already)."""

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
            "pool": None if self.pool is None else asdict(self.pool),
            "pool_cost": None if self.pool_cost is None else self.pool_cost.to_dict(),
            "pool_input": self.pool_input,
        }
        return json.dumps(document, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The inverse of `to_json`. Raises `RecastError` if the text is not a plan of this version."""
        try:
            d = json.loads(text)
            if d["version"] not in READABLE:
                raise RecastError(f"a plan of version {VERSION} was expected, got version {d['version']}: plan again")
            return cls(
                d["model"], _read_config(d["config"]), tuple(map(Step.from_dict, d["steps"])),
                tuple(Left(**item) for item in d["left"]), tuple(Edit(**edit) for edit in d["edits"]),
                Cost(**d["totals"]["before"]), Cost(**d["totals"]["after"]), d["note"], _read_pool(d.get("pool")),
                None if d.get("pool_cost") is None else Cost(**d["pool_cost"]), _read_shape(d.get("pool_input")),
            )  # fmt: skip
        except RecastError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RecastError(f"this is not a plan ({type(error).__name__}: {error})") from error

    @staticmethod
    def read_edited(text: str) -> Edited:
        """What a plan that was edited by hand asks for. Raises `RecastError` if it cannot be read."""
        try:
            d = json.loads(text)
        except ValueError as error:
            raise RecastError(f"this is not a plan: {error}") from None
        if not isinstance(d, dict) or not isinstance(d.get("steps"), list) or d.get("version", VERSION) not in READABLE:
            raise RecastError(f"this is not a plan of version {VERSION}: plan again with recast plan --out")
        steps: dict[str, dict[str, Any]] = {}
        for step in d["steps"]:
            if not isinstance(step, dict) or not isinstance(step.get("name"), str):
                raise RecastError(f'a step needs the name of its layer, {{"name": "layer4.0.conv2"}}, got {step!r}')
            if step["name"] in steps:
                raise RecastError(f"the plan names {step['name']} twice")
            steps[step["name"]] = step
        try:
            config = _read_config(d.get("config", {}))
        except (TypeError, ValueError) as error:
            known = ", ".join(field.name for field in fields(RecastConfig))
            raise RecastError(f"the plan's config cannot be read ({error}); its fields are {known}") from None
        try:
            return Edited(config, steps, _read_pool(d.get("pool")))
        except (TypeError, ValueError) as error:
            known = ", ".join(field.name for field in fields(PoolConfig))
            raise RecastError(f"the plan's pool cannot be read ({error}); its fields are {known}") from None

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
        return replace(self, pool=None, pool_cost=None, pool_input=None, after=self.after - (self.pool_cost or NOTHING))

    def __str__(self) -> str:
        from recast.surgery.table import plan_table

        return plan_table(self)


NOTHING = Cost(0, 0, 0)


def with_pool(
    done: Plan | None, model: nn.Module, config: PoolConfig, pool_input: tuple[int, int, int] | None = None
) -> Plan:
    """What `attention_pool_` leaves as `model.recast_plan`: the steps taken so far (`done`; None: none) and the pool.

    Its costs are not counted here, which takes images: `plan(model, images, where="none", pool=config)` does.
    Raises RecastError where `done` has a pool already.
    """
    if done is None:
        note = "costs were not counted: recast.plan(model, images, where='none', pool=PoolConfig(...)) counts them"
        nothing = Plan(type(model).__name__, RecastConfig(), (), (), (), NOTHING, NOTHING, note, config)
        return replace(nothing, pool_input=pool_input)
    if done.pool is not None:
        raise RecastError(f"{type(model).__name__} pools with attention already: its pooling is replaced once")
    return replace(done, pool=config, pool_cost=None, pool_input=pool_input)
