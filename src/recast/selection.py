"""Which layers a plan takes: the paper's last stage, names, globs or a predicate; and the limits it keeps to."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from recast.errors import RecastError, suggest
from recast.shapes import Call

Where = str | Sequence[str] | Callable[[str, nn.Module], bool]

DEFAULT_TOKENS = 1024
_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


@dataclass(frozen=True)
class Budget:
    """Limits of a plan: `tokens` per layer (padded pixels), `memory` of added activations per image in bytes."""

    tokens: int = DEFAULT_TOKENS
    memory: int | None = None

    def __post_init__(self) -> None:
        if self.tokens < 1 or (self.memory is not None and self.memory < 0):
            raise RecastError(f"a budget needs tokens ≥ 1 and memory ≥ 0, got {self}")

    @classmethod
    def parse(cls, text: str | int | Budget | None) -> Budget:
        """`"tokens=2048,memory=64MiB"`, a number of tokens, or None for the default. Raises `RecastError`."""
        if text is None:
            return cls()
        if isinstance(text, Budget):
            return text
        if isinstance(text, int):
            return cls(tokens=text)
        fields: dict[str, int] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            match = re.fullmatch(r"(tokens|memory)=(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", part)
            if match is None or match[3].lower() not in _UNITS or (match[1] == "tokens" and match[3]):
                raise RecastError(f"a budget is tokens=N and memory=SIZE (e.g. tokens=2048,memory=64MiB), got {part!r}")
            fields[match[1]] = int(float(match[2]) * _UNITS[match[3].lower()])
        return cls(**fields)


@dataclass(frozen=True)
class Selection:
    """Selected names, the names among them that were asked for one by one, and why each other layer is left."""

    names: list[str]
    explicit: set[str]
    left: dict[str, str]


def is_spatial(module: nn.Module) -> bool:
    """Whether a convolution has more than one tap."""
    kernel: Any = getattr(module, "kernel_size", 1)
    return bool(max(kernel) > 1) if isinstance(kernel, tuple) else bool(kernel > 1)


def select(where: Where | None, convolutions: dict[str, nn.Module], calls: dict[str, list[Call]]) -> Selection:
    """Choose among the model's convolutions. Raises `RecastError` if a pattern, or the selection, matches nothing."""
    where = "last_stage" if where is None else where
    left: dict[str, str] = {}
    wanted: dict[str, bool] = {}  # name -> asked for by its full name
    if callable(where):
        for name, module in convolutions.items():
            if where(name, module):
                wanted[name] = True
            else:
                left[name] = "excluded by the predicate"
    else:
        patterns = [where] if isinstance(where, str) else list(where) if isinstance(where, Iterable) else [where]
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise RecastError(f"where takes names, globs or a predicate, got {where!r}")
        for pattern in patterns:
            for name in _matches(pattern, convolutions, calls):
                wanted[name] = wanted.get(name, False) or name == pattern
        reason = _reason(patterns, convolutions, calls)
        left = {name: reason(name) for name in convolutions if name not in wanted}
    for name in list(wanted):
        if not wanted[name] and not is_spatial(convolutions[name]):
            left[name] = "1×1: one tap, nothing to shift (name it in full to recast it)"
            del wanted[name]
    if not wanted:
        raise RecastError(f"the selection {_text(where)} matches no convolution that can become attention")
    return Selection([n for n in convolutions if n in wanted], {n for n, exact in wanted.items() if exact}, left)


def _matches(pattern: str, convolutions: dict[str, nn.Module], calls: dict[str, list[Call]]) -> list[str]:
    if pattern == "all":
        return [name for name, module in convolutions.items() if is_spatial(module)]
    if pattern == "last_stage":
        size = last_stage_size(convolutions, calls)
        return [n for n, m in convolutions.items() if is_spatial(m) and _size(n, calls) == size]
    names = [name for name in convolutions if fnmatch.fnmatchcase(name, pattern)]
    if not names:
        raise RecastError(
            f"no convolution matches {pattern!r}: expected last_stage, all, a layer's name or a glob such as layer4.*."
            + suggest(pattern, convolutions)
        )
    return names


def last_stage_size(convolutions: dict[str, nn.Module], calls: dict[str, list[Call]]) -> tuple[int, ...]:
    """Smallest output size (rows, columns) of the spatial convolutions that the example reached."""
    sizes = [size for n, m in convolutions.items() if is_spatial(m) and (size := _size(n, calls))]
    if not sizes:
        raise RecastError("the model has no convolution with a kernel larger than 1×1 that the example reaches")
    return min(sizes, key=lambda size: size[0] * size[-1])


def _size(name: str, calls: dict[str, list[Call]]) -> tuple[int, ...] | None:
    """Rows and columns of the smallest output; None where there is no map (not reached, or a 1-D convolution)."""
    return min((c.output[2:] for c in calls.get(name, ()) if len(c.output) == 4), key=math.prod, default=None)


def _reason(
    patterns: list[str], convolutions: dict[str, nn.Module], calls: dict[str, list[Call]]
) -> Callable[[str], str]:
    def reason(name: str) -> str:
        if not is_spatial(convolutions[name]):
            return "1×1: one tap, nothing to shift (name it in full to recast it)"
        if patterns == ["last_stage"]:
            size = _size(name, calls)
            if size is None:
                return "not a two-dimensional map" if name in calls else "not reached by the example"
            last = last_stage_size(convolutions, calls)
            return f"before the last stage ({'×'.join(map(str, size))}; the last is {'×'.join(map(str, last))})"
        return f"not selected by {_text(patterns)}"

    return reason


def _text(where: Where) -> str:
    if callable(where):
        return "predicate"
    return where if isinstance(where, str) else ", ".join(where)
