"""One map of a scene's layer as an array: what the page computes in the browser (assets/maps.js)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from recast.explain.scene import Axis, Floats, Layer, Maps


def map_names(layer: Layer, maps: Maps) -> tuple[str, ...]:
    """What the layer's maps are called for this image: names, or each head's tap as rows,columns from the query."""
    return maps.names or layer.names or tuple(f"{down},{right}" for down, right in layer.offsets)


def weights_of(layer: Layer, maps: Maps, head: int, query: tuple[int, int] = (0, 0)) -> Floats:
    """The weights (Y, X) that a head gives to the pixels of the layer's input for a query (row, column on its grid).

    A = c_S·S + c_G·G + c_C·C for GPSA; other layers' maps are stored whole. What is stored in blocks is shared out
    evenly among their pixels, and what is stored of some queries is taken from the nearest.
    """
    if layer.kind != "gpsa":
        return _stored(layer, maps, head, query)
    if layer.gaussian is None or layer.content is None or layer.center is None or layer.alpha is None:
        raise AssertionError(f"{layer.name} is of kind gpsa and lacks what makes its maps")
    gaussian, content, center, alpha = layer.gaussian, layer.content, layer.center, layer.alpha
    at = [axis.start + axis.step * index for axis, index in zip(layer.queries, query, strict=True)]
    weights = float(content[head]) * _stored(layer, maps, head, query)
    lines = [
        _gaussian(float(alpha[head]), at[axis] + float(center[head, axis]), layer.padded[axis], keys)
        for axis, keys in enumerate(layer.keys)
    ]
    weights += float(gaussian[head]) * np.outer(*lines)
    if layer.shift is not None:
        tap = [_pixel(keys, at[axis] + layer.offsets[head][axis]) for axis, keys in enumerate(layer.keys)]
        if tap[0] is not None and tap[1] is not None:
            weights[tap[0], tap[1]] += float(layer.shift[head])
    return np.asarray(weights, dtype=np.float32)


def _stored(layer: Layer, maps: Maps, head: int, query: tuple[int, int]) -> Floats:
    row, column = _nearest(maps.rows, query[0]), _nearest(maps.columns, query[1])
    one = (slice(head, head + 1), slice(row, row + 1), slice(column, column + 1))
    low = None if maps.low is None else maps.low[one]
    blocks = replace(maps, scale=maps.scale[one], stored=maps.stored[one], low=low).values[0, 0, 0]
    down, right = (np.arange(axis.count) // maps.pool for axis in layer.keys)
    pixels = np.bincount(down)[:, None] * np.bincount(right)
    return np.asarray((blocks / pixels)[down][:, right], dtype=np.float32)


def _nearest(kept: Sequence[int], wanted: int) -> int:
    return min(range(len(kept)), key=lambda index: abs(kept[index] - wanted))


def _gaussian(alpha: float, middle: float, padded: int, keys: Axis) -> Floats:
    """One axis of G: a softmax of −α(p − middle)² over all padded positions, of which the pixels are returned."""
    exponents = -alpha * (np.arange(padded) - middle) ** 2
    shares = np.exp(exponents - exponents.max())
    return np.asarray((shares / shares.sum())[keys.start :: keys.step][: keys.count], dtype=np.float32)


def _pixel(keys: Axis, position: int) -> int | None:
    pixel, rest = divmod(position - keys.start, keys.step)
    return pixel if rest == 0 and 0 <= pixel < keys.count else None
