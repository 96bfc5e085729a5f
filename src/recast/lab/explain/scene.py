"""Describe an explain page as arrays: images, predictions, and the numbers behind the attention maps of every layer.

The positional attention of a GPSA layer follows from a few numbers per head, so the page computes it exactly:

    A = c_S·S + c_G·G + c_C·C        S one-hot at the tap, G = softmax_δ(−α‖δ−Δ‖²), both over the padded grid

Only the content map C, which depends on the image, is stored. Other layers store whole maps: one per query ("maps": C
beside a convolution, C-MHSA, and transformers, over the grid of patches), or maps without a query ("classes": attention
pools, class tokens).

Shapes: H heads, or K maps without a query; I×J queries; Y×X keys, the pixels of the layer's input without padding.
This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recast.errors import RecastError, suggest
from recast.lab.pages.formats import NBSP

Floats = NDArray[np.float32]
Outputs = Literal["softmax", "sigmoid", "logits"]
"""Interpretation of the outputs: exclusive classes, independent labels, or raw values."""
GRAD_CAM = "Grad-CAM"
"""Name under which Grad-CAM is listed, after all layers; it is opened first only if there is no layer."""


def share_text(share: float) -> str:
    """Format a share as "61 %" or "3.2 %" with a no-break space, like `Words.percent` of the page's script."""
    return f"{100 * share:.{0 if share >= 0.0995 else 1}f}{NBSP}%"


@dataclass(frozen=True)
class Layer:
    """The heads of a layer."""

    name: str
    kind: str  # gpsa: S, G and C; maps: stored whole; classes: maps without a query, one per class or head
    description: str  # shown under the name: "3×3 pad 1, linear gate"
    kernel: tuple[int, int]
    offsets: tuple[tuple[int, int], ...]  # (rows, columns) of each tap from the query; empty if heads are not taps
    padded: tuple[int, int]
    keys: tuple[range, range]  # rows and columns on the padded grid, as for the queries
    queries: tuple[range, range]
    names: tuple[str, ...] = ()  # names of maps that are not taps; `Maps.names` if they depend on the image
    gates: tuple[tuple[str, Floats], ...] = ()
    """(symbol, (H,) values) printed under every map, the share of content first; NaN for heads without that map."""
    # gpsa only: c_S, c_G and c_C (H,), Δ (H, 2), α (H,)
    shift: Floats | None = None  # None without a shift map
    gaussian: Floats | None = None
    content: Floats | None = None
    center: Floats | None = None
    alpha: Floats | None = None


@dataclass(frozen=True)
class Maps:
    """The stored maps of a layer for one image: some queries, over blocks of keys, one byte b per value.

        value ≈ low + scale · (b / 255)²          low, scale (H, I', J'): least value of the map, or 0, and the range

    A value is the total attention that a query gives to a block of `pool` × `pool` pixels. The square gives weights
    near `low` finer steps, down to 1/65,025 of the range. The error is at most 0.4 % of the range. Queries in `rows`
    and `columns` (indices on the query grid) are stored; others use the nearest. Maps without a query have one row and
    one column. They are stored from their least value because they are drawn from there: bytes that start at 0 would
    leave few steps for a nearly uniform map. Positive maps with a query are stored from 0, which compresses better.
    """

    low: Floats
    scale: Floats
    stored: NDArray[np.uint8]  # (H, I', J', Y', X')
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    pool: int = 1
    names: tuple[str, ...] = ()  # names for this image, such as "tabby, 61 %"; empty: those of the layer
    signed: bool = False  # values may be negative

    @classmethod
    def of(
        cls,
        values: Floats,
        rows: tuple[int, ...],
        columns: tuple[int, ...],
        pool: int = 1,
        names: tuple[str, ...] = (),
        signed: bool = False,
    ) -> Maps:
        """Quantize values (H, I', J', Y', X'). Negative values become 0 unless `signed`."""
        values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
        values = values if signed else np.maximum(values, 0.0)
        low = values.min(axis=(-2, -1)).astype(np.float32)
        if values.shape[1:3] != (1, 1):
            low = np.minimum(low, 0)
        values = np.maximum(values - low[..., None, None], 0.0)
        scale = values.max(axis=(-2, -1)).astype(np.float32)
        shares = values / np.where(scale > 0, scale, 1.0)[..., None, None]
        stored = np.round(255 * np.sqrt(shares)).astype(np.uint8)
        return cls(low, scale, stored, rows, columns, pool, names, signed)

    @property
    def values(self) -> Floats:
        """Dequantized values (H, I', J', Y', X'), as the page computes them."""
        shares = (self.stored / np.float32(255)) ** 2
        return np.asarray(self.low[..., None, None] + self.scale[..., None, None] * shares, dtype=np.float32)

    def fewer_queries(self) -> Maps:
        """Return every second row and column of queries."""
        low, scale, stored = self.low[:, ::2, ::2], self.scale[:, ::2, ::2], self.stored[:, ::2, ::2]
        return replace(self, low=low, scale=scale, stored=stored, rows=self.rows[::2], columns=self.columns[::2])

    def coarser_keys(self) -> Maps:
        """Return the sums over blocks of twice the side."""
        values = self.values
        for axis in (-2, -1):
            values = np.add.reduceat(values, np.arange(0, values.shape[axis], 2), axis=axis)
        return Maps.of(values, self.rows, self.columns, 2 * self.pool, self.names, self.signed)


class Prediction(NamedTuple):
    """An output: the name and number of its class, and its probability, or its logit if `scale` is "logits"."""

    name: str
    probability: float
    number: int
    scale: Outputs = "softmax"

    @property
    def value(self) -> str:
        """The probability as "61 %", or the logit as "−3.2"."""
        if self.scale == "logits":
            return f"{self.probability:.3g}".replace("-", "−")
        return share_text(self.probability)


@dataclass(frozen=True)
class Picture:
    """One image and the results on it."""

    name: str
    pixels: NDArray[np.uint8]  # (height, width, 3), as the network sees them
    label: str | None
    notes: tuple[str, ...]
    predictions: Mapping[str, tuple[Prediction, ...]]
    """Predictions by arm, the most likely first; arms without one output per class are absent."""
    maps: Mapping[str, Maps]  # by layer


@dataclass(frozen=True)
class Scene:
    """The content of a page."""

    title: str
    arms: dict[str, str]  # parent, finetuned, recast → name on the page
    layers: tuple[Layer, ...]  # from input to output, Grad-CAM last
    pictures: tuple[Picture, ...]
    notes: tuple[str, ...] = ()
    about: tuple[tuple[str, str], ...] = ()  # how the page was made

    @property
    def scale(self) -> Outputs:
        """The interpretation of the outputs of the network shown."""
        rankings = (picture.predictions for picture in self.pictures)
        return next((ranking["recast"][0].scale for ranking in rankings if "recast" in ranking), "softmax")

    def first_layer(self, layer: str | None = None) -> str | None:
        """Return the layer to open first: `layer`, else the last with a map per class, else the first; None if no maps.

        Grad-CAM comes first only if the scene has no layer. Raises `RecastError` if `layer` has no maps.
        """
        order = [layer.name for layer in self.layers]
        if layer is not None:
            if layer not in order:
                names = ", ".join(order) or "none"
                raise RecastError(f"no layer {layer!r} has maps.{suggest(layer, order)} Layers with maps: {names}")
            return layer
        class_maps = [layer.name for layer in self.layers if layer.kind == "classes" and layer.name != GRAD_CAM]
        return class_maps[-1] if class_maps else next(iter(order), None)
