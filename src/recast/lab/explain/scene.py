"""What an explain page shows, as arrays: images, predictions, and for every layer what makes its attention maps.

A GPSA layer's positional attention follows from a few numbers per head, so the page computes it, exactly:

    A = c_S·S + c_G·G + c_C·C        S one-hot at the tap, G = softmax_δ(−α‖δ−Δ‖²), both over the padded grid

Only the content C, which depends on the image, is stored. Other layers store their whole maps: those of every query
("maps": C-MHSA, transformers, over the grid of patches), or maps without a query ("classes": attention pools, class
tokens). Torch is not needed here. H heads, or K maps without a query; I×J queries; Y×X keys, the pixels of the layer's
input (padding left out).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recast.lab.report.formats import tap

Floats = NDArray[np.float32]
Outputs = Literal["softmax", "sigmoid", "logits"]
"""How outputs are read: as exclusive classes, each as a probability of its own, or as they are."""

GRAD_CAM = "Grad-CAM"
"""Stands for a layer, after all others; it opens only where there is no other."""


def share_text(share: float) -> str:
    """ "61 %", "3.2 %"; the page's script does the same."""
    return f"{100 * share:.{0 if share >= 0.0995 else 1}f} %"


@dataclass(frozen=True)
class Layer:
    """A layer's heads in one state of the network."""

    name: str
    kind: str
    """gpsa: made of S, G and C. maps: stored as they are. classes: maps without a query, one per class or head."""
    description: str
    """What is said under its name: "3×3 pad 1, linear gate"."""
    kernel: tuple[int, int]
    offsets: tuple[tuple[int, int], ...]
    """The taps, (rows, columns) from the query; empty where the heads are no taps."""
    padded: tuple[int, int]
    keys: tuple[range, range]
    """Rows and columns on the padded grid, as those of the queries."""
    queries: tuple[range, range]
    names: tuple[str, ...] = ()
    """What the maps are called where they are no taps. Where that depends on the image, its `Maps.names` say it."""
    gates: tuple[tuple[str, Floats], ...] = ()
    """Symbol and values (H,) of what stands under every map, the most telling first."""
    shift: Floats | None = None
    """gpsa: c_S (H,), None without a shift map; then c_G (H,), c_C (H,), Δ (H, 2) and α (H,)."""
    gaussian: Floats | None = None
    content: Floats | None = None
    center: Floats | None = None
    alpha: Floats | None = None

    def map_names(self, maps: Maps) -> tuple[str, ...]:
        """What the maps are called for this image: names, or where each head's tap lies (`report.formats.tap`)."""
        return maps.names or self.names or tuple(tap(down, right) for down, right in self.offsets)

    def weights(self, maps: Maps, head: int, query: tuple[int, int] = (0, 0)) -> Floats:
        """What a head gives to the pixels (Y, X) for a query (row, column on its grid), as assets/maps.js computes it.

        What is stored in blocks is shared out evenly among their pixels, and what is stored of some queries is taken
        from the nearest.
        """
        down, right = (np.arange(len(axis)) // maps.pool for axis in self.keys)
        pixels = np.bincount(down)[:, None] * np.bincount(right)
        weights: Floats = (maps.at(head, query) / pixels)[down][:, right].astype(np.float32)
        if self.gaussian is None or self.content is None or self.center is None or self.alpha is None:
            return weights
        at = [axis[index] for axis, index in zip(self.queries, query, strict=True)]
        lines = [
            _gaussian(float(self.alpha[head]), at[axis] + float(self.center[head, axis]), self.padded[axis])[keys]
            for axis, keys in enumerate(self.keys)
        ]
        weights = float(self.content[head]) * weights
        weights += float(self.gaussian[head]) * np.outer(*lines)
        tap = [position + offset for position, offset in zip(at, self.offsets[head], strict=True)]
        if self.shift is not None and tap[0] in self.keys[0] and tap[1] in self.keys[1]:
            weights[self.keys[0].index(tap[0]), self.keys[1].index(tap[1])] += float(self.shift[head])
        return weights


def _gaussian(alpha: float, middle: float, padded: int) -> Floats:
    """One axis of G: a softmax of −α(p − middle)² over all padded positions."""
    exponents = -alpha * (np.arange(padded) - middle) ** 2
    shares = np.exp(exponents - exponents.max())
    return np.asarray(shares / shares.sum(), dtype=np.float32)


@dataclass(frozen=True)
class Maps:
    """What is stored of a layer for one image: maps of some queries, over blocks of keys, a byte b a value.

        value ≈ scale · (b / 255)²                                scale (H, I', J'): the largest value of the head's map
        value ≈ scale · sign(b − 128) · ((b − 128) / 127)²        signed: the largest |value|
        value ≈ low + scale · (b / 255)²                          from the least: low is it, scale the range

    A value is the attention that a query gives to a block of `pool` × `pool` pixels, in all. The square gives small
    weights finer steps: down to 1/65,025 of the largest; a value is off by 0.4 % of the largest at most, by 0.8 % of
    signed ones. Queries `rows` and `columns` are stored (indices on the query grid); others borrow from the nearest.
    Maps without a query have one row and one column, and are stored from their least value: they are drawn from there
    to their largest, and a byte from 0 would leave few steps of a nearly even map.
    """

    scale: Floats
    stored: NDArray[np.uint8]
    """(H, I', J', Y', X')."""
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    pool: int = 1
    names: tuple[str, ...] = ()
    """What the maps of this image are called, as "tabby 61 %"; empty: as the layer's."""
    signed: bool = False
    low: Floats | None = None
    """(H, I', J'), where they are stored from the least."""

    @classmethod
    def of(
        cls,
        values: Floats,
        rows: tuple[int, ...],
        columns: tuple[int, ...],
        pool: int = 1,
        *,
        names: tuple[str, ...] = (),
        signed: bool = False,
        from_least: bool = False,
    ) -> Maps:
        """Quantise values (H, I', J', Y', X'): negative ones become 0 unless `signed`."""
        values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
        values = values if signed else np.maximum(values, 0.0)
        low = values.min(axis=(-2, -1)).astype(np.float32) if from_least else None
        if low is not None:
            values = values - low[..., None, None]
        scale = np.abs(values).max(axis=(-2, -1)).astype(np.float32)
        shares = values / np.where(scale > 0, scale, 1.0)[..., None, None]
        roots = np.sign(shares) * np.sqrt(np.abs(shares))
        stored = np.round(128 + 127 * roots) if signed and low is None else np.round(255 * roots)
        return cls(scale, stored.astype(np.uint8), rows, columns, pool, names, signed, low)

    @property
    def values(self) -> Floats:
        """As the page computes them, (H, I', J', Y', X')."""
        stored = self.stored.astype(np.float32)
        of_either_sign = self.signed and self.low is None
        roots = (stored - np.float32(128)) / np.float32(127) if of_either_sign else stored / np.float32(255)
        values = self.scale[..., None, None] * np.sign(roots) * roots**2
        return np.asarray(values if self.low is None else self.low[..., None, None] + values, dtype=np.float32)

    def at(self, head: int, query: tuple[int, int]) -> Floats:
        """One map (Y', X'): that of the nearest query that is stored."""
        row, column = (
            min(range(len(kept)), key=lambda index: abs(kept[index] - wanted))
            for kept, wanted in zip((self.rows, self.columns), query, strict=True)
        )
        one = slice(head, head + 1), slice(row, row + 1), slice(column, column + 1)
        values: Floats = self._part(one).values[0, 0, 0]
        return values

    def fewer_queries(self) -> Maps:
        """Every second row and column of queries."""
        every_second = slice(None), slice(None, None, 2), slice(None, None, 2)
        return replace(self._part(every_second), rows=self.rows[::2], columns=self.columns[::2])

    def _part(self, which: tuple[slice, slice, slice]) -> Maps:
        low = None if self.low is None else self.low[which]
        return replace(self, scale=self.scale[which], stored=self.stored[which], low=low)

    def coarser_keys(self) -> Maps:
        """Blocks of twice the side: their sums."""
        values = self.values
        for axis in (-2, -1):
            values = np.add.reduceat(values, np.arange(0, values.shape[axis], 2), axis=axis)
        return Maps.of(
            values, self.rows, self.columns, 2 * self.pool, names=self.names, signed=self.signed,
            from_least=self.low is not None,
        )  # fmt: skip


class Prediction(NamedTuple):
    """An output by its name and number, and its probability, or its logit where that is `scale`."""

    name: str
    probability: float
    number: int
    scale: Outputs = "softmax"

    @property
    def value(self) -> str:
        """ "61 %", of a logit "−3.2"."""
        if self.scale == "logits":
            return f"{self.probability:.3g}".replace("-", "−")
        return share_text(self.probability)


@dataclass(frozen=True)
class Picture:
    """One image and everything that was computed on it; both lists go over the states."""

    name: str
    pixels: NDArray[np.uint8]
    """(height, width, 3): what the network saw."""
    label: str | None
    notes: tuple[str, ...]
    predictions: list[dict[str, tuple[Prediction, ...]]] = field(default_factory=list)
    """By arm, the likeliest first; without an arm whose output is not one number per class."""
    maps: list[dict[str, Maps]] = field(default_factory=list)
    """By layer."""


@dataclass(frozen=True)
class State:
    """The network at one epoch, or the only one (epoch None)."""

    epoch: int | None
    layers: tuple[Layer, ...]


@dataclass(frozen=True)
class Scene:
    """A page."""

    title: str
    arms: dict[str, str]
    """Names of the arms: parent, finetuned, recast → what the page calls them."""
    states: tuple[State, ...]
    pictures: tuple[Picture, ...]
    notes: tuple[str, ...] = ()
    about: tuple[tuple[str, str], ...] = ()
    """How it was made."""
    layer_order: tuple[str, ...] = ()
    """Names of the layers of all states, from the image on."""

    @property
    def scale(self) -> Outputs:
        """How the outputs of the network shown are read."""
        of = (state["recast"][0].scale for one in self.pictures for state in one.predictions if "recast" in state)
        return next(of, "softmax")
