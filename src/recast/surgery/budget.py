"""Selection of the layers within the limits of a plan, from the end of the network."""

from __future__ import annotations

import math

from recast.errors import RecastError
from recast.surgery.limits import Budget
from recast.surgery.records import Step
from recast.surgery.table import quantity
from recast.tracing.cost import Cost

_COSTS = {"params": "parameters", "macs": "macs", "memory": "memory"}


def keep_within(
    steps: list[Step], added: dict[str, Cost], order: list[str], explicit: set[str], limits: Budget, start: Cost,
    parent: Cost,
) -> tuple[list[Step], dict[str, str], Cost]:  # fmt: skip
    """Return the steps within the budget, the reasons for the others, and the cost of the model with the steps.

    Layers named one by one come first, and must fit. The others are taken from the end of the network (`order`, of the
    calls) while they fit: the papers recast the last layers, and late layers have the fewest tokens. `added` is what a
    layer adds to the model's cost, `start` the model's cost without any.
    Raises `RecastError` if nothing fits.
    """
    reasons: dict[str, str] = {}
    total = start
    for step in sorted(steps, key=lambda s: (s.name not in explicit, -order.index(s.name))):
        reason = _exceeds(step, total + added[step.name], limits, parent)
        if reason is None:
            total = total + added[step.name]
        elif step.name in explicit:
            raise RecastError(f"{step.name or 'the model'} {reason}")
        else:
            reasons[step.name] = reason
    if steps and len(reasons) == len(steps):
        last = next(iter(reasons))
        raise RecastError(f"no layer fits the budget: {last or 'the model'} {reasons[last]}")
    return [step for step in steps if step.name not in reasons], reasons, total


def _exceeds(step: Step, total: Cost, limits: Budget, parent: Cost) -> str | None:
    """Return why a step does not fit, if `total` is the model's cost with it; None if it fits."""
    if limits.tokens is not None and step.keys > limits.tokens:
        return (
            f"has too many tokens: {step.keys} ({step.keys / limits.tokens:.1f}× the budget of {limits.tokens}); "
            f"lower the resolution or set the budget to tokens={step.keys}"
        )
    for name, field in _COSTS.items():
        parent_cost, cost, limit = getattr(parent, field), getattr(total, field), getattr(limits, name)
        allowed = math.inf if limit is None else limit.value * parent_cost if limit.relative else limit.value
        if cost > allowed:
            unit = ("B", 1024) if name == "memory" else ("", 1000)
            return (
                f"does not fit the budget of {quantity(allowed, *unit)} {name} for the whole model "
                f"(the parent has {quantity(parent_cost, *unit)})"
            )
    return None
