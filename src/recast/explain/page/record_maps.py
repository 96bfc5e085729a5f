"""From a model and an image to the maps of a page: what every recast layer attends to, for some or all queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from recast.cmhsa import CMHSA, RecastLayer
from recast.errors import RecastError
from recast.explain.page.scene import Axis, Floats, Layer, Maps
from recast.explain.rows_of_maps import MAX_NUMBERS, content_of, rows_of
from recast.functional import expand_heads
from recast.gpsa import GPSA
from recast.shapes import in_eval
from recast.surgery import recast_layers

MAX_QUERIES, MAX_KEYS = 400, 1024
"""Queries and blocks of keys of a layer whose content is stored: early layers have thousands of each."""


def record_maps(model: nn.Module, image: Tensor) -> tuple[Any, tuple[Layer, ...], dict[str, Maps]]:
    """What `model` gives for one image (1, C, height, width), its recast layers, and what they store for this image.

    The layers come in the order of their calls; of one that is called twice it is the latest call. The model is run in
    eval mode, without gradients, and left as it was. Maps of many tokens are never held in full.
    """
    found: dict[str, tuple[Layer, Maps]] = {}

    def watch(name: str) -> Callable[[nn.Module, Any, dict[str, Any]], None]:
        def keep(layer: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
            assert isinstance(layer, RecastLayer)
            x = (*inputs, *named.values())[0]  # may be passed by name
            found.pop(name, None)
            found[name] = describe(name, layer, *x.shape[-2:]), stored_maps(layer, x)

        return keep

    layers = recast_layers(model)
    handles = [layer.register_forward_pre_hook(watch(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        with in_eval(model), torch.no_grad():
            output = model(image)
    finally:
        for handle in handles:
            handle.remove()
    return output, tuple(layer for layer, _ in found.values()), {name: maps for name, (_, maps) in found.items()}


@torch.no_grad()
def describe(name: str, layer: RecastLayer, height: int, width: int) -> Layer:
    """The heads of a layer for an input of `height` × `width` pixels: grids, and for GPSA gates and positions.

    Raises `RecastError` for gates and positions that are not finite.
    """
    geometry = layer.geometry
    rows_at, columns_at = geometry.query_positions(height, width)
    at_rows, at_columns = geometry.pixels(height, width)
    grid: dict[str, Any] = {
        "name": name,
        "kernel": geometry.kernel,
        "offsets": tuple(geometry.offsets()),
        "padded": geometry.padded_size(height, width),
        "keys": (Axis(at_rows.start, at_rows.step, height), Axis(at_columns.start, at_columns.step, width)),
        "queries": tuple(Axis(at.start, at.step, len(at)) for at in (rows_at, columns_at)),
    }
    if isinstance(layer, CMHSA):
        return Layer(kind="maps", description=f"{geometry}, C-MHSA", **grid)
    w = expand_heads(layer.weights(), geometry)
    if not all(bool(of.isfinite().all()) for of in (*w.gates, w.center, w.alpha) if of is not None):
        raise RecastError(f"{name} has gates or positions that are not finite: there is nothing to draw")
    return Layer(
        kind="gpsa",
        description=f"{geometry}, {layer.config.gate} gate",
        gates=_gates(layer),
        shift=None if w.gates.shift is None else _array(w.gates.shift),
        gaussian=_array(w.gates.gaussian),
        content=_array(w.gates.content),
        center=_array(w.center),
        alpha=_array(w.alpha),
        **grid,
    )


def _gates(layer: GPSA) -> tuple[tuple[str, Floats], ...]:
    """The share of content first, then what else shapes the map."""
    gates, spans = layer.gates(), layer.spans()
    if layer.config.gate == "sigmoid":
        return ("1−σ(λ)", _array(1 - gates["sigma"])), ("1/α", _array(spans))
    return ("γ", _array(gates["gamma"])), ("s", _array(gates["s"])), ("1/α", _array(spans))


@torch.no_grad()
def stored_maps(layer: RecastLayer, x: Tensor) -> Maps:
    """The content maps of a GPSA layer, the whole maps of a C-MHSA layer, for an input (1, C, height, width).

    Above `MAX_QUERIES` and `MAX_KEYS`, of every n-th query in each direction, and summed over blocks of keys.
    """
    height, width = x.shape[-2:]
    geometry = layer.geometry
    counts = [len(at) for at in geometry.query_positions(height, width)]
    step, pool = _step(counts[0], counts[1], MAX_QUERIES), _step(height, width, MAX_KEYS)
    rows, columns = (_spread(count, step) for count in counts)
    chosen = torch.tensor([i * counts[1] + j for i in rows for j in columns], device=x.device)
    maps_of = content_of(layer, x[:1]) if isinstance(layer, GPSA) else rows_of(layer, x[:1])
    size, (at_rows, at_columns) = geometry.padded_size(height, width), geometry.pixels(height, width)
    pieces = []
    for some in chosen.split(max(1, MAX_NUMBERS // (layer.num_heads * size[0] * size[1]))):
        maps = maps_of(some)[0].float().unflatten(-1, size)[..., at_rows, at_columns]
        pieces.append(_pooled(maps, pool))
    values = torch.cat(pieces, dim=1).unflatten(1, (len(rows), len(columns)))
    return Maps.of(values.cpu().numpy(), rows, columns, pool)


def _step(rows: int, columns: int, most: int) -> int:
    """The smallest power of two that leaves at most `most` of rows × columns."""
    step = 1
    while -(-rows // step) * -(-columns // step) > most:
        step *= 2
    return step


def _spread(count: int, step: int) -> tuple[int, ...]:
    """Every `step`-th of `count`, from the middle of the first group on."""
    return tuple(range(min(step // 2, count - 1), count, step))


def _pooled(maps: Tensor, pool: int) -> Tensor:
    """Sums over blocks of keys: (…, Y, X) → (…, ⌈Y/pool⌉, ⌈X/pool⌉)."""
    if pool == 1:
        return maps
    down, right = (-size % pool for size in maps.shape[-2:])
    padded = nn.functional.pad(maps, (0, right, 0, down))
    return padded.unflatten(-1, (-1, pool)).unflatten(-3, (-1, pool)).sum((-3, -1))


def _array(values: Tensor) -> Floats:
    return values.detach().float().cpu().numpy()
