"""Attention maps on paper: one picture per image, its layers from left to right (T-CNN, Fig. 5)."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.patches import Rectangle

from recast.report.figures.chart import Chart, Data, Draw, Drawing
from recast.report.figures.maps import POSITIVE, SIGNED, head_labels, map_scale
from recast.report.figures.style import Palette, new_figure
from recast.report.read.attention import Attention
from recast.report.text import formats

MOST_IMAGES = 2
CELL = 0.62
"""Inches a map."""


def map_charts(attention: Attention, symbol: str) -> list[Chart]:
    """The first images; `symbol` is that of the share of content attention, which stands under each map."""
    return [_chart(attention, index, symbol) for index in range(min(len(attention.images), MOST_IMAGES))]


def _chart(attention: Attention, index: int, symbol: str) -> Chart:
    rows: list[tuple[str | float | int | None, ...]] = []
    for layer in attention.layers:
        labels = head_labels(layer.mix.shape[1], layer.kernel)
        for head, label in enumerate(labels):
            gate = float(layer.gate[head])
            rows += [
                (layer.name, label, gate, row, column, float(weight))
                for (row, column), weight in np.ndenumerate(layer.mix[index, head])
            ]
    label, said = attention.labels[index], attention.predictions[index]
    return Chart(
        f"attention_{index + 1}",
        f"What the heads look at: image {index + 1}, labelled {label}, predicted {said}",
        f"Attention maps of {len(attention.layers)} layers for the outlined query; below each map "
        f"{symbol + ', the share of content attention' if symbol else 'its tap'}.",
        _draw(attention, index, symbol),
        Data(("layer", "head", "gate", "row", "column", "weight"), rows),
    )


def _draw(attention: Attention, index: int, symbol: str) -> Draw:
    grids = []
    for layer in attention.layers:
        heads = layer.mix.shape[1]
        columns = layer.kernel[1] if layer.kernel[0] * layer.kernel[1] == heads else math.ceil(math.sqrt(heads))
        grids.append((columns, math.ceil(heads / columns)))

    def draw(palette: Palette) -> Drawing:
        gap, line = 0.22, 0.15
        width = 1.5 + sum(columns * CELL + gap for columns, _ in grids)
        height = max([rows * (CELL + line) for _, rows in grids] + [1.4]) + 0.25
        figure = new_figure((width, height))
        picture = figure.add_axes((0, 1 - (0.2 + 1.3) / height, 1.3 / width, 1.3 / height))
        picture.imshow(attention.images[index])
        picture.set_axis_off()
        left = 1.3 + gap
        for layer, (columns, _) in zip(attention.layers, grids, strict=True):
            limit, signed = map_scale(layer.mix)
            labels = head_labels(layer.mix.shape[1], layer.kernel)
            figure.text(left / width, 1 - 0.12 / height, layer.name, fontsize=8, va="center", color=palette.ink)
            for head, name in enumerate(labels):
                row, column = divmod(head, columns)
                bottom = height - 0.2 - (row + 1) * CELL - row * line
                cell = (left + column * CELL) / width, bottom / height
                axes = figure.add_axes((*cell, 0.94 * CELL / width, 0.94 * CELL / height))
                low = -limit if signed else 0
                colors = SIGNED if signed else POSITIVE
                axes.imshow(layer.mix[index, head], cmap=colors, vmin=low, vmax=limit, interpolation="none")
                y, x = layer.query
                axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor="white", linewidth=1.6))
                axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor="black", linewidth=0.7))
                axes.set_axis_off()
                under = formats.decimal(float(layer.gate[head]), 2) if symbol else name
                axes.text(0.5, -0.03, under, transform=axes.transAxes, ha="center", va="top", fontsize=6.5)
            left += columns * CELL + gap
        return Drawing(figure)

    return draw
