"""Limits of a plan, and the layers that keep to them: chosen from the end of the network."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import NamedTuple

from recast.errors import RecastError, suggest
from recast.surgery.records import Step
from recast.surgery.table import quantity
from recast.tracing.cost import Cost

DEFAULT_TOKENS = 1024
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BYTES = {"": 1, "b": 1} | {f"{p}ib": 2 ** (10 * i) for i, p in enumerate("kmgt", 1)}
_BYTES |= {f"{p}b": 10 ** (3 * i) for i, p in enumerate("kmgt", 1)}
_COSTS = {"params": "parameters", "macs": "macs", "memory": "memory"}


class Limit(NamedTuple):
    """An amount, or a multiple of the parent's (`relative`)."""

    value: float
    relative: bool = False


@dataclass(frozen=True)
class Budget:
    """Limits of a plan. `tokens` per layer (padded pixels; None: any); the others hold for the whole recast model.

    `macs` and `memory` (what is kept for the backward pass) are those of one image.
    """

    tokens: int | None = DEFAULT_TOKENS
    macs: Limit | None = None
    params: Limit | None = None
    memory: Limit | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise RecastError(f"a budget needs tokens ≥ 1, got {self.tokens}")

    @classmethod
    def parse(cls, text: str | int | Budget | None) -> Budget:
        """`"macs=1.3x,params=30M,memory=2GiB,tokens=1024"`, a number of tokens, or None for the default.

        Amounts take k, M, G, T (memory: KiB, MiB, GiB or kB, MB, GB) or `x`, a multiple of the parent's;
        `tokens=none` lifts that limit. Raises `RecastError`.
        """
        if text is None:
            return cls()
        if isinstance(text, Budget):
            return text
        if isinstance(text, int):
            return cls(tokens=text)
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return cls(**dict(map(_parse_part, parts)))  # type: ignore[arg-type]


def _parse_part(part: str) -> tuple[str, int | Limit | None]:
    name, _, text = (word.strip() for word in part.partition("="))
    names = [field.name for field in fields(Budget)]
    if name not in names:
        raise RecastError(f"a budget limits {', '.join(names)}, got {part!r}.{suggest(name, names)}")
    if name == "tokens" and text == "none":
        return name, None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text)
    units = {"tokens": {"": 1}, "memory": _BYTES}.get(name, _DECIMAL)
    unit = match[2].lower() if match else "?"
    if match and unit == "x" and name != "tokens":
        return name, Limit(float(match[1]), relative=True)
    if match is None or unit not in units:
        examples = {"tokens": "tokens=1024", "memory": "memory=2GiB or memory=1.5x", "params": "params=30M or 1.3x"}
        raise RecastError(f"the budget's {name} is a number, {examples.get(name, 'macs=5G or 1.3x')}; got {part!r}")
    value = round(float(match[1]) * units[unit])
    return name, value if name == "tokens" else Limit(value)


def keep_within(
    steps: list[Step], added: dict[str, Cost], order: list[str], explicit: set[str], limits: Budget, start: Cost,
    parent: Cost,
) -> tuple[list[Step], dict[str, str], Cost]:  # fmt: skip
    """The steps within the budget, why each other is not, and the cost of the model with them.

    Layers named one by one come first, and must fit. The others are taken from the end of the network (`order`, of the
    calls) while they fit: the papers recast the last layers, and late layers have the fewest tokens. `added` is what a
    layer adds to the model's cost, `start` the model's cost without any. Raises `RecastError` if nothing fits.
    """
    left: dict[str, str] = {}
    total = start
    for step in sorted(steps, key=lambda s: (s.name not in explicit, -order.index(s.name))):
        reason = _exceeds(step, total + added[step.name], limits, parent)
        if reason is None:
            total += added[step.name]
        elif step.name in explicit:
            raise RecastError(f"{step.name or 'the model'} {reason}")
        else:
            left[step.name] = reason
    if steps and len(left) == len(steps):
        last = next(iter(left))
        raise RecastError(f"nothing is within the budget: {last or 'the model'} {left[last]}; raise the budget")
    return [step for step in steps if step.name not in left], left, total


def _exceeds(step: Step, total: Cost, limits: Budget, parent: Cost) -> str | None:
    """Why a step does not fit, if `total` is the model's cost with it."""
    if limits.tokens is not None and step.keys > limits.tokens:
        return (
            f"has too many tokens: {step.keys} ({step.keys / limits.tokens:.1f}× the budget of {limits.tokens}); "
            f"lower the resolution or set the budget to tokens={step.keys}"
        )
    for name, field in _COSTS.items():
        limit, own = getattr(limits, name), getattr(parent, field)
        allowed = math.inf if limit is None else limit.value * own if limit.relative else limit.value
        if getattr(total, field) > allowed:
            unit = ("B", 1024) if name == "memory" else ("", 1000)
            return (
                f"does not fit the budget of {quantity(allowed, *unit)} {name} for the whole model "
                f"(the parent has {quantity(own, *unit)})"
            )
    return None
