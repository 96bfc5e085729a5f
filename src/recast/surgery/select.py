"""Selection of the layers of a plan, with the reason why each other convolution stays.

A selection is the papers' last stage, another stage, names or globs.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from recast.errors import RecastError, listed, shown, suggest
from recast.layers.cmhsa import RecastLayer
from recast.layers.config import BesideGate, RecastConfig
from recast.names import modules_by_name
from recast.surgery.rules import axes_of, convert, held_elsewhere, refusal
from recast.tracing.observe import Observation, on_meta

Where = str | Sequence[str]
Modules = dict[str, nn.Module]
Sizes = dict[str, tuple[int, int]]

ONE_TAP = "1×1: one tap, nothing to shift (name it in full to recast it)"
LAST = {
    "last_stage": "in the last stage",
    "last_of_blocks": "not the last of its block (where=last_stage takes it)",
    "last": "not the last of the network (where=last_stage takes it)",
}
"""Selections in the last stage, and why they leave a convolution of that stage."""
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
PATCHES = "has kernels that do not overlap (kernel = stride), as a patch embedding: name it in full to recast it"
NOT_CALLED = "not called by the example (at most its weight is read)"


def is_spatial(module: nn.Module) -> bool:
    """Return True if a convolution has more than one tap."""
    kernel: Any = getattr(module, "kernel_size", 1)
    return bool(max(kernel) > 1) if isinstance(kernel, tuple) else bool(kernel > 1)


def is_none(where: Where | None) -> bool:
    """Return True for the selection "none"."""
    return where == "none" or (isinstance(where, list | tuple) and list(where) == ["none"])


def select(
    where: Where | None, model: nn.Module, convolutions: Modules, observed: Observation, config: RecastConfig
) -> tuple[dict[str, RecastLayer], set[str], dict[str, str]]:
    """Choose among the model's convolutions, and make the layers that those become.

    Returns the layers (on the meta device) by name, in the order of the model; the layers that were named in full; why
    each other convolution stays. Raises `RecastError` if a pattern, or the selection, matches nothing, or if a layer
    named in full cannot be recast.
    """
    where = config.where if where is None else where
    if is_none(where):
        return {}, set(), dict.fromkeys(convolutions, "not selected by none")
    others = {axes_of(module) for module in convolutions.values()}
    if convolutions and 2 not in others:
        axes = " and ".join(f"{count}-d" for count in sorted(others))
        raise RecastError(f"the convolutions of {type(model).__name__} are {axes}: only 2-d ones become attention")
    adapted = _adapters(model, convolutions)
    takes = {name: refusal(module, config) is None and name not in adapted for name, module in convolutions.items()}
    explicit, reasons = _wanted(where, model, convolutions, observed, takes)
    names = [name for name in convolutions if name not in reasons]
    if not names:
        asked = where if isinstance(where, str) else ", ".join(where)
        raise RecastError(f"the selection {asked} matches no convolution that can become attention")
    elsewhere = held_elsewhere(model, convolutions)
    layers: dict[str, RecastLayer] = {}
    for name in names:
        module = convolutions[name]
        result = adapted.get(name) or _layer_or_reason(name, model, module, observed, config, elsewhere.get(name))
        if isinstance(result, RecastLayer) and name == next(iter(observed.calls), None) and not _overlaps(module):
            result = result if name in explicit or not is_spatial(module) else PATCHES
        if isinstance(result, RecastLayer):
            layers[name] = result
        elif name in explicit:
            raise RecastError(f"{name} cannot be recast: {result}")
        else:
            reasons[name] = result
    if not layers:
        raise RecastError(f"nothing can be recast: {names[0]} {reasons[names[0]]}")
    return layers, explicit, reasons


def _overlaps(module: nn.Module) -> bool:
    """Return False for kernels that lie side by side (kernel = stride)."""
    return bool(getattr(module, "kernel_size", 1) != getattr(module, "stride", 0))


def _layer_or_reason(
    name: str, model: nn.Module, module: nn.Module, observed: Observation, config: RecastConfig, shared: str | None
) -> RecastLayer | str:
    """Return the new layer of a convolution on the meta device, or the reason why it cannot be recast."""
    if reason := refusal(module, config):
        return reason
    calls, is_beside = observed.calls.get(name), isinstance(config, BesideGate)
    if not calls:
        return NOT_CALLED
    if name in observed.by_class:
        return "is treated by its class (isinstance(…, nn.Conv2d), a method), which the new layer does not have"
    if any(len(call.input) != 4 for call in calls):
        return f"got {calls[0].input}, expected (batch, C, H, W)"
    if not is_beside and any(call.num_arguments > 1 for call in calls):
        return "is called with more than its input (output_size?), which the new layer does not take"
    if not is_beside and shared:
        return f"shares its {shared}, and would stop doing so"
    if any(isinstance(parent, OptimizedModule) and parent._orig_mod is module for parent in model.modules()):
        return "is compiled by itself, and its wrapper would go on running it: recast first, then compile"
    try:
        layer = convert(on_meta(module), config, module)
    except RecastError as error:
        return str(error)
    channels = [(call.input[1], call.output[1]) for call in calls if len(call.output) == 4]
    if any(pair != (layer.in_channels, layer.out_channels) for pair in channels) or len(channels) < len(calls):
        states = f"states {layer.in_channels} → {layer.out_channels} channels"
        return f"{states}, but maps {calls[0].input} to {calls[0].output}"
    return layer


def _adapters(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the `names` inside adapters (peft's LoRA) and the reason why they stay."""
    reason = "is part of the adapter {}: merge it first (peft: merge_and_unload)"
    places = [place for place, module in modules_by_name(model).items() if "base_layer" in module._modules]
    return {name: reason.format(place) for place in places for name in names if name.startswith(f"{place}.")}


# --- patterns ---------------------------------------------------------------------------------------------------------


def _wanted(
    where: Where, model: nn.Module, convolutions: Modules, observed: Observation, takes: dict[str, bool]
) -> tuple[set[str], dict[str, str]]:
    """Return the convolutions selected by their full name, and the reasons for those not selected."""
    patterns: list[Any] = [where] if isinstance(where, str) or not isinstance(where, Iterable) else list(where)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise RecastError(f"where takes names, globs or stage:N, got {shown(where)}")
    if not patterns:
        raise RecastError("where is empty: expected last_stage, all, stage:N, names or globs")
    sizes = _map_sizes(convolutions, observed)
    inside = _in_backbone(sizes, takes)
    wanted = {name for pattern in patterns for name in _matches(pattern, model, convolutions, sizes, takes)}

    def reason(name: str) -> str:
        if not is_spatial(convolutions[name]):
            return ONE_TAP
        if len(patterns) > 1 or patterns[0] not in LAST:
            return f"not selected by {', '.join(patterns)}"
        if name in sizes:
            if name not in inside:
                return "outside the backbone (name it to recast it)"
            size, last = ("×".join(map(str, sizes[n])) for n in (name, next(iter(wanted))))
            same = LAST[patterns[0]] if _overlaps(convolutions[name]) else PATCHES
            return same if size == last else f"before the last stage ({size}; the last is {last})"
        if name not in observed.calls:
            return NOT_CALLED
        is_map = len(observed.calls[name][0].output) == 4
        return "runs on a batch of regions or heads, in no stage" if is_map else "not a two-dimensional map"

    taken = {name for name in wanted if name in patterns or is_spatial(convolutions[name])}
    return wanted & set(patterns), {name: reason(name) for name in convolutions if name not in taken}


def _matches(pattern: str, model: nn.Module, convolutions: Modules, sizes: Sizes, takes: dict[str, bool]) -> list[str]:
    """Return the convolutions that a pattern matches, 1×1 included. Raises `RecastError` for none."""
    if pattern == "all":
        return [name for name, module in convolutions.items() if is_spatial(module)]
    if pattern == "last_stage":
        return _last_stage(sizes, takes)
    if pattern in ("last_of_blocks", "last"):
        stage = _last_stage(sizes, takes)
        possible = [name for name in stage if takes[name]] or stage
        possible = [name for name in possible if _overlaps(convolutions[name])] or possible
        return possible[-1:] if pattern == "last" else _last_of_blocks(model, possible)
    if pattern.startswith("stage:"):
        return _stage(pattern, model, sizes)
    names = [name for name in convolutions if fnmatch.fnmatchcase(name, pattern)]
    if not names:
        raise RecastError(
            f"no convolution matches {pattern!r}: expected last_of_blocks, last_stage, all, stage:N, or a layer's "
            f"name or glob ({listed([*convolutions], 3)}).{suggest(pattern, [*LAST, 'all', *convolutions])}"
        )
    return names


def _last_stage(sizes: Sizes, takes: dict[str, bool]) -> list[str]:
    if not sizes:
        raise RecastError("the model has no 2-d convolution with a kernel larger than 1×1 that the example reaches")
    sizes = _in_backbone(sizes, takes)
    # if nothing in the very last stage can be recast (a mixture of kernels, say), the last stage where something can
    possible = [size for name, size in sizes.items() if takes[name]] or list(sizes.values())
    return [name for name, size in sizes.items() if size == min(possible, key=math.prod)]


def _in_backbone(sizes: Sizes, takes: dict[str, bool]) -> Sizes:
    """Return the sizes in the part named `backbone`, without a detector's pyramid; all, if there is none."""
    inside = ({n: s for n, s in sizes.items() if part in f".{n}"} for part in (".backbone.body.", ".backbone."))
    return next((part for part in inside if any(takes[name] for name in part)), sizes)


def _last_of_blocks(model: nn.Module, stage: Sequence[str]) -> list[str]:
    """Return the last convolution of each block: of the smallest item of a container that holds more than it.

    In a plain row every convolution is a block; without a container, the model is.
    """
    modules = modules_by_name(model)

    def block(name: str) -> str:
        parts = name.split(".")
        parents = (modules[".".join(parts[:depth])] for depth in range(len(parts)))
        depths = [depth for depth, parent in enumerate(parents, 1) if isinstance(parent, CONTAINERS)]
        return ".".join(parts[: ([depth for depth in depths if depth < len(parts)] or depths or [0])[-1]])

    return list({block(name): name for name in stage}.values())


def _stage(pattern: str, model: nn.Module, sizes: Sizes) -> list[str]:
    areas = sorted({math.prod(size) for size in sizes.values()}, reverse=True)
    stages = [[name for name, size in sizes.items() if math.prod(size) == area] for area in areas]
    number = pattern.removeprefix("stage:")
    if not re.fullmatch(r"-?\d+", number) or not -len(stages) <= int(number) < len(stages):
        raise RecastError(f"{type(model).__name__} has stages stage:0 to stage:{len(stages) - 1}, got {pattern!r}")
    return stages[int(number)]


def _map_sizes(convolutions: Modules, observed: Observation) -> Sizes:
    """Return rows and columns of the output of every spatial convolution, the largest of its uses, as they first run.

    Convolutions of another dimension are left out, and, unless the model has nothing else, those that run on regions of
    the image (a detector's proposals): they belong to no stage.
    """
    maps = {
        name: [call for call in observed.calls.get(name, ()) if len(call.output) == 4]
        for name, module in convolutions.items()
        if is_spatial(module)
    }
    whole = {name: [call for call in calls if call.input[0] == observed.batch] for name, calls in maps.items()}
    chosen = whole if any(whole.values()) else maps
    sizes = {name: [(call.output[2], call.output[3]) for call in calls] for name, calls in chosen.items()}
    return {name: max(sizes[name], key=math.prod) for name in observed.calls if sizes.get(name)}
