"""Read attention.npz and draw its maps as small PNG pictures for the page."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from recast.errors import RecastError
from recast.lab.report import formats
from recast.lab.report.formats import png

ADDS, SUBTRACTS = "#d95f02", "#5e3c99"  # orange and purple, color-blind safe; larger weights are more opaque
LEVELS = 128  # of a map on the page, on either side of 0
IMAGE_SIDE = 160  # longest side of an image on the page
MOST_IMAGES = 4  # on the page
MOST_LAYERS = 4  # on the page: those whose maps differ most between the images
GATES = {"linear": ("γ", "the gate of its content map"), "sigmoid": ("1−σ(λ)", "the share of its content map")}
"""Gate → symbol and meaning of the number under a map."""


def head_labels(heads: int, kernel: Sequence[int]) -> list[str]:
    """Return the names of heads: the direction of the tap (`formats.tap`) if there is one per tap, else the index."""
    if len(kernel) == 2 and kernel[0] * kernel[1] == heads:
        rows, columns = (range(-((k - 1) // 2), k - (k - 1) // 2) for k in kernel)
        return [formats.tap(down, right) for down in rows for right in columns]
    return [str(index) for index in range(heads)]


@dataclass(frozen=True)
class AttentionLayer:
    """The mixed attention maps of a layer for one query pixel, with one layout and color scale for all images."""

    name: str
    mix: np.ndarray  # (N, heads, h, w) over the input grid, finite; may be negative with the linear gate
    query: tuple[int, int]  # row and column in that grid
    gate: np.ndarray  # (heads,) of the content map
    kernel: tuple[int, int]

    @cached_property
    def labels(self) -> list[str]:
        return head_labels(len(self.gate), self.kernel)

    @property
    def columns(self) -> int:
        heads = len(self.gate)
        return self.kernel[1] if math.prod(self.kernel) == heads else math.ceil(math.sqrt(heads))

    @cached_property
    def largest(self) -> float:
        return float(np.abs(self.mix).max())

    @cached_property
    def limit(self) -> float:
        """Value of the strongest color.

        A head that is nearly the convolution has one weight near 1 and others a thousand times smaller. The largest
        weight of each map is excluded from the scale and saturates, so that the others stay visible.
        """
        rest = np.sort(np.abs(self.mix).reshape(-1, math.prod(self.mix.shape[2:])), axis=1)[:, :-1]
        limit = float(np.quantile(rest, 0.995)) if rest.size else 0.0
        return (limit if limit > 1e-5 * self.largest else self.largest) or 1.0

    @cached_property
    def signed(self) -> bool:
        return float(self.mix.min()) < -1e-6 * self.largest

    @cached_property
    def differs(self) -> float:
        """Share of the weight that differs between the images."""
        total = float(np.abs(self.mix).sum())
        return float(np.abs(self.mix - self.mix.mean(axis=0)).sum()) / total if total else 0.0

    @property
    def box(self) -> str:
        """Position of the query as CSS, in percent of the picture."""
        (row, column), (height, width) = self.query, self.mix.shape[2:]
        places = {"left": column / width, "top": row / height, "width": 1 / width, "height": 1 / height}
        return ";".join(f"{side}:{round(100 * share, 3)}%" for side, share in places.items())


@dataclass(frozen=True)
class MapView:
    """The content of attention.npz: maps of every head for a few images."""

    images: np.ndarray  # (N, H, W, 3) uint8
    labels: list[str]
    predictions: list[str]
    layers: list[AttentionLayer]

    @cached_property
    def shown(self) -> list[AttentionLayer]:
        """The layers on the page, in the order of the network."""
        chosen = sorted(self.layers, key=lambda layer: -layer.differs)[:MOST_LAYERS]
        return [layer for layer in self.layers if layer in chosen]


def read_attention(path: Path) -> MapView:
    """Read attention.npz. Raises RecastError for a truncated file, or a missing or misshapen array."""
    layers = []
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            images, classes = arrays["images"], arrays["classes"]
            for index, name in enumerate(arrays["layers"]):
                mix, gate, query, kernel = (arrays[f"{key}_{index}"] for key in ("mix", "gate", "query", "kernel"))
                if mix.ndim != 4 or mix.shape[:2] != (len(images), len(gate)):
                    raise ValueError(f"mix_{index} has the shape {mix.shape}")
                (row, column), (height, width) = query.tolist(), kernel.tolist()
                mix = np.nan_to_num(mix.astype(np.float32))  # weights that are not a number are drawn as 0
                layers.append(AttentionLayer(str(name), mix, (row, column), gate, (height, width)))
            labels, predictions = (
                [str(classes[index]) if 0 <= index < len(classes) else str(index) for index in arrays[key]]
                for key in ("labels", "predictions")
            )
    except (KeyError, OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise RecastError(f"{path} is damaged, or not an .npz of attention maps") from error
    return MapView(images, labels, predictions, layers)


def image_maps(attention: MapView, symbol: str) -> list[dict[str, Any]]:
    """Return the panels of every image; `symbol` is that of the content gate under a map, else the tap is printed."""
    return [
        {
            "picture": png(pixels, IMAGE_SIDE),
            "label": label,
            "prediction": prediction,
            "aspect": f"{pixels.shape[1]} / {pixels.shape[0]}",
            "queries": list(dict.fromkeys(layer.box for layer in attention.shown)),
            "layers": [_panel(layer, index, symbol) for layer in attention.shown],
        }
        for index, (pixels, label, prediction) in enumerate(
            zip(attention.images[:MOST_IMAGES], attention.labels, attention.predictions, strict=False)
        )
    ]


def first_map(attention: MapView, symbol: str) -> dict[str, Any]:
    """Return the map at the top of the page: of an image predicted correctly, the layer with the most pixels, and the
    head whose weights lie most outside its largest one."""
    right = [a == b for a, b in zip(attention.labels, attention.predictions, strict=True)]
    image = right.index(True) if True in right else 0
    layer = max(attention.shown, key=lambda layer: layer.mix[0, 0].size)
    weights = np.abs(layer.mix[image]).reshape(len(layer.gate), -1)
    head = int((weights.sum(1) - weights.max(1)).argmax())
    panel = _panel(layer, image, symbol)
    return panel | panel["heads"][head] | {
        "image": png(attention.images[image], IMAGE_SIDE), "tap": layer.labels[head], "signed": layer.signed,
        "label": attention.labels[image], "prediction": attention.predictions[image],
    }  # fmt: skip


def _panel(layer: AttentionLayer, index: int, symbol: str) -> dict[str, Any]:
    height, width = layer.mix.shape[2:]
    heads = []
    for label, gate, values in zip(layer.labels, layer.gate, layer.mix[index], strict=True):
        under = formats.decimal(float(gate), 2) if symbol else label
        alt = f"Head {label}: {symbol} = {under}" if symbol else f"Head {label}"
        heads.append({"picture": _picture(layer, values), "alt": alt, "under": under})
    return {
        "name": layer.name,
        "columns": layer.columns,
        "aspect": f"{width} / {height}",
        "heads": heads,
        "query": layer.box,
        "low": f"≤ −{layer.limit:.2g}" if layer.signed else "0",
        "high": f"≥ {layer.limit:.2g}",
        "gradient": f"{SUBTRACTS if layer.signed else '#fff'}, #fff {50 if layer.signed else 0}%, {ADDS}",
    }


def _picture(layer: AttentionLayer, values: np.ndarray) -> str:
    """Return a map as a data: URI, transparent at 0."""
    scaled = np.clip(values / layer.limit, -1, 1)[..., None]
    hues = np.where(scaled < 0, *(np.array(mpl.colors.to_rgb(hue)) * 255 for hue in (SUBTRACTS, ADDS)))
    alpha = np.round(np.abs(scaled) * LEVELS) * (255 / LEVELS)
    return png(np.concatenate([hues, alpha], axis=-1).round().astype(np.uint8))
