"""Removal of a residual block's stride: from the convolution, its shortcut, and the convolutions that follow.

The papers run the last stage at stride 1 (d'Ascoli et al. 2021, as BoTNet does). That changes the network's function:
the map is denser, and a 3×3 layer after it sees half the distance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from recast.errors import RecastError
from recast.layers.geometry import Geometry
from recast.modes import computes_as
from recast.names import modules_by_name
from recast.surgery.rules import pads_same
from recast.tracing.observe import Call

Action = Literal["geometry", "stride_1", "identity"]


@dataclass(frozen=True)
class Edit:
    """One change to a layer that stays what it is (a shortcut, a convolution that follows)."""

    name: str
    action: Action
    """geometry: new stride, dilation, padding. stride_1: set `.stride`. identity: remove a pool."""
    geometry: Geometry | None = None


def apply_edits_(model: nn.Module, edits: Iterable[Edit]) -> None:
    """Apply the edits, in place."""
    for edit in edits:
        module = modules_by_name(model)[edit.name]
        if edit.geometry is not None:
            assert isinstance(module, nn.Conv2d)
            set_geometry_(module, edit.geometry)
        elif edit.action == "stride_1":
            module.stride = (1, 1) if isinstance(module.stride, tuple) else 1  # type: ignore[assignment]
        else:
            replace_module_(model, module, nn.Identity().train(module.training))


def check_edits(model: nn.Module, edits: Iterable[Edit], planned_for: str) -> None:
    """Raise `RecastError` for an edit of a layer that is missing or of another kind."""
    modules = modules_by_name(model)
    for edit in edits:
        module = modules.get(edit.name)
        if edit.geometry is not None:
            fits = isinstance(module, nn.Conv2d) and module.kernel_size == edit.geometry.kernel
        else:
            fits = module is not None and (edit.action != "stride_1" or hasattr(module, "stride"))
        if not fits:
            actual = "no such layer" if module is None else f"a {type(module).__name__} there"
            raise RecastError(
                f"the plan is for another model: it changes {edit.name!r} ({edit.action.replace('_', ' ')}), and "
                f"{type(model).__name__} has {actual} (planned for {planned_for})"
            )


def replace_module_(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` wherever `old` stands in `model` (a shared module stands in several places)."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                parent._modules[name] = new


def set_geometry_(conv: nn.Conv2d, geometry: Geometry) -> None:
    """Give a convolution with numeric zero padding another stride, dilation and padding."""
    conv.stride, conv.dilation = geometry.stride, geometry.dilation
    conv.padding = (geometry.padding[0], geometry.padding[2])


def plan_stride_edits(
    model: nn.Module, selected: Sequence[str], spatial: dict[str, nn.Module], calls: dict[str, list[Call]]
) -> list[Edit]:
    """Return the edits that remove the stride of `selected`.

    They change the shortcuts, and the geometries of the strided convolutions.

    `spatial` holds every convolution with more than one tap. Raises `RecastError` where a shortcut is unknown, or where
    the strided convolution is not in the last stage.
    """
    sizes = {name: uses[0].output[2:] for name, uses in calls.items()}
    order = [name for name in calls if name in spatial]
    if pointwise := [name for name in selected if name not in spatial]:
        raise RecastError(f"stride='remove' works on blocks: {pointwise[0]} is 1×1, recast it with stride='keep'")
    strided = [name for name in order if name in selected and _geometry(spatial[name]).stride != (1, 1)]
    if any(math.prod(sizes[name]) == 1 for name in strided):
        raise RecastError("stride='remove': the last stage of this example is a single pixel; plan with a larger image")
    if not strided:
        raise RecastError("stride='remove': none of the selected convolutions has a stride to remove")
    geometries: dict[str, Geometry] = {}
    shortcuts: list[Edit] = []
    for name in strided:
        geometry = _numeric_geometry(name, spatial[name])
        after = order[order.index(name) + 1 :]
        if smaller := [follower for follower in after if sizes[follower] != sizes[name]]:
            raise RecastError(
                f"stride='remove': {name} is not in the last stage ({smaller[0]} follows at another size); "
                "select the last stage only, or keep the stride"
            )
        geometries[name] = replace(geometry, stride=(1, 1))
        shortcuts += _shortcut_edits(model, name)
    return shortcuts + [Edit(name, "geometry", geometry) for name, geometry in geometries.items()]


def _geometry(module: nn.Module) -> Geometry:
    if not isinstance(module, nn.Conv2d):
        raise RecastError(f"only nn.Conv2d can change its stride, got {type(module).__name__}")
    return Geometry.of(module)


def _numeric_geometry(name: str, conv: nn.Module) -> Geometry:
    geometry, same = _geometry(conv), pads_same(conv)
    if isinstance(conv.padding, str) or conv.padding_mode != "zeros" or same:
        has = "padding that follows the input" if same else f"{conv.padding!r} {conv.padding_mode}"
        raise RecastError(f"stride='remove' needs numeric zero padding, {name} ({type(conv).__name__}) has {has}")
    return geometry


def _shortcut_edits(model: nn.Module, name: str) -> list[Edit]:
    """Return the edits of the shortcut around the block of `name`; none if there is no shortcut.

    A block without a module named `downsample` or `shortcut` is taken to have no strided shortcut; if it has one in
    code only, the shapes of the edited network do not match and `plan` raises.
    """
    block_name = name.rpartition(".")[0]
    block = modules_by_name(model)[block_name]
    keys = [key for key in ("downsample", "shortcut") if isinstance(getattr(block, key, None), nn.Module)]
    if not keys:
        return []
    path, shortcut = f"{block_name}.{keys[0]}".lstrip("."), getattr(block, keys[0])
    children = shortcut.named_children() if isinstance(shortcut, nn.Sequential) else ()
    layers = {f"{path}.{child}": layer for child, layer in children} or {path: shortcut}
    edits = []
    for layer_path, layer in layers.items():
        is_opaque = layer is shortcut and bool(list(layer.children()))
        action = None if is_opaque else _action(layer)
        if action is None:
            raise RecastError(
                f"cannot take the stride out of {name}: its shortcut {layer_path} is {type(layer).__name__}, not a "
                "known kind (convolution, 2×2 average pool and convolution, subsampling module); use stride='keep'"
            )
        if action != "none":
            edits.append(Edit(layer_path, action))
    return edits


def _action(layer: nn.Module) -> Action | Literal["none"] | None:
    """Return the action that removes the stride of a layer in a shortcut; None for an unknown kind."""

    def single(value: Any) -> int:
        """A size given as one number or as equal ones; 0 for anything else."""
        values = set(value) if isinstance(value, tuple | list) else {value}
        return int(values.pop()) if len(values) == 1 else 0

    stride = single(getattr(layer, "stride", 1))
    if isinstance(layer, nn.AvgPool2d):
        sizes = single(layer.kernel_size), stride, single(layer.padding)
        return "identity" if computes_as(layer, nn.AvgPool2d) and sizes == (2, 2, 0) else None
    if stride == 1:
        harmless = isinstance(layer, nn.Conv2d | nn.Identity | nn.modules.batchnorm._BatchNorm | nn.GroupNorm)
        return "none" if harmless else None
    strides = isinstance(layer, nn.Conv2d) or (hasattr(layer, "stride") and not list(layer.parameters()))
    return "stride_1" if strides else None
