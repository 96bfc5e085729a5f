"""From a model and an image to the maps of a page: what every layer attends to, for some or all queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recast.analysis.grids import watched_grids
from recast.analysis.record import PoolMaps, watched_pools
from recast.analysis.rows_of_maps import MAX_NUMBERS, content_of, rows_of
from recast.analysis.tokens import NO_GRID, TokenMaps, token_names, watched_tokens
from recast.errors import RecastError
from recast.explain.class_layers import TOP_CLASSES, Described, pool_layer, token_layers
from recast.explain.coarse import MAX_KEYS, MAX_QUERIES, pooled, spread, step_of
from recast.explain.predictions import ranked
from recast.explain.scene import Axis, Floats, Layer, Maps
from recast.layers.attention_pool import AttentionPool
from recast.layers.cmhsa import CMHSA, RecastLayer
from recast.layers.functional import expand_heads
from recast.layers.gpsa import GPSA
from recast.surgery.apply import recast_layers
from recast.tracing.hooks import in_eval

NAMED = 6
"""Modules that a note names, of many."""


class Recorded(NamedTuple):
    """What a network gave, its layers in the order of their calls, what they store, and what is said of the others."""

    output: Any
    layers: tuple[Layer, ...]
    maps: dict[str, Maps]
    notes: tuple[str, ...]


def record_maps(model: nn.Module, image: Tensor, classes: Sequence[str] | None = None) -> Recorded:
    """What `model` gives for one image (1, C, height, width), its layers that attend, and what these store of it.

    Recast layers, transformers' attention over tokens, attention pools (with one token a class: the likeliest classes,
    by the names in `classes`). Of a layer that is called twice it is the latest call. The model is run in eval mode,
    without gradients, and left as it was. Maps of many tokens are never held in full, but for transformers' own.
    """
    found: dict[str, list[Described]] = {}
    pools: dict[str, PoolMaps] = {}
    left_out: dict[str, str] = {}

    def keep(name: str, described: list[Described]) -> None:
        found.pop(name, None)
        found[name] = described

    def watch(name: str) -> Callable[[nn.Module, Any, dict[str, Any]], None]:
        def see(layer: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
            assert isinstance(layer, RecastLayer)
            x = (*inputs, *named.values())[0]  # may be passed by name
            keep(name, [(describe(name, layer, *x.shape[-2:]), stored_maps(layer, x))])

        return see

    def keep_tokens(name: str, maps: TokenMaps) -> None:
        keep(name, token_layers(name, maps, token_names(model, maps.num_prefix)))

    def keep_pool(name: str, maps: PoolMaps) -> None:
        if not maps.has_grid:
            left_out[name] = NO_GRID
            return
        pools[name] = maps
        keep(name, [])  # its place; which classes are the likeliest is known at the end

    with ExitStack() as stack:
        for name, layer in recast_layers(model).items():
            stack.callback(layer.register_forward_pre_hook(watch(name), with_kwargs=True).remove)
        grids = stack.enter_context(watched_grids(model))
        stack.enter_context(watched_pools(model, grids, keep_pool))
        stack.enter_context(watched_tokens(model, grids, keep_tokens, left_out.__setitem__))
        stack.enter_context(in_eval(model))
        with torch.no_grad():
            output = model(image)
    best = ranked(output, classes, TOP_CLASSES)
    for name, of_pool in pools.items():
        pool = model.get_submodule(name)
        assert isinstance(pool, AttentionPool)
        found[name] = [pool_layer(name, of_pool, pool.num_classes, best)]
    described = [one for several in found.values() for one in several]
    return Recorded(
        output,
        tuple(layer for layer, _ in described),
        {layer.name: maps for layer, maps in described},
        _notes(left_out),
    )


def _notes(left_out: dict[str, str]) -> tuple[str, ...]:
    """A sentence for every reason why modules have no maps."""
    notes = []
    for reason in dict.fromkeys(left_out.values()):
        names = [name for name, why in left_out.items() if why == reason]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        notes.append(f"Without maps: {', '.join(names[:NAMED])}{more} ({reason}).")
    return tuple(notes)


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
    step, pool = step_of(counts[0], counts[1], MAX_QUERIES), step_of(height, width, MAX_KEYS)
    rows, columns = (spread(count, step) for count in counts)
    chosen = torch.tensor([i * counts[1] + j for i in rows for j in columns], device=x.device)
    maps_of = content_of(layer, x[:1]) if isinstance(layer, GPSA) else rows_of(layer, x[:1])
    size, (at_rows, at_columns) = geometry.padded_size(height, width), geometry.pixels(height, width)
    pieces = []
    for some in chosen.split(max(1, MAX_NUMBERS // (layer.num_heads * size[0] * size[1]))):
        maps = maps_of(some)[0].float().unflatten(-1, size)[..., at_rows, at_columns]
        pieces.append(pooled(maps, pool))
    values = torch.cat(pieces, dim=1).unflatten(1, (len(rows), len(columns)))
    return Maps.of(values.cpu().numpy(), rows, columns, pool)


def _array(values: Tensor) -> Floats:
    return values.detach().float().cpu().numpy()
