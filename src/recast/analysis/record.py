"""What the heads look at: attention maps of a forward pass, and the file of maps that the report draws."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from recast.analysis.grids import Grids, watched_grids
from recast.errors import RecastError
from recast.layers.attention_pool import AttentionPool
from recast.layers.cmhsa import CMHSA, RecastLayer
from recast.layers.functional import AttentionMaps, BiasedMaps, expand_heads
from recast.layers.gpsa import GPSA
from recast.run.files import replaced
from recast.surgery.apply import gpsa_layers, recast_layers
from recast.surgery.budget import DEFAULT_TOKENS
from recast.surgery.pooling.adapters import PooledLayer
from recast.surgery.pooling.swap import attention_pools
from recast.tracing.hooks import in_eval


class PoolMaps(NamedTuple):
    """Where the tokens of an attention pool look: `weights` (B, H, T, h, w) of the pixels, and what the tokens keep for
    themselves, `tokens` (B, H, T); None where they are not among the keys. Together they sum to 1. T = 1, or one a
    class."""

    weights: Tensor
    tokens: Tensor | None
    has_grid: bool = True
    """False: tokens whose grid is not known, all in one row, h = 1."""


@torch.no_grad()
def pool_maps(pool: AttentionPool, x: Tensor, grids: Grids | None = None) -> PoolMaps:
    """The maps of a pool for what it takes. Pooled tokens do not tell their grid: it is looked up in `grids`, and where
    it is not known, all are in one row."""
    weights, has_grid = pool.attention_maps(pool.as_map(x)), True
    if isinstance(pool, PooledLayer) and pool.takes == "NLC" and grids is not None:
        grid = grids.of_patches(x.shape[0], weights.shape[-1])
        has_grid = grid is not None
        weights = weights if grid is None else weights.flatten(-2).unflatten(-1, grid)
    if not pool.cls_in_keys:
        return PoolMaps(weights, None, has_grid)
    total = weights.sum((-2, -1), dtype=torch.promote_types(weights.dtype, torch.float32))
    return PoolMaps(weights, (1 - total).clamp_min(0), has_grid)


@contextmanager
def watched_pools(model: nn.Module, grids: Grids, keep: Callable[[str, PoolMaps], None]) -> Iterator[None]:
    """Call `keep(name, maps)` after every call of an attention pool."""

    def watch(name: str) -> Callable[[nn.Module, Any, dict[str, Any], Any], None]:
        def see(pool: nn.Module, inputs: Any, named: dict[str, Any], _output: Any) -> None:
            assert isinstance(pool, AttentionPool)
            keep(name, pool_maps(pool, (*inputs, *named.values())[0], grids))

        return see

    pools = attention_pools(model)
    handles = [pool.register_forward_hook(watch(name), with_kwargs=True) for name, pool in pools.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def record(model: nn.Module) -> Iterator[dict[str, AttentionMaps | BiasedMaps | PoolMaps]]:
    """Record the maps of every recast layer and pool during forward passes: `with record(model) as maps: model(x)`.

    `maps[name]` holds S, G, C and their mix, each (1 or B, heads, queries, padded keys), of the layer's latest call;
    without gradients. Of a C-MHSA layer it holds position, content and mix (`BiasedMaps`), of an attention pool the
    weights of the pixels (`PoolMaps`). The maps are made in full whatever the layer's backend; above the default token
    budget a warning says so. Other networks' attention: `recast.analysis.tokens.record_tokens`.
    """
    maps: dict[str, AttentionMaps | BiasedMaps | PoolMaps] = {}

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def keep(layer: nn.Module, inputs: Any, _output: Any) -> None:
            assert isinstance(layer, RecastLayer)
            rows, columns = layer.geometry.padded_size(*inputs[0].shape[-2:])
            if rows * columns > DEFAULT_TOKENS:
                warnings.warn(f"{name}: recording maps over {rows * columns} tokens takes memory", stacklevel=2)
            with torch.no_grad():
                maps[name] = layer.maps(inputs[0]) if isinstance(layer, CMHSA) else layer.attention(inputs[0])

        return keep

    handles = [layer.register_forward_hook(watch(name)) for name, layer in recast_layers(model).items()]
    try:
        with watched_grids(model) as grids, watched_pools(model, grids, maps.__setitem__):
            yield maps
    finally:
        for handle in handles:
            handle.remove()


def write_attention(
    path: str | Path,
    model: nn.Module,
    pixels: Tensor,
    labels: Sequence[int],
    classes: Sequence[str],
    normalise: Callable[[Tensor], Tensor] = lambda x: x,
) -> Path:
    """Write the maps of all heads for some images and the centre query of every layer to an `.npz` file for the report.

    `pixels` (N, 3, height, width) in [0, 1]; `normalise` makes them the model's input. Per layer i: `mix_i` (N, heads,
    rows, columns) over the real pixels of its input, `query_i` (row, column) there, `gate_i` (heads,) the share of
    content, `kernel_i`. Raises `RecastError` for a model without GPSA layers.
    """
    layers = gpsa_layers(model)
    if not layers:
        raise RecastError(f"{type(model).__name__} has no GPSA layer: there are no attention maps to write")
    drawn: dict[str, tuple[Tensor, tuple[int, int]]] = {}

    def watch(name: str) -> Callable[[nn.Module, Any], None]:
        def keep(layer: nn.Module, inputs: Any) -> None:
            assert isinstance(layer, GPSA)
            # one image at a time, and of its maps the one query: all of them would not fit for early layers
            rows = [centre_query(layer, layer.attention(x).mix, *x.shape[-2:]) for x in inputs[0].split(1)]
            drawn[name] = torch.cat([maps for maps, _ in rows]), rows[0][1]

        return keep

    handles = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers.items()]
    try:
        with in_eval(model), torch.no_grad():
            logits = model(normalise(pixels))
    finally:
        for handle in handles:
            handle.remove()
    arrays: dict[str, Any] = {
        "images": (pixels.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy(),
        "labels": np.asarray(labels, dtype=np.int64),
        "predictions": logits.argmax(1).cpu().numpy(),
        "classes": np.asarray(list(classes), dtype=np.str_),
        "layers": np.asarray([name for name in layers if name in drawn], dtype=np.str_),
    }
    for i, name in enumerate(arrays["layers"].tolist()):
        mix, query = drawn[name]
        arrays[f"mix_{i}"] = mix.float().cpu().numpy()
        arrays[f"query_{i}"] = np.asarray(query)
        gates = expand_heads(layers[name].weights(), layers[name].geometry).gates
        arrays[f"gate_{i}"] = gates.content.detach().float().cpu().numpy()
        arrays[f"kernel_{i}"] = np.asarray(layers[name].geometry.kernel)
    path = Path(path)
    with replaced(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)
    return path


def centre_query(layer: GPSA, mix: Tensor, height: int, width: int) -> tuple[Tensor, tuple[int, int]]:
    """Maps (B, heads, height, width) of the middle query over the real pixels, and that query's pixel (row, column)."""
    geometry = layer.geometry
    rows, columns = geometry.query_positions(height, width)
    i, j = len(rows) // 2, len(columns) // 2
    at_rows, at_columns = geometry.pixels(height, width)
    grid = mix[:, :, i * len(columns) + j].unflatten(-1, geometry.padded_size(height, width))[..., at_rows, at_columns]
    if geometry.is_transposed:
        sources = geometry.source_pixels(height, width)
        return grid, (sources[0][i], sources[1][j])
    return grid, (rows[i] - at_rows.start, columns[j] - at_columns.start)
