"""Attention maps: for the page small PNG pictures, one pixel per token, and for paper one figure per image."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.patches import Rectangle
from PIL import Image

from recast.report import formats
from recast.report.charts import Chart, Drawing, Palette, new_figure
from recast.report.load import Attention, AttentionLayer

SIGNED, POSITIVE = "PuOr_r", "cividis"
"""Purple to orange through white at 0; dark blue to yellow: both safe for colour-blind readers."""
IMAGE_SIDE = 160
"""Larger images are shrunk to this side."""
MOST_IMAGES = 2
"""On paper."""
CELL = 0.62
"""Inches a map on paper."""


def head_labels(heads: int, kernel: Sequence[int]) -> list[str]:
    """`row,column` of each head's kernel tap where there is a head per tap, otherwise its number; from 0."""
    if len(kernel) == 2 and kernel[0] * kernel[1] == heads:
        return [f"{index // kernel[1]},{index % kernel[1]}" for index in range(heads)]
    return [str(index) for index in range(heads)]


@dataclass(frozen=True)
class Maps:
    """How the maps of one layer are laid out and coloured, for all its images."""

    layer: AttentionLayer
    labels: list[str]
    columns: int
    limit: float
    """Value of the strongest colour."""
    signed: bool

    @classmethod
    def of(cls, layer: AttentionLayer) -> Maps:
        """A head that is still nearly the convolution has one weight near 1 and the rest a thousand times smaller: the
        largest weight of each map is left out of the scale, so that the rest can be seen, and saturates."""
        heads = layer.mix.shape[1]
        magnitude = np.abs(np.nan_to_num(layer.mix.reshape(-1, layer.mix.shape[2] * layer.mix.shape[3])))
        largest = float(magnitude.max(initial=0.0))
        rest = np.sort(magnitude, axis=1)[:, :-1]
        limit = float(np.quantile(rest, 0.995)) if rest.size else 0.0
        return cls(
            layer,
            labels=head_labels(heads, layer.kernel),
            columns=layer.kernel[1] if math.prod(layer.kernel) == heads else math.ceil(math.sqrt(heads)),
            limit=(limit if limit > 1e-5 * largest else largest) or 1.0,
            signed=float(np.nanmin(layer.mix, initial=0.0)) < -1e-6 * largest,
        )

    def under(self, head: int, symbol: str) -> str:
        """What stands under a map: the share of content attention, where it has a symbol, or the tap."""
        return formats.decimal(float(self.layer.gate[head]), 2) if symbol else self.labels[head]

    @property
    def colors(self) -> np.ndarray:
        """(256, 3) uint8."""
        table = mpl.colormaps[SIGNED if self.signed else POSITIVE](np.arange(256) / 255, bytes=True)
        return np.ascontiguousarray(table[:, :3])

    @property
    def box(self) -> str:
        """The query as CSS, in percent of a picture."""
        (row, column), (height, width) = self.layer.query, self.layer.mix.shape[2:]
        places = {"left": column / width, "top": row / height, "width": 1 / width, "height": 1 / height}
        return ";".join(f"{side}:{round(100 * share, 3)}%" for side, share in places.items())

    def picture(self, values: np.ndarray) -> str:
        """One map as a data: URI."""
        scaled = (values / self.limit + 1) / 2 if self.signed else values / self.limit
        unknown = 0.5 if self.signed else 0.0
        index = np.round(np.clip(np.nan_to_num(scaled, nan=unknown), 0, 1) * 255).astype(np.uint8)
        if index.size <= 256:  # a palette would weigh more than the pixels
            return png(Image.fromarray(self.colors[index]))
        picture = Image.fromarray(index)
        picture.putpalette(self.colors.tobytes())
        return png(picture)


def png(picture: Image.Image) -> str:
    """A picture as a data: URI."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def image_maps(attention: Attention, symbol: str, budget: int) -> list[dict[str, Any]]:
    """The panels of as many images as fit in `budget` bytes of HTML (at least one).

    `symbol` is that of the share of content attention, which stands under each map; without one the tap does.
    """
    layers = [Maps.of(layer) for layer in attention.layers]
    panels: list[dict[str, Any]] = []
    spent = 0
    for index, pixels in enumerate(attention.images):
        shown = Image.fromarray(pixels)
        shown.thumbnail((IMAGE_SIDE, IMAGE_SIDE))
        label, prediction = attention.labels[index], attention.predictions[index]
        image: dict[str, Any] = {
            "picture": png(shown),
            "alt": f"Input image {index + 1}, labelled {label}, predicted {prediction}; the query pixel is outlined",
            "label": label,
            "prediction": prediction,
            "aspect": f"{pixels.shape[1]} / {pixels.shape[0]}",
            "queries": list(dict.fromkeys(maps.box for maps in layers)),
            "layers": [_layer(maps, index, symbol) for maps in layers],
        }
        spent += len(image["picture"]) + sum(
            len(head["picture"]) + 400 for layer in image["layers"] for head in layer["heads"]
        )
        if panels and spent > budget:
            break
        panels.append(image)
    return panels


def _layer(maps: Maps, index: int, symbol: str) -> dict[str, Any]:
    heads, height, width = maps.layer.mix.shape[1:]
    pictures = []
    for head in range(heads):
        values = maps.layer.mix[index, head]
        row, column = np.unravel_index(int(np.argmax(np.abs(np.nan_to_num(values)))), values.shape)
        name = f"Head {'of tap ' if ',' in maps.labels[head] else ''}{maps.labels[head]}"
        peak = formats.decimal(float(values[row, column]), 2)
        content = f"{symbol} = {maps.under(head, symbol)}; " if symbol else ""
        alt = f"{name}: {content}largest weight {peak} at row {row}, column {column} of {height} by {width}"
        pictures.append({"picture": maps.picture(values), "alt": alt, "under": maps.under(head, symbol)})
    stops = maps.colors[np.linspace(0, 255, 9).astype(int)]
    return {
        "name": maps.layer.name,
        "columns": maps.columns,
        "aspect": f"{width} / {height}",
        "heads": pictures,
        "query": maps.box,
        "low": f"≤ −{maps.limit:.2g}" if maps.signed else "0",
        "high": f"≥ {maps.limit:.2g}",
        "peak": formats.decimal(float(np.abs(np.nan_to_num(maps.layer.mix)).max()), 2),
        "gradient": ", ".join(f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in stops),
    }


def map_charts(attention: Attention, symbol: str) -> list[Chart]:
    """The first images, the layers of each from left to right (T-CNN, Fig. 5)."""
    charts = []
    layers = [Maps.of(layer) for layer in attention.layers]
    for index in range(min(len(attention.images), MOST_IMAGES)):
        rows = [
            (maps.layer.name, label, float(maps.layer.gate[head]), row, column, float(weight))
            for maps in layers
            for head, label in enumerate(maps.labels)
            for (row, column), weight in np.ndenumerate(maps.layer.mix[index, head])
        ]
        label, said = attention.labels[index], attention.predictions[index]
        title = f"What the heads look at: image {index + 1}, labelled {label}, predicted {said}"
        below = f"{symbol}, the share of content attention" if symbol else "its tap"
        story = f"Attention maps of {len(layers)} layers for the outlined query; below each map {below}."
        columns = ("layer", "head", "gate", "row", "column", "weight")

        def layout(palette: Palette, index: int = index) -> Drawing:
            return _drawn(layers, attention.images[index], index, symbol, palette)

        charts.append(Chart(f"attention_{index + 1}", title, story, columns, rows, layout=layout))
    return charts


def _drawn(layers: Sequence[Maps], image: np.ndarray, index: int, symbol: str, palette: Palette) -> Drawing:
    columns = [maps.columns for maps in layers]
    down = max(math.ceil(len(maps.labels) / maps.columns) for maps in layers)
    figure = new_figure((1.6 + sum(columns) * CELL + 0.22 * len(layers), max(down * (CELL + 0.15), 1.4) + 0.25))
    widths = [1.6, *(count * CELL + 0.22 for count in columns)]
    parts = figure.subfigures(1, len(widths), width_ratios=widths, squeeze=False)[0]
    picture = parts[0].add_axes((0, 0, 0.85, 0.9), anchor="NW")
    picture.imshow(image)
    picture.set_axis_off()
    for part, maps in zip(parts[1:], layers, strict=True):
        part.text(0, 0.97, maps.layer.name, fontsize=8, va="center", color=palette.ink)
        grid = part.subplots(down, maps.columns, squeeze=False)
        part.subplots_adjust(0, 0.05, 0.95, 0.92, wspace=0.06, hspace=0.25)
        low, colors = (-maps.limit, SIGNED) if maps.signed else (0, POSITIVE)
        for head, axes in enumerate(grid.flat):
            axes.set_axis_off()
            if head < len(maps.labels):
                axes.imshow(maps.layer.mix[index, head], cmap=colors, vmin=low, vmax=maps.limit, interpolation="none")
                y, x = maps.layer.query
                for edge, thick in (("white", 1.6), ("black", 0.7)):
                    axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor=edge, linewidth=thick))
                under = maps.under(head, symbol)
                axes.text(0.5, -0.03, under, transform=axes.transAxes, ha="center", va="top", fontsize=6.5)
    return figure, ()
