"""Which layers a plan takes: the papers' last stage, another stage, names, globs, regular expressions, a predicate."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from recast.errors import RecastError, suggest
from recast.surgery.rules import find_rule
from recast.tracing.observe import Observation

NOT_CALLED = "not called by the example (at most its weight is read)"
Where = str | Sequence[str] | Callable[[str, nn.Module], bool]


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


def select(where: Where | None, model: nn.Module, convolutions: dict[str, nn.Module], seen: Observation) -> Selection:
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
            raise RecastError(f"where takes names, globs, re:REGEX, stage:N or a predicate, got {where!r}")
        for pattern in patterns:
            for name in _matches(pattern, model, convolutions, seen):
                wanted[name] = wanted.get(name, False) or name == pattern
        reason = _reason(patterns, convolutions, seen)
        left = {name: reason(name) for name in convolutions if name not in wanted}
    for name in list(wanted):
        if not wanted[name] and not is_spatial(convolutions[name]):
            left[name] = "1×1: one tap, nothing to shift (name it in full to recast it)"
            del wanted[name]
    if not wanted:
        raise RecastError(f"the selection {_text(where)} matches no convolution that can become attention")
    return Selection([n for n in convolutions if n in wanted], {n for n, exact in wanted.items() if exact}, left)


def _matches(pattern: str, model: nn.Module, convolutions: dict[str, nn.Module], seen: Observation) -> list[str]:
    if pattern == "all":
        return [name for name, module in convolutions.items() if is_spatial(module)]
    if pattern == "last_stage":
        sizes = map_sizes(convolutions, seen)
        smallest = last_stage_size(convolutions, sizes)
        return [name for name, size in sizes.items() if size == smallest]
    if pattern.startswith("stage:"):
        found = stages(model, convolutions, seen)
        if not re.fullmatch(r"-?\d+", pattern[6:]) or not -len(found) <= int(pattern[6:]) < len(found):
            last = len(found) - 1
            raise RecastError(f"{type(model).__name__} has stages stage:0 to stage:{last}, got {pattern!r}")
        return found[int(pattern[6:])]
    if pattern.startswith("re:"):
        try:
            names = [name for name in convolutions if re.search(pattern[3:], name)]
        except re.error as error:
            raise RecastError(f"{pattern!r} is no regular expression: {error}") from None
    else:
        names = [name for name in convolutions if fnmatch.fnmatchcase(name, pattern)]
    if not names:
        raise RecastError(
            f"no convolution matches {pattern!r}: expected last_stage, all, stage:N, a layer's name, a glob such as "
            f"layer4.*, or re:REGEX.{suggest(pattern, convolutions)}"
        )
    return names


def stages(model: nn.Module, convolutions: dict[str, nn.Module], seen: Observation) -> list[list[str]]:
    """The spatial convolutions of every stage, in order: `stage:0` is the stem's, as in timm's `out_indices`.

    timm's `feature_info` names the module that ends a stage. Without one, a stage is a size of the maps.
    """
    spatial = [name for name, module in convolutions.items() if is_spatial(module)]
    ends = _stage_ends(model)
    if not ends:
        areas = {name: math.prod(size) for name, size in map_sizes(convolutions, seen).items()}
        return [[n for n in areas if areas[n] == area] for area in sorted(set(areas.values()), reverse=True)]
    order = [name for name, _ in model.named_modules()]
    found: list[list[str]] = [[] for _ in ends]
    for name in spatial:
        at = order.index(name)
        stage = next((i for i, end in enumerate(ends) if at <= end), None)
        if stage is not None:
            found[stage].append(name)
    return found


def _stage_ends(model: nn.Module) -> list[int]:
    """Position in `named_modules` of the last module of every stage that `feature_info` names; none without it."""
    info = getattr(model, "feature_info", None)
    names = [str(entry.get("module", "")) for entry in info] if isinstance(info, list) else []
    order = [name for name, _ in model.named_modules()]
    ends = [max((i for i, n in enumerate(order) if f"{n}.".startswith(f"{name}.")), default=-1) for name in names]
    return ends if ends and min(ends) >= 0 and ends == sorted(ends) else []


def map_sizes(convolutions: dict[str, nn.Module], seen: Observation) -> dict[str, tuple[int, int]]:
    """Rows and columns that every spatial convolution puts out: the largest of its uses.

    Left out are convolutions of another dimension, and those that run on regions of the image (a detector's proposals),
    which belong to no stage; unless the model has nothing else.
    """
    found: dict[str, list[tuple[int, int, int]]] = {}
    for name, module in convolutions.items():
        maps = [call for call in seen.calls.get(name, ()) if len(call.output) == 4 and is_spatial(module)]
        found[name] = [(call.output[2], call.output[3], call.input[0]) for call in maps]
    whole = {name: [use for use in uses if use[2] == seen.batch] for name, uses in found.items()}
    uses = whole if any(whole.values()) else found
    return {name: max(sizes, key=lambda use: use[0] * use[1])[:2] for name, sizes in uses.items() if sizes}


def last_stage_size(convolutions: dict[str, nn.Module], sizes: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """Smallest of `map_sizes` that has a convolution which a rule can take. Raises `RecastError` for no map at all."""
    if not sizes:
        raise RecastError("the model has no convolution with a kernel larger than 1×1 that the example reaches")
    # where the very last stage is of another kind (a mixture of kernels, say), the last that is not
    possible = [size for name, size in sizes.items() if find_rule(convolutions[name])] or list(sizes.values())
    return min(possible, key=math.prod)


def _reason(patterns: list[str], convolutions: dict[str, nn.Module], seen: Observation) -> Callable[[str], str]:
    sizes = map_sizes(convolutions, seen)

    def reason(name: str) -> str:
        if not is_spatial(convolutions[name]):
            return "1×1: one tap, nothing to shift (name it in full to recast it)"
        if patterns != ["last_stage"]:
            return f"not selected by {_text(patterns)}"
        if name in sizes:
            last = last_stage_size(convolutions, sizes)
            return f"before the last stage ({'×'.join(map(str, sizes[name]))}; the last is {'×'.join(map(str, last))})"
        if name not in seen.calls:
            return NOT_CALLED
        is_map = len(seen.calls[name][0].output) == 4
        return "runs on regions of the image, in no stage" if is_map else "not a two-dimensional map"

    return reason


def _text(where: Where) -> str:
    if callable(where):
        return "predicate"
    return where if isinstance(where, str) else ", ".join(where)
