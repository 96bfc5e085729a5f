"""Removing a stride, a step on a residual block: the convolution, its shortcut, and the convolutions that follow.

The papers run the last stage at stride 1 (d'Ascoli et al. 2021, as BoTNet does). That changes the network's function:
the map is denser, and a 3×3 layer after it sees half the distance. `dilate` gives the layers after it twice the reach
instead, so that the outputs at even positions are the parent's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from recast.errors import RecastError
from recast.layers.geometry import Geometry
from recast.surgery.rules import pads_same
from recast.tracing.observe import Call

Action = Literal["geometry", "stride_1", "identity", "pool_stride_1"]


@dataclass(frozen=True)
class Edit:
    """One change to a layer that stays what it is (a shortcut, a convolution that follows)."""

    name: str
    action: Action
    """geometry: new stride, dilation, padding. stride_1: set `.stride`. identity, pool_stride_1: replace a pool."""
    geometry: dict[str, Any] | None = None

    def apply_(self, model: nn.Module) -> None:
        """Carry the change out."""
        module = model.get_submodule(self.name)
        if self.action == "geometry":
            assert isinstance(module, nn.Conv2d)
            assert self.geometry is not None
            set_geometry_(module, Geometry.from_dict(self.geometry))
        elif self.action == "stride_1":
            module.stride = (1, 1) if isinstance(module.stride, tuple) else 1  # type: ignore[assignment]
        else:
            replacement = nn.Identity() if self.action == "identity" else _stride_1_pool()
            replace_module_(model, module, replacement.train(module.training))


def replace_module_(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` wherever `old` stands in `model` (a shared module stands in several places)."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                parent._modules[name] = new


def _stride_1_pool() -> nn.Module:
    """2×2 average pooling at stride 1: at even positions the means of a stride-2 pool that ignores what is outside."""
    return nn.Sequential(nn.ReplicationPad2d((0, 1, 0, 1)), nn.AvgPool2d(2, stride=1))


def set_geometry_(conv: nn.Conv2d, geometry: Geometry) -> None:
    """Give a convolution with numeric zero padding another stride, dilation and padding."""
    conv.stride, conv.dilation = geometry.stride, geometry.dilation
    conv.padding = (geometry.padding[0], geometry.padding[2])


def removed_stride(geometry: Geometry) -> Geometry:
    """The geometry with stride 1."""
    return replace(geometry, stride=(1, 1))


def dilated(geometry: Geometry, factor: tuple[int, int]) -> Geometry:
    """The geometry on a map that is `factor` times denser: dilation and padding grow with it."""
    (d0, d1), (top, bottom, left, right), (f0, f1) = geometry.dilation, geometry.padding, factor
    padding = (top * f0, bottom * f0, left * f1, right * f1)
    return replace(geometry, padding=padding, dilation=(d0 * f0, d1 * f1))


def plan_stride_edits(
    model: nn.Module,
    selected: Sequence[str],
    spatial: dict[str, nn.Module],
    calls: dict[str, list[Call]],
    mode: Literal["remove", "dilate"],
) -> tuple[dict[str, Geometry], list[Edit]]:
    """New geometries of convolutions by name, and the edits of shortcuts, for taking the stride out of `selected`.

    `spatial` holds every convolution with more than one tap. Raises `RecastError` where a shortcut is unknown, where
    the strided convolution is not in the last stage, or where a layer cannot be dilated.
    """
    geometries: dict[str, Geometry] = {}
    edits: list[Edit] = []
    order = list(calls)
    strided = [n for n in order if n in selected and n in spatial and Geometry.of(_conv(spatial[n])).stride != (1, 1)]
    if pointwise := [n for n in selected if n not in spatial]:
        raise RecastError(f"stride={mode!r} works on blocks: {pointwise[0]} is 1×1, recast it with stride='keep'")
    if any(math.prod(calls[n][0].output[2:]) == 1 for n in strided):
        raise RecastError(
            f"stride={mode!r}: the last stage is a single pixel at this example, so shapes cannot show whether the "
            "shortcuts fit; plan with a larger image"
        )
    if not strided:
        raise RecastError(f"stride={mode!r}: none of the selected convolutions has a stride to remove")
    for name in strided:
        conv = _conv(spatial[name])
        geometry = Geometry.of(conv)
        _check_numeric(name, conv, mode)
        after = [n for n in order[order.index(name) + 1 :] if n in spatial]
        smaller = [n for n in after if calls[n][0].output[2:] != calls[name][0].output[2:]]
        if smaller:
            raise RecastError(
                f"stride={mode!r}: {name} is not in the last stage ({smaller[0]} follows at another size); "
                "select the last stage only, or keep the stride"
            )
        geometries[name] = removed_stride(geometry)
        edits += _shortcut_edits(model, name, mode)
        if mode == "dilate":
            for follower in after:
                follower_conv = _conv(spatial[follower])
                _check_numeric(follower, follower_conv, mode)
                grown = dilated(Geometry.of(follower_conv), geometry.stride)
                geometries[follower] = grown
                if follower not in selected:
                    edits.append(Edit(follower, "geometry", grown.to_dict()))
    return geometries, edits


def _conv(module: nn.Module) -> nn.Conv2d:
    if not isinstance(module, nn.Conv2d):
        raise RecastError(f"only nn.Conv2d can change its stride or dilation, got {type(module).__name__}")
    return module


def _check_numeric(name: str, conv: nn.Conv2d, mode: str) -> None:
    if isinstance(conv.padding, str) or conv.padding_mode != "zeros" or pads_same(conv):
        raise RecastError(
            f"stride={mode!r} needs numeric zero padding, {name} ({type(conv).__name__}) has "
            + ("padding that follows the input" if pads_same(conv) else f"{conv.padding!r} {conv.padding_mode}")
        )


def _shortcut_edits(model: nn.Module, name: str, mode: Literal["remove", "dilate"]) -> list[Edit]:
    """What has to happen to the shortcut around the block of `name`; none where the block has none.

    A block without a module named `downsample` or `shortcut` is taken to have no strided shortcut; where it has one in
    code alone, the shapes of the edited network do not add up and `plan` refuses.
    """
    block_name = name.rpartition(".")[0]
    block = model.get_submodule(block_name)
    for attribute in ("downsample", "shortcut"):
        shortcut = getattr(block, attribute, None)
        if isinstance(shortcut, nn.Module):
            path = f"{block_name}.{attribute}" if block_name else attribute
            return _edits_of(shortcut, path, name, mode)
    return []


def _edits_of(shortcut: nn.Module, path: str, name: str, mode: Literal["remove", "dilate"]) -> list[Edit]:
    if not list(shortcut.children()):
        layers = [(path, shortcut)]
    elif isinstance(shortcut, nn.Sequential):
        layers = [(f"{path}.{child_name}", child) for child_name, child in shortcut.named_children()]
    else:
        raise _unknown(path, shortcut, name)
    edits: list[Edit] = []
    for layer_path, layer in layers:
        if isinstance(layer, nn.AvgPool2d):
            if {_single(layer.kernel_size), _single(layer.stride)} == {2} and not _single(layer.padding):
                edits.append(Edit(layer_path, "identity" if mode == "remove" else "pool_stride_1"))
                continue
            raise _unknown(layer_path, layer, name)
        stride = getattr(layer, "stride", 1)
        if _single(stride) == 1:
            if not isinstance(layer, nn.Conv2d | nn.Identity | nn.modules.batchnorm._BatchNorm | nn.GroupNorm):
                raise _unknown(layer_path, layer, name)
        elif isinstance(layer, nn.Conv2d) or (hasattr(layer, "stride") and not list(layer.parameters())):
            edits.append(Edit(layer_path, "stride_1"))
        else:
            raise _unknown(layer_path, layer, name)
    return edits


def _single(value: Any) -> int:
    """A size given as one number or as equal ones; 0 for anything else."""
    values = set(value) if isinstance(value, tuple | list) else {value}
    return int(values.pop()) if len(values) == 1 else 0


def _unknown(path: str, layer: nn.Module, name: str) -> RecastError:
    return RecastError(
        f"cannot take the stride out of {name}: its shortcut {path} is {type(layer).__name__}, not a known kind "
        "(convolution, 2×2 average pool and convolution, subsampling module); use stride='keep'"
    )
