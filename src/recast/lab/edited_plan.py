"""Plan files that were edited by hand: read, and planned again."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from recast.config import read
from recast.errors import RecastError, shown
from recast.layers.config import RecastConfig
from recast.layers.pool_config import PoolConfig
from recast.surgery.limits import Budget
from recast.surgery.plan import GEOMETRY, Plan, plan_document
from recast.surgery.planning import plan
from recast.tracing.examples import Example

NO_NAMES = ("all", "last_stage", "none")
"""Words for layers that name none."""


@dataclass(frozen=True)
class Edited:
    """A plan as someone left it: the settings, and what the file says of every step. The rest is worked out again."""

    config: RecastConfig = RecastConfig()
    pool: PoolConfig | None = None
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)


def read_edited(text: str, source: str = "the plan") -> Edited:
    """Read a plan that was edited by hand; missing settings have their defaults.

    Raises `RecastError`, naming the `source`, if it cannot be read.
    """
    data = plan_document(text, source)
    steps: dict[str, dict[str, Any]] = {}
    for step in data["steps"]:
        if not isinstance(step, dict) or not isinstance(step.get("name"), str):
            raise RecastError(
                f'{source}: a step needs the name of its layer, {{"name": "layer4.0.conv2"}}, got {shown(step)}'
            )
        if not re.fullmatch(r"[^\s*?\[\]:]*", step["name"]) or step["name"] in NO_NAMES:
            raise RecastError(
                f"{source}: a step must name one layer in full, got {shown(step['name'])}; use globs with --where"
            )
        if step["name"] in steps:
            raise RecastError(f"{source} names {shown(step['name'])} twice")
        steps[step["name"]] = step
    settings: dict[str, Any] = {key: data[key] for key in ("config", "pool") if key in data}
    return replace(read(Edited, settings, source), steps=steps)


def replan(model: nn.Module, example: Example, edited: Edited) -> Plan:
    """Return the plan of an edited one (`read_edited`): its settings, the layers of its steps, new costs.

    A step requires only its `name`. Raises `RecastError` if its other fields contradict the layer.
    """
    if not edited.steps and (edited.pool is None or not edited.pool.is_on):
        raise RecastError("the plan has no steps: name at least one layer to recast")
    where = list(edited.steps) or "none"
    planned = plan(model, example, edited.config, where=where, budget=Budget(tokens=None), pool=edited.pool)
    for step in planned.steps:
        actual = json.loads(json.dumps(step.to_dict()))
        stated = edited.steps[step.name]
        for key in ("rule", "groups", *GEOMETRY):
            if key in stated and stated[key] != actual[key]:
                raise RecastError(
                    f"{key} of step {step.name} is {stated[key]}, the model has {actual[key]}: only the config and the "
                    "list of steps can be edited"
                )
    return planned
