"""Which layers a plan takes, and why each other convolution stays.

Asked for are the papers' last stage, another stage, names, globs, regular expressions or a predicate.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from recast.errors import RecastError, suggest
from recast.layers.cmhsa import RecastLayer
from recast.run.config import RecastConfig
from recast.surgery.rules import Sharing, find_rule, refusal
from recast.tracing.observe import Call, Observation, on_meta

Where = str | Sequence[str] | Callable[[str, nn.Module], bool]

ONE_TAP = "1×1: one tap, nothing to shift (name it in full to recast it)"
NOT_CALLED = "not called by the example (at most its weight is read)"


@dataclass(frozen=True)
class Selection:
    """The layers (on the meta device) that the selected convolutions become, by name and in the order of the model;
    the names among them that were asked for one by one; why each other convolution is left."""

    layers: dict[str, RecastLayer]
    explicit: set[str]
    left: dict[str, str]


def is_spatial(module: nn.Module) -> bool:
    """Whether a convolution has more than one tap."""
    kernel: Any = getattr(module, "kernel_size", 1)
    return bool(max(kernel) > 1) if isinstance(kernel, tuple) else bool(kernel > 1)


def is_none(where: Where | None) -> bool:
    """Whether a selection is "none": no convolution."""
    return where == "none" or (isinstance(where, list | tuple) and list(where) == ["none"])


def select(
    where: Where | None, model: nn.Module, convolutions: dict[str, nn.Module], seen: Observation, config: RecastConfig
) -> Selection:
    """Choose among the model's convolutions, and make the layers that those become.

    Raises `RecastError` if a pattern, or the selection, matches nothing, or what it names in full cannot be recast.
    """
    where = "last_stage" if where is None else where
    if is_none(where):
        return Selection({}, set(), dict.fromkeys(convolutions, "not selected by none"))
    wanted, left = _wanted(where, model, convolutions, seen)
    explicit = {name for name, is_named in wanted.items() if is_named}
    left |= {name: ONE_TAP for name in wanted if name not in explicit and not is_spatial(convolutions[name])}
    names = [name for name in convolutions if name in wanted and name not in left]
    if not names:
        raise RecastError(f"the selection {_text(where)} matches no convolution that can become attention")
    sharing = Sharing(model)
    layers: dict[str, RecastLayer] = {}
    for name in names:
        module = convolutions[name]
        found = _network_refuses(name, model, module, seen.calls.get(name), sharing) or _converted(module, config)
        if isinstance(found, RecastLayer):
            layers[name] = found
        elif name in explicit:
            raise RecastError(f"{name} cannot be recast: {found}")
        else:
            left[name] = found
    if not layers:
        raise RecastError(f"nothing can be recast: {names[0]} {left[names[0]]}")
    return Selection(layers, explicit, left)


# --- why a selected convolution stays ---------------------------------------------------------------------------------


def _network_refuses(
    name: str, model: nn.Module, module: nn.Module, calls: list[Call] | None, sharing: Sharing
) -> str | None:
    """Why a convolution cannot be recast where it stands, or None."""
    if reason := refusal(module):
        return reason
    if not calls:
        return NOT_CALLED
    if any(len(call.input) != 4 for call in calls):
        return f"got {calls[0].input}, expected (batch, C, H, W)"
    if any(call.num_arguments > 1 for call in calls):
        return "is called with more than its input (output_size?), which the new layer does not take"
    if other := sharing.elsewhere(module):
        return f"shares its {other}, and would stop doing so"
    if name and isinstance(model.get_submodule(name.rpartition(".")[0]), OptimizedModule):
        return "is compiled by itself, and its wrapper would go on running it: recast first, then compile"
    return None


def _converted(module: nn.Module, config: RecastConfig) -> RecastLayer | str:
    """The layer that a module becomes, on the meta device; or why its rule refuses."""
    found = find_rule(module)
    assert found is not None
    try:
        return found[1](on_meta(module), config)
    except RecastError as error:
        return str(error)


# --- what is asked for ------------------------------------------------------------------------------------------------


def _wanted(
    where: Where, model: nn.Module, convolutions: dict[str, nn.Module], seen: Observation
) -> tuple[dict[str, bool], dict[str, str]]:
    """Name of a convolution that is asked for → whether by its full name; and why each other is not."""
    if callable(where):
        wanted = {name: True for name, module in convolutions.items() if where(name, module)}
        return wanted, {name: "excluded by the predicate" for name in convolutions if name not in wanted}
    patterns = [where] if isinstance(where, str) else list(where) if isinstance(where, Iterable) else [where]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise RecastError(f"where takes names, globs, re:REGEX, stage:N or a predicate, got {where!r}")
    wanted = {}
    for pattern in patterns:
        for name in _matches(pattern, model, convolutions, seen):
            wanted[name] = wanted.get(name, False) or name == pattern
    sizes = _map_sizes(convolutions, seen) if patterns == ["last_stage"] else {}
    last = _last_stage_size(convolutions, sizes) if sizes else ()

    def reason(name: str) -> str:
        if not is_spatial(convolutions[name]):
            return ONE_TAP
        if patterns != ["last_stage"]:
            return f"not selected by {_text(patterns)}"
        if name in sizes:
            return f"before the last stage ({'×'.join(map(str, sizes[name]))}; the last is {'×'.join(map(str, last))})"
        if name not in seen.calls:
            return NOT_CALLED
        is_map = len(seen.calls[name][0].output) == 4
        return "runs on regions of the image, in no stage" if is_map else "not a two-dimensional map"

    return wanted, {name: reason(name) for name in convolutions if name not in wanted}


def _matches(pattern: str, model: nn.Module, convolutions: dict[str, nn.Module], seen: Observation) -> list[str]:
    if pattern == "all":
        return [name for name, module in convolutions.items() if is_spatial(module)]
    if pattern == "last_stage":
        sizes = _map_sizes(convolutions, seen)
        smallest = _last_stage_size(convolutions, sizes)
        return [name for name, size in sizes.items() if size == smallest]
    if pattern.startswith("stage:"):
        found = _stages(model, convolutions, seen)
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


def _text(where: Where) -> str:
    if callable(where):
        return "predicate"
    return where if isinstance(where, str) else ", ".join(where)


# --- stages -----------------------------------------------------------------------------------------------------------


def _stages(model: nn.Module, convolutions: dict[str, nn.Module], seen: Observation) -> list[list[str]]:
    """The spatial convolutions of every stage, in order: `stage:0` is the stem's, as in timm's `out_indices`.

    timm's `feature_info` names the module that ends a stage. Without one, a stage is a size of the maps.
    """
    order = [name for name, _ in model.named_modules()]
    info = getattr(model, "feature_info", None)
    names = [str(entry.get("module", "")) for entry in info] if isinstance(info, list) else []
    # the position of the last module of every stage
    ends = [max((i for i, n in enumerate(order) if f"{n}.".startswith(f"{name}.")), default=-1) for name in names]
    if not ends or min(ends) < 0 or ends != sorted(ends):
        areas = {name: math.prod(size) for name, size in _map_sizes(convolutions, seen).items()}
        return [[n for n in areas if areas[n] == area] for area in sorted(set(areas.values()), reverse=True)]
    found: list[list[str]] = [[] for _ in ends]
    for name in (name for name, module in convolutions.items() if is_spatial(module)):
        at = order.index(name)
        stage = next((i for i, end in enumerate(ends) if at <= end), None)
        if stage is not None:
            found[stage].append(name)
    return found


def _map_sizes(convolutions: dict[str, nn.Module], seen: Observation) -> dict[str, tuple[int, int]]:
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


def _last_stage_size(convolutions: dict[str, nn.Module], sizes: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """Smallest of `_map_sizes` that has a convolution which a rule can take. Raises `RecastError` for no map at all."""
    if not sizes:
        raise RecastError("the model has no convolution with a kernel larger than 1×1 that the example reaches")
    # where the very last stage is of another kind (a mixture of kernels, say), the last that is not
    possible = [size for name, size in sizes.items() if find_rule(convolutions[name])] or list(sizes.values())
    return min(possible, key=math.prod)
