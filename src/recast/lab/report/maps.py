"""Read attention.npz and draw its maps: small PNG pictures for the page, one figure per image for paper."""

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
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from recast.errors import RecastError
from recast.lab.report import formats
from recast.lab.report.charts import Chart, Palette
from recast.lab.report.neighbours import png

ADDS, SUBTRACTS = "#d95f02", "#5e3c99"  # orange and purple, color-blind safe; larger weights are more opaque
WEIGHTS = LinearSegmentedColormap.from_list("weights", [SUBTRACTS, "#ffffff", ADDS])  # the same on white
LEVELS = 128  # of a map on the page, on either side of 0
IMAGE_SIDE = 160  # longest side of an image on the page
MOST_IMAGES = 2  # on paper
MOST_LAYERS = 4  # on the page: those whose maps differ most between the images
ALIKE = 0.02  # maps are the same if at most this share of the weight differs between the images
GATES = {"linear": ("γ", "the gate of its content map"), "sigmoid": ("1−σ(λ)", "the share of its content map")}
"""Gate → symbol and meaning of the number under a map."""
CELL = 0.62  # inches per map on paper


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
    mix: np.ndarray  # (N, heads, h, w) over the input grid; may be negative with the linear gate
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
        return float(np.abs(np.nan_to_num(self.mix)).max())

    @cached_property
    def limit(self) -> float:
        """Value of the strongest color.

        A head that is nearly the convolution has one weight near 1 and others a thousand times smaller. The largest
        weight of each map is excluded from the scale and saturates, so that the others stay visible.
        """
        rest = np.sort(np.abs(np.nan_to_num(self.mix)).reshape(-1, math.prod(self.mix.shape[2:])), axis=1)[:, :-1]
        limit = float(np.quantile(rest, 0.995)) if rest.size else 0.0
        return (limit if limit > 1e-5 * self.largest else self.largest) or 1.0

    @cached_property
    def signed(self) -> bool:
        return float(np.nanmin(self.mix, initial=0.0)) < -1e-6 * self.largest

    @cached_property
    def differs(self) -> float:
        """Share of the weight that differs between the images."""
        mix = np.nan_to_num(self.mix)
        total = float(np.abs(mix).sum())
        return float(np.abs(mix - mix.mean(axis=0)).sum()) / total if total else 0.0

    @property
    def box(self) -> str:
        """Position of the query as CSS, in percent of the picture."""
        (row, column), (height, width) = self.query, self.mix.shape[2:]
        places = {"left": column / width, "top": row / height, "width": 1 / width, "height": 1 / height}
        return ";".join(f"{side}:{round(100 * share, 3)}%" for side, share in places.items())

    def under(self, head: int, symbol: str) -> str:
        """Return the text under a map: the gate of content if it has a symbol, else the tap."""
        return formats.decimal(float(self.gate[head]), 2) if symbol else self.labels[head]


@dataclass(frozen=True)
class Attention:
    """The content of attention.npz: maps of every head for a few images."""

    images: np.ndarray  # (N, H, W, 3) uint8
    labels: list[str]
    predictions: list[str]
    layers: list[AttentionLayer]

    @cached_property
    def shown(self) -> list[AttentionLayer]:
        """The layers on the page, in the order of the network."""
        most = sorted(self.layers, key=lambda layer: -layer.differs)[:MOST_LAYERS]
        return [layer for layer in self.layers if layer in most]

    @property
    def reading(self) -> str:
        """A sentence on how much the maps differ between images."""
        most = max(self.layers, key=lambda layer: layer.differs)
        if len(self.images) < 2:
            return ""
        if most.differs <= ALIKE:
            share = formats.percent(100 * most.differs, 2)
            return f"The maps of these images are the same up to {share} of their weight: the heads attend by position."
        share = formats.percent(100 * most.differs, 0)
        return f"They differ most between these images in {most.name}, by {share} of the weight of its maps."


def read_attention(path: Path) -> Attention:
    """Read attention.npz. Raises RecastError for a truncated file, or a missing or misshapen array."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        images, classes = arrays["images"], arrays["classes"]
        if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != np.uint8:
            raise RecastError(f"{path}: images must be uint8 (N, H, W, 3), got {images.dtype} {images.shape}")
        layers = []
        for index, name in enumerate(arrays["layers"]):
            mix, gate = arrays[f"mix_{index}"], arrays[f"gate_{index}"]
            if mix.ndim != 4 or mix.shape[:2] != (len(images), len(gate)) or 0 in mix.shape:
                expected = f"(images, heads, h, w) = ({len(images)}, {len(gate)}, h, w)"
                raise RecastError(f"{path}: mix_{index} must be {expected}, got {mix.shape}")
            (row, column), (kh, kw) = (map(int, arrays[f"{key}_{index}"]) for key in ("query", "kernel"))
            layers.append(AttentionLayer(str(name), mix.astype(np.float32), (row, column), gate, (kh, kw)))
        labels, predictions = (
            [str(classes[index]) if 0 <= index < len(classes) else str(index) for index in arrays[key]]
            for key in ("labels", "predictions")
        )
        if not len(labels) == len(predictions) == len(images):
            raise RecastError(f"{path}: {len(images)} images, {len(labels)} labels, {len(predictions)} predictions")
    except RecastError:
        raise
    except KeyError as error:
        raise RecastError(f"{path} lacks the array {error.args[0]}") from None
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise RecastError(f"{path} is truncated or not an .npz of attention maps") from error
    return Attention(images, labels, predictions, layers)


def image_maps(attention: Attention, symbol: str, budget: int) -> list[dict[str, Any]]:
    """Return the panels of as many images as fit in `budget` bytes of HTML, at least one.

    `symbol` is that of the content gate printed under each map; if empty, the tap is printed.
    """
    panels: list[dict[str, Any]] = []
    spent = 0
    for index, pixels in enumerate(attention.images):
        label, prediction = attention.labels[index], attention.predictions[index]
        image: dict[str, Any] = {
            "picture": png(pixels, IMAGE_SIDE),
            "alt": f"Input image {index + 1}, label {label}, predicted {prediction}; the query pixel is outlined",
            "label": label,
            "prediction": prediction,
            "aspect": f"{pixels.shape[1]} / {pixels.shape[0]}",
            "queries": list(dict.fromkeys(layer.box for layer in attention.shown)),
            "layers": [_panel(layer, index, symbol) for layer in attention.shown],
        }
        heads = [head for layer in image["layers"] for head in layer["heads"]]
        spent += len(image["picture"]) + sum(len(head["picture"]) + 400 for head in heads)
        if panels and spent > budget:
            break
        panels.append(image)
    return panels


def first_map(attention: Attention, symbol: str) -> dict[str, Any]:
    """Return the map at the top of the page.

    It belongs to a correctly predicted image, the layer with the most pixels, and the head with the most weight outside
    its largest pixel.
    """
    right = [a == b for a, b in zip(attention.labels, attention.predictions, strict=True)]
    index = right.index(True) if True in right else 0
    layer = max(attention.shown, key=lambda layer: (layer.mix[0, 0].size, layer.differs))
    weights = np.abs(np.nan_to_num(layer.mix[index])).reshape(len(layer.gate), -1)
    head = int((weights.sum(1) - weights.max(1)).argmax())
    panel = _panel(layer, index, symbol)
    return panel | panel["heads"][head] | {
        "image": png(attention.images[index], IMAGE_SIDE), "tap": layer.labels[head], "signed": layer.signed,
        "label": attention.labels[index], "prediction": attention.predictions[index],
    }  # fmt: skip


def _panel(layer: AttentionLayer, index: int, symbol: str) -> dict[str, Any]:
    height, width = layer.mix.shape[2:]
    heads = []
    for head, (label, values) in enumerate(zip(layer.labels, layer.mix[index], strict=True)):
        row, column = np.unravel_index(int(np.argmax(np.abs(np.nan_to_num(values)))), values.shape)
        name, under = f"Head {label}", layer.under(head, symbol)
        peak = formats.decimal(float(values[row, column]), 2)
        content = f"{symbol} = {under}; " if symbol else ""
        alt = f"{name}: {content}largest weight {peak} at row {row}, column {column} of {height} by {width}"
        heads.append({"picture": _picture(layer, values), "alt": alt, "under": under})
    return {
        "name": layer.name,
        "columns": layer.columns,
        "aspect": f"{width} / {height}",
        "heads": heads,
        "query": layer.box,
        "low": f"≤ −{layer.limit:.2g}" if layer.signed else "0",
        "high": f"≥ {layer.limit:.2g}",
        "peak": formats.decimal(layer.largest, 2),
        "gradient": f"{SUBTRACTS if layer.signed else '#fff'}, #fff {50 if layer.signed else 0}%, {ADDS}",
    }


def _picture(layer: AttentionLayer, values: np.ndarray) -> str:
    """Return a map as a data: URI, transparent at 0 and at NaN."""
    scaled = np.nan_to_num(np.clip(values / layer.limit, -1, 1))[..., None]
    hues = np.where(scaled < 0, *(np.array(mpl.colors.to_rgb(hue)) * 255 for hue in (SUBTRACTS, ADDS)))
    alpha = np.round(np.abs(scaled) * LEVELS) * (255 / LEVELS)
    return png(np.concatenate([hues, alpha], axis=-1).round().astype(np.uint8))


def map_charts(attention: Attention, symbol: str) -> list[Chart]:
    """Return a figure per image with its layers from left to right (T-CNN, Fig. 5)."""
    charts = []
    for index in range(min(len(attention.images), MOST_IMAGES)):
        rows = [
            (layer.name, label, float(layer.gate[head]), row, column, float(weight))
            for layer in attention.layers
            for head, label in enumerate(layer.labels)
            for (row, column), weight in np.ndenumerate(layer.mix[index, head])
        ]
        label, prediction = attention.labels[index], attention.predictions[index]
        title = f"Attention of the heads: image {index + 1}, label {label}, predicted {prediction}"
        below = f"{symbol}, {dict(GATES.values())[symbol]}" if symbol else "its tap"
        story = f"Attention maps of {len(attention.layers)} layers for the outlined query; below each map: {below}."
        columns = ("layer", "head", "gate", "row", "column", "weight")

        def layout(palette: Palette, index: int = index) -> Figure:
            return _drawn(attention, index, symbol, palette)

        charts.append(Chart(f"attention_{index + 1}", title, story, columns, rows, layout=layout))
    return charts


def _drawn(attention: Attention, index: int, symbol: str, palette: Palette) -> Figure:
    layers = attention.layers
    down = max(math.ceil(len(layer.labels) / layer.columns) for layer in layers)
    widths = [1.6, *(layer.columns * CELL + 0.22 for layer in layers)]
    figure = Figure((sum(widths), max(down * (CELL + 0.15), 1.4) + 0.25))
    parts = figure.subfigures(1, len(widths), width_ratios=widths, squeeze=False)[0]
    picture = parts[0].add_axes((0, 0, 0.85, 0.9), anchor="NW")
    picture.imshow(attention.images[index])
    picture.set_axis_off()
    for part, layer in zip(parts[1:], layers, strict=True):
        part.text(0, 0.97, layer.name, fontsize=8, va="center", color=palette["ink"])
        grid = part.subplots(down, layer.columns, squeeze=False)
        part.subplots_adjust(0, 0.05, 0.95, 0.92, wspace=0.06, hspace=0.25)
        for axes in grid.flat:
            axes.set_axis_off()
        for head, axes in zip(range(len(layer.labels)), grid.flat, strict=False):
            axes.imshow(layer.mix[index, head], cmap=WEIGHTS, vmin=-layer.limit, vmax=layer.limit, interpolation="none")
            y, x = layer.query
            for edge, thick in (("white", 1.6), ("black", 0.7)):
                axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor=edge, linewidth=thick))
            under = layer.under(head, symbol)
            axes.text(0.5, -0.03, under, transform=axes.transAxes, ha="center", va="top", fontsize=6.5)
    return figure
