"""Draw a `Scene` as a contact sheet: a PNG with one row per image, the maps of one layer laid over it.

Does not import torch.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from recast.errors import RecastError
from recast.files import replaced
from recast.lab.explain.scene import Floats, Layer, Maps, Picture, Scene

TILE, LINE, HEAD = 2.3, 0.18, 0.6  # inches: side of a picture, height of a line below it and of the title
LETTERS = 34  # of a line below a picture
SIDE = 224  # pixels of the longer side of a map, at least
MOST_MAPS = 9  # per image: the heads of a 3×3 kernel, or the mean and eight heads of a token
SIGNED, POSITIVE = "PuOr_r", "cividis"  # purple to orange through white at 0; dark blue to yellow; color-blind safe
OPACITY = 0.8  # of the largest weight
EVEN = 1e-3  # weights that differ by less than this share of the largest are drawn as uniform: the precision of a byte
VERBS = {"softmax": "predicted", "sigmoid": "sigmoid", "logits": "logit"}


def write_sheet(scene: Scene, path: Path, layer: str | None = None) -> None:
    """Draw the maps of one layer over every image, in the last state.

    In a layer with queries the map of the middle query is drawn. Maps are drawn from their smallest weight to their
    largest, interpolated, over the gray image; signed maps from −|largest| to |largest|.

    Args:
        layer: name of the layer; default `Scene.first_layer`.

    Raises:
        RecastError: the layer or the scene has no maps, or the file cannot be written.
    """
    figure = draw_sheet(scene, layer)
    with replaced(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Title": scene.title, "Software": "recast"})


def draw_sheet(scene: Scene, layer: str | None = None) -> Figure:
    """Return the figure of `write_sheet`."""
    name = scene.first_layer(layer)
    if name is None:
        raise RecastError(
            f"{scene.title} has no maps to draw: write an .html page of its predictions, or give it attention pooling "
            "(recast train attention_pool_quick)"
        )
    state = scene.states[-1]
    shown = next(layer for layer in state.layers if layer.name == name)
    pictures = [picture for picture in scene.pictures if name in picture.maps[-1]]  # Grad-CAM requires finite outputs
    captions = [_caption(scene, picture) for picture in pictures]
    maps = [picture.maps[-1][name] for picture in pictures]
    rows, columns = len(maps), 1 + max(len(shown.map_names(stored)[:MOST_MAPS]) for stored in maps)
    lines = max(map(len, captions))
    figure = Figure((columns * TILE, rows * (TILE + LINE * lines) + HEAD), layout="constrained")
    epoch = "" if state.epoch is None else f"; epoch {state.epoch}"
    query = "" if shown.kind == "classes" else "; query in the middle, outlined"
    figure.suptitle(f"{scene.title}\n{name}: {shown.description}{epoch}{query}", x=0.01, ha="left", fontsize=9)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for row, picture, caption, stored in zip(grid, pictures, captions, maps, strict=True):
        row[0].imshow(picture.pixels)
        _write_below(row[0], caption)
        for head, (axes, title) in enumerate(zip(row[1:], shown.map_names(stored), strict=False)):
            _draw_map(axes, picture, shown, stored, head, title)
    return figure


def _caption(scene: Scene, picture: Picture) -> list[str]:
    best = {arm: picture.predictions[-1][arm][0] for arm in scene.arms if arm in picture.predictions[-1]}
    names = scene.arms if len(best) > 1 else dict.fromkeys(best, VERBS[scene.scale])
    label = [] if picture.label is None else [f"label: {picture.label}"]
    return [picture.name, *label, *(f"{names[arm]}: {first.name} {first.value}" for arm, first in best.items())]


def _draw_map(axes: Axes, picture: Picture, layer: Layer, maps: Maps, head: int, title: str) -> None:
    """Lay a map over the gray image. Its opacity grows with the weight: the image shows where there is little."""
    query = len(layer.queries[0]) // 2, len(layer.queries[1]) // 2
    weights = layer.weights(maps, head, query)
    least, most = float(weights.min()), float(weights.max())
    signed = maps.signed or least < -1e-6 * float(np.abs(weights).max())
    share = _shares(weights, signed)
    times = -(-SIDE // max(picture.pixels.shape[:2]))  # small images keep visible pixels
    gray = picture.pixels.mean(-1, keepdims=True).repeat(times, 0).repeat(times, 1)
    large = Image.fromarray(share.astype(np.float32)).resize(gray.shape[1::-1], Image.Resampling.BICUBIC)
    share_there = np.clip(np.asarray(large), 0, 1)  # bicubic overshoots
    colors = 255 * colormaps[SIGNED if signed else POSITIVE](share_there)[..., :3]
    opacity = OPACITY * (np.abs(2 * share_there - 1) if signed else share_there)[..., None]
    axes.imshow((opacity * colors + (1 - opacity) * gray).round().astype(np.uint8))
    if layer.kind != "classes":
        axes.add_patch(_outline(layer, query, gray.shape[:2]))
    text = f"{most:.2g} everywhere" if np.ptp(share) == 0 else f"{least:.3g} … {most:.3g}"
    _write_below(axes, [title, text.replace("-", "−")])


def _shares(weights: Floats, signed: bool) -> Floats:
    """Scale weights (Y, X) to [0, 1]: from min to max, or with 0 in the middle if `signed`; a uniform map is 0.5."""
    largest = np.abs(weights).max()
    if np.ptp(weights) <= EVEN * largest:
        return np.full_like(weights, 0.5)
    shares: Floats = (weights / largest + 1) / 2 if signed else (weights - weights.min()) / np.ptp(weights)
    return shares


def _outline(layer: Layer, query: tuple[int, int], size: tuple[int, int]) -> Rectangle:
    """Return a frame around the pixel of the query on an image of (height, width)."""
    cells = [side / len(keys) for side, keys in zip(size, layer.keys, strict=True)]
    places = [
        min(max((queries[index] - keys.start) / keys.step, 0), len(keys) - 1)
        for keys, queries, index in zip(layer.keys, layer.queries, query, strict=True)
    ]
    corner = places[1] * cells[1], places[0] * cells[0]
    return Rectangle(corner, cells[1], cells[0], fill=False, edgecolor="red")


def _write_below(axes: Axes, lines: list[str]) -> None:
    text = "\n".join(textwrap.shorten(line, LETTERS, placeholder="…").replace("$", r"\$") for line in lines)
    axes.text(0, -0.02, text, transform=axes.transAxes, va="top", fontsize=8)
