"""Geometry of a convolution of any class, found by what it computes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import _pair

from recast.errors import RecastError, SizeError, first_line
from recast.layers.geometry import Geometry, PaddingMode
from recast.modes import in_eval

TOLERANCE = 1e-10
"""Largest relative error of the outputs, in fp64."""
_PROBED: WeakKeyDictionary[nn.Module, tuple[list[Any], Geometry | str]] = WeakKeyDictionary()
"""What a probe depends on besides the weight's values, and its result."""


def probed_geometry(module: nn.Module) -> Geometry:
    """Return the geometry with which a module convolves its padded input with its parameter `weight`.

    Stride and dilation are those that it states (default: 1). Its outputs on noise of odd and even sizes, in fp64 and
    eval mode, must be those of one padding: SAME, or fixed on every side (zeros, reflected, replicated, circular).
    Raises `RecastError` for a module that computes anything else, or holds other tensors.
    """
    settings = _settings(module)
    if _PROBED.get(module, ((),))[0] != settings:
        try:
            _PROBED[module] = settings, _probe(module)
        except RecastError as error:
            _PROBED[module] = settings, str(error)
    if isinstance(result := _PROBED[module][1], str):
        raise RecastError(result)
    return result


def _settings(module: nn.Module) -> list[Any]:
    """Return the attributes of a module and its parts, objects by identity, and shape and device of its parameters."""
    values = (value for part in module.modules() for value in (part, *vars(part).values()))
    plain = [value if isinstance(value, int | float | str | tuple) else id(value) for value in values]
    return [*plain, *((tensor.shape, tensor.device) for tensor in module.parameters())]


@torch.no_grad()
def _probe(module: nn.Module) -> Geometry:
    if missing := [name for name in ("in_channels", "out_channels", "weight", "bias") if not hasattr(module, name)]:
        raise RecastError(f"it does not state {missing[0]}")
    weight = module._parameters.get("weight")
    held = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    if others := sorted(held - {"weight", "bias"}):
        raise RecastError(f"it holds {others[0]} too")
    if weight is None or weight.dim() != 4 or weight.is_meta or not weight.is_floating_point():
        raise RecastError("its weight is no kernel with values")
    groups: Any = getattr(module, "groups", 1)
    subject, kernel = copy.deepcopy(module).cpu().double(), (weight.shape[2], weight.shape[3])
    stride, dilation = (_pair(getattr(module, name, 1)) for name in ("stride", "dilation"))
    like = Geometry(kernel, stride, dilation=dilation)
    generator, least = torch.Generator().manual_seed(0), [2 * reach + 3 for reach in like.reach]
    pairs: list[tuple[Tensor, Tensor]] = []
    with in_eval(subject):
        for rows, columns in ((0, 1), (1, 2), (2, 0), (3, 3)):
            size = 1, weight.shape[1] * groups, least[0] + rows, least[1] + columns
            x = torch.randn(size, dtype=torch.float64, generator=generator)
            try:
                pairs.append((x, subject(x.clone())))
            except Exception as error:  # whatever a class of its own does with an image of another size
                raise RecastError(f"it does not run on {tuple(size)}: {first_line(error)}") from error
    first = slice(weight.shape[0] // groups)  # of the first group: enough to tell paddings apart
    for geometry in _candidates(like, pairs):
        parts = ((x[:, : weight.shape[1]], y[:, first]) for x, y in pairs)
        if all(_computes(geometry, subject, x, y, first, 1) for x, y in parts) and all(
            _computes(geometry, subject, x, y, slice(None), groups) for x, y in pairs
        ):
            return geometry
    raise RecastError("its output is not a convolution of its padded input with its weight")


def _candidates(like: Geometry, pairs: list[tuple[Tensor, Tensor]]) -> Iterator[Geometry]:
    """Yield the fixed paddings that give the right sizes, the smallest and most even ones first, and then SAME."""
    sides: list[list[tuple[int, int]]] = []
    for axis, (reach, stride) in enumerate(zip(like.reach, like.stride, strict=True)):
        sizes = [(x.shape[2 + axis], y.shape[2 + axis]) for x, y in pairs if y.dim() == 4]
        totals = [
            total
            for total in range(2 * reach + stride + 1)
            if all((size + total - reach - 1) // stride + 1 == count for size, count in sizes)
        ]
        found = [(before, total - before) for total in totals for before in range(total + 1)]
        sides.append(sorted(found, key=lambda side: (sum(side), abs(side[0] - side[1]))))
    for rows in sides[0]:
        for columns in sides[1]:
            for mode in get_args(PaddingMode) if any((*rows, *columns)) else ("zeros",):
                yield Geometry(like.kernel, like.stride, (*rows, *columns), mode, like.dilation)
    yield Geometry(like.kernel, like.stride, dilation=like.dilation, same=True)


def _computes(geometry: Geometry, module: Any, x: Tensor, y: Tensor, outputs: slice, groups: int) -> bool:
    """Return True if y is the convolution of x with some output channels of the module's kernel."""
    bias = None if module.bias is None else module.bias[outputs]
    try:
        expected = geometry.convolve(x, module.weight[outputs], bias, groups)
    except (SizeError, RuntimeError):  # a padding wider than the image
        return False
    return expected.shape == y.shape and bool((expected - y).abs().max() <= TOLERANCE * y.abs().max())
