"""Attention maps as small PNG pictures, one pixel per token; the browser enlarges them."""

from __future__ import annotations

import base64
import io
import math
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from PIL import Image

from recast.report.read.attention import Attention, AttentionLayer
from recast.report.text import formats

SIGNED, POSITIVE = "PuOr_r", "cividis"
"""Purple to orange through white at 0; dark blue to yellow: both safe for colour-blind readers."""
IMAGE_SIDE = 160
"""Larger images are shrunk to this side."""


@dataclass(frozen=True)
class Box:
    """A cell of a grid in percent of the picture."""

    left: float
    top: float
    width: float
    height: float


@dataclass(frozen=True)
class HeadMap:
    picture: str
    """data: URI."""
    alt: str
    gate: str
    tap: str


@dataclass(frozen=True)
class LayerMaps:
    name: str
    columns: int
    aspect: str
    heads: list[HeadMap]
    query: Box
    signed: bool
    limit: str
    peak: str
    gradient: str


@dataclass(frozen=True)
class ImageMaps:
    picture: str
    alt: str
    label: str
    prediction: str
    aspect: str
    queries: list[Box]
    layers: list[LayerMaps]


def head_labels(heads: int, kernel: tuple[int, int] | None) -> list[str]:
    """`row,column` of each head's kernel tap where there is a head per tap, otherwise its number; from 0."""
    if kernel is not None and kernel[0] * kernel[1] == heads:
        return [f"{index // kernel[1]},{index % kernel[1]}" for index in range(heads)]
    return [str(index) for index in range(heads)]


def image_maps(attention: Attention, symbol: str, budget: int) -> list[ImageMaps]:
    """The panels of as many images as fit in `budget` bytes of HTML (at least one).

    `symbol` is that of the share of content attention, which stands under each map; without one the tap does.
    """
    scales = [map_scale(layer.mix) for layer in attention.layers]
    queries = [_box(layer) for layer in attention.layers]
    panels: list[ImageMaps] = []
    spent = 0
    for index, image in enumerate(attention.images):
        layers = [
            _layer(layer, index, symbol, limit, signed, query)
            for layer, (limit, signed), query in zip(attention.layers, scales, queries, strict=True)
        ]
        picture = _image(image)
        spent += len(picture) + sum(len(head.picture) + 400 for layer in layers for head in layer.heads)
        if panels and spent > budget:
            break
        label, prediction = attention.labels[index], attention.predictions[index]
        panels.append(
            ImageMaps(
                picture=picture,
                alt=f"Input image {index + 1}, labelled {label}, predicted {prediction}; the query pixel is outlined",
                label=label,
                prediction=prediction,
                aspect=f"{image.shape[1]} / {image.shape[0]}",
                queries=list(dict.fromkeys(queries)),
                layers=layers,
            )
        )
    return panels


def _layer(layer: AttentionLayer, index: int, symbol: str, limit: float, signed: bool, query: Box) -> LayerMaps:
    heads, height, width = layer.mix.shape[1:]
    on_grid = layer.kernel[0] * layer.kernel[1] == heads
    labels = head_labels(heads, layer.kernel)
    pictures = []
    for head in range(heads):
        values = layer.mix[index, head]
        row, column = np.unravel_index(int(np.argmax(np.abs(np.nan_to_num(values)))), values.shape)
        gate = formats.decimal(float(layer.gate[head]), 2)
        name = f"Head of tap {labels[head]}" if on_grid else f"Head {labels[head]}"
        peak = formats.decimal(float(values[row, column]), 2)
        content = f"{symbol} = {gate}; " if symbol else ""
        alt = f"{name}: {content}largest weight {peak} at row {row}, column {column} of {height} by {width}"
        pictures.append(HeadMap(_map(values, limit, signed), alt, gate if symbol else labels[head], labels[head]))
    return LayerMaps(
        name=layer.name,
        columns=layer.kernel[1] if on_grid else math.ceil(math.sqrt(heads)),
        aspect=f"{width} / {height}",
        heads=pictures,
        query=query,
        signed=signed,
        limit=f"{limit:.2g}",
        peak=formats.decimal(float(np.abs(np.nan_to_num(layer.mix)).max()), 2),
        gradient=_gradient(signed),
    )


def map_scale(mix: np.ndarray) -> tuple[float, bool]:
    """(value of the strongest colour, signed?) of a layer, the same for all its heads and images.

    A head that is still nearly the convolution has one weight near 1 and the rest a thousand times smaller: the largest
    weight of each map is left out of the scale, so that the rest can be seen, and saturates.
    """
    magnitude = np.abs(np.nan_to_num(mix.reshape(-1, mix.shape[2] * mix.shape[3])))
    largest = float(magnitude.max(initial=0.0))
    signed = float(np.nanmin(mix, initial=0.0)) < -1e-6 * largest
    rest = np.sort(magnitude, axis=1)[:, :-1]
    limit = float(np.quantile(rest, 0.995)) if rest.size else 0.0
    return (limit if limit > 1e-5 * largest else largest) or 1.0, signed


def _map(values: np.ndarray, limit: float, signed: bool) -> str:
    scaled = (values / limit + 1) / 2 if signed else values / limit
    index = np.round(np.clip(np.nan_to_num(scaled, nan=0.5 if signed else 0.0), 0, 1) * 255).astype(np.uint8)
    colors = _colors(signed)
    if index.size <= 256:  # a palette would weigh more than the pixels
        return _png(Image.fromarray(colors[index]))
    picture = Image.fromarray(index)
    picture.putpalette(colors.tobytes())
    return _png(picture)


def _colors(signed: bool) -> np.ndarray:
    table = mpl.colormaps[SIGNED if signed else POSITIVE](np.arange(256) / 255, bytes=True)
    return np.ascontiguousarray(table[:, :3])


def _gradient(signed: bool) -> str:
    stops = _colors(signed)[np.linspace(0, 255, 9).astype(int)]
    return ", ".join(f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in stops)


def _image(image: np.ndarray) -> str:
    picture = Image.fromarray(image)
    if max(picture.size) > IMAGE_SIDE:
        picture.thumbnail((IMAGE_SIDE, IMAGE_SIDE))
    return _png(picture)


def _png(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _box(layer: AttentionLayer) -> Box:
    height, width = layer.mix.shape[2:]
    row, column = layer.query
    return Box(*(round(value, 3) for value in (100 * column / width, 100 * row / height, 100 / width, 100 / height)))
