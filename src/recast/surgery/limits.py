"""Limits of a plan, as text and as data. Imports no torch: a mistake is told before seconds of imports."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import NamedTuple

from recast.errors import RecastError, shown, suggest

DEFAULT_TOKENS = 1024
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BYTES = {"": 1, "b": 1} | {f"{p}ib": 2 ** (10 * i) for i, p in enumerate("kmgt", 1)}
_BYTES |= {f"{p}b": 10 ** (3 * i) for i, p in enumerate("kmgt", 1)}


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
        """Parse `"macs=1.3x,params=30M,memory=2GiB,tokens=1024"`, a number of tokens, or None for the default.

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
        limits = list(map(_parse_part, parts))
        if twice := [name for i, (name, _) in enumerate(limits) if name in dict(limits[:i])]:
            raise RecastError(f"the budget limits {twice[0]} twice, expected it once: {shown(text)}")
        return cls(**dict(limits))  # type: ignore[arg-type]


def _parse_part(part: str) -> tuple[str, int | Limit | None]:
    name, _, text = (word.strip() for word in part.partition("="))
    names = [field.name for field in fields(Budget)]
    if name not in names:
        raise RecastError(f"a budget limits {', '.join(names)}, got {shown(part)}.{suggest(name[:100], names)}")
    if name == "tokens" and text == "none":
        return name, None
    match = re.fullmatch(r"(\d{1,30}(?:\.\d{1,30})?)\s*([a-zA-Z]*)", text)
    units = {"tokens": {"": 1}, "memory": _BYTES}.get(name, _DECIMAL)
    unit = match[2].lower() if match else "?"
    if match and unit == "x" and name != "tokens":
        return name, Limit(float(match[1]), relative=True)
    if match is None or unit not in units:
        got = shown(part)
        examples = {"tokens": "tokens=1024", "memory": "memory=2GiB or memory=1.5x", "params": "params=30M or 1.3x"}
        raise RecastError(f"the budget's {name} is a number, {examples.get(name, 'macs=5G or 1.3x')}; got {got}")
    value = round(float(match[1]) * units[unit])
    return name, int(value) if name == "tokens" else Limit(value)
