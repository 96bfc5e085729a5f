"""A `Scene` as a contact sheet: a PNG with a row for every image, the maps of one layer over it. No torch is needed."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from recast.errors import RecastError
from recast.files import check_ours, replaced
from recast.lab.explain.pack import first_layer
from recast.lab.explain.scene import GRAD_CAM, Floats, Layer, Picture, Scene

SIDE = 224
"""The longer side of a picture, in pixels of the sheet."""
GAP, MARGIN, LINE, DPI = 10, 20, 17, 100
LETTER = 6.2
"""Pixels that a letter of a caption takes at most, on average."""
ROWS = 32
"""Images on one sheet; of more the rest go on in NAME-2.png, …"""
MOST_CLASSES, MOST_HEADS = 4, 9
"""Maps of an image: the likeliest classes, or a mean and three heads; with a query, the heads of a 3×3 kernel."""
SIGNED, POSITIVE = "PuOr_r", "cividis"
"""Purple to orange through white at 0; dark blue to yellow: both safe for colour-blind readers."""
OPACITY = 0.8
"""Of the largest weight over the image."""
NEARLY_EVEN = 0.05
"""Maps whose weights are no further than this from the middle of them are said to be nearly even: the colours, from the
smallest to the largest, make small differences large."""
EVEN = 1e-3
"""Weights that differ by less than this share of the largest are drawn as even: a byte tells no more."""
SAYS = {"softmax": "predicted", "sigmoid": "sigmoid", "logits": "logit"}
INK, MUTED = "#1d2126", "#4c535c"

Pixels = NDArray[np.uint8]


class Tile(NamedTuple):
    """A picture with the lines below it, the first in bold."""

    pixels: Pixels
    lines: tuple[str, ...]


def write_sheet(scene: Scene, path: Path, layer: str | None = None) -> list[Path]:
    """Draw the maps of one layer over every image, in the last state of the network; returns the files written.

    layer: its name; without it the last layer that has a map for each class or head of a class token, else the last
    one. Of a layer with queries it is the map of the query in the middle. A map without a query is drawn from its
    smallest weight to its largest (min–max), interpolated, over the grey image; signed ones from
    −|largest| to |largest|. Sheets of more than `ROWS` images go on in PATH-2.png. Raises `RecastError` for a layer
    without maps, a scene that has none, and where nothing can be written.
    """
    last = {one.name: one for one in scene.states[-1].layers}
    if layer is None:  # without class maps the deepest: it has most to say of what the network sees
        layers = [one for one in last if one != GRAD_CAM] or [*last]
        name = next(reversed([one for one in layers if last[one].kind == "classes"] or layers), None)
    else:
        name = first_layer(scene, layer)
    if name is None:
        raise RecastError(
            f"nothing in {scene.title} has maps that could be drawn: write an .html page of its predictions, or "
            "give it attention pooling (recast train attention_pool_quick)"
        )
    if name not in last:
        raise RecastError(f"{name} has no maps at the last epoch: choose another --layer of {', '.join(last)}")
    of = last[name]
    rows = [_row(scene, picture, of) for picture in scene.pictures]
    pieces = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
    paths = [path, *(path.with_name(f"{path.stem}-{number}{path.suffix}") for number in range(2, len(pieces) + 1))]
    for target in paths:
        check_ours(target)
    for piece, target in zip(pieces, paths, strict=True):
        _draw(piece, [scene.title, _about(scene, of)], target)
    return paths


def _about(scene: Scene, layer: Layer) -> str:
    """The line below the title."""
    said = [f"{layer.name}: {layer.description}"]
    if (epoch := scene.states[-1].epoch) is not None:
        said.append(f"epoch {epoch}")
    if layer.kind != "classes":
        said.append("query in the middle, outlined")
    signed = any(maps.signed for picture in scene.pictures if (maps := picture.maps[-1].get(layer.name)))
    scale = "by its largest weight of either sign" if signed else "from its smallest to its largest weight"
    return "; ".join([*said, f"each map {scale}"])


def _row(scene: Scene, picture: Picture, layer: Layer) -> list[Tile]:
    """The image, its longer side at `SIDE` (the pixels of a small one stay visible), then its maps."""
    height, width = picture.pixels.shape[:2]
    scale = SIDE / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    how = Image.Resampling.NEAREST if scale > 2 else Image.Resampling.BICUBIC
    shown = np.asarray(Image.fromarray(picture.pixels).resize(size, how))
    label = () if picture.label is None else (f"label: {picture.label}",)
    best = {arm: picture.predictions[-1][arm][0] for arm in scene.arms if arm in picture.predictions[-1]}
    who = scene.arms if len(best) > 1 else dict.fromkeys(best, SAYS[scene.scale])
    said = (f"{who[arm]}: {one.name} {one.value}" for arm, one in best.items())
    tiles = [Tile(shown, (picture.name, *label, *said))]
    maps = picture.maps[-1].get(layer.name)
    if maps is None:
        return tiles
    query = len(layer.queries[0]) // 2, len(layer.queries[1]) // 2
    most = MOST_CLASSES if layer.kind == "classes" and layer.name != GRAD_CAM else MOST_HEADS
    for head, name in enumerate(layer.map_names(maps)[:most]):
        weights = layer.weights(maps, head, query)
        signed = maps.signed or float(weights.min()) < -1e-6 * float(np.abs(weights).max())
        laid = lay_over(shown, weights, signed)
        if layer.kind != "classes":
            _outline(laid, layer, query)
        tiles.append(Tile(laid, (name, _range(weights))))
    return tiles


def _range(weights: Floats) -> str:
    """The smallest and the largest weight, with as many digits as tell them apart."""

    def number(value: float, digits: int) -> str:
        return f"{value:.{digits}g}".replace("-", "−").replace("e−0", "e−")

    least, most = float(weights.min()), float(weights.max())
    if _is_even(weights):
        return f"{number(most, 2)} everywhere"
    digits = next(digits for digits in (2, 3, 4, 5) if digits == 5 or f"{least:.{digits}g}" != f"{most:.{digits}g}")
    nearly = ", nearly even" if 0 < most - least < NEARLY_EVEN * abs(most + least) else ""
    return f"{number(least, digits)} … {number(most, digits)}{nearly}"


def _is_even(weights: Floats) -> bool:
    return bool(np.ptp(weights) <= EVEN * np.abs(weights).max())


def lay_over(image: Pixels, weights: Floats, signed: bool) -> Pixels:
    """The colours of a map (Y, X) over the grey image, to which it is enlarged: (height, width, 3) both.

    The opacity is that of the weight, so that the image is as bright as it is where little weight lies.
    min–max, (w − min w) / (max w − min w); signed: w / max|w|, with white at 0. An even map has the middle colour.
    """
    if signed:
        share = (weights / (np.abs(weights).max() or 1.0) + 1) / 2
    elif _is_even(weights):
        share = np.full_like(weights, 0.5)
    else:
        share = (weights - weights.min()) / np.ptp(weights)
    height, width = image.shape[:2]
    large = Image.fromarray(share.astype(np.float32)).resize((width, height), Image.Resampling.BICUBIC)
    share = np.clip(np.asarray(large), 0, 1)  # bicubic overshoots
    colors = 255 * mpl.colormaps[SIGNED if signed else POSITIVE](share)[..., :3]
    opacity = OPACITY * (np.abs(2 * share - 1) if signed else share)[..., None]
    grey = np.asarray(Image.fromarray(image).convert("L"), dtype=np.float32)[..., None]
    return np.asarray((opacity * colors + (1 - opacity) * grey).round(), dtype=np.uint8)


def _outline(pixels: Pixels, layer: Layer, query: tuple[int, int]) -> None:
    """A white frame around the query's pixel."""
    spans = []
    for keys, queries, index, side in zip(layer.keys, layer.queries, query, pixels.shape[:2], strict=True):
        place = (queries[index] - keys.start) / keys.step
        low = min(max(place, 0), len(keys) - 1) * side / len(keys)
        spans.append((int(low), max(int(low) + 3, round(low + side / len(keys)))))
    (top, bottom), (left, right) = spans
    for width, color in ((2, 0), (1, 255)):
        box = pixels[top:bottom, left:right]
        inside = box[width:-width, width:-width].copy()
        box[:] = color
        box[width:-width, width:-width] = inside


def _draw(rows: Sequence[Sequence[Tile]], head: Sequence[str], path: Path) -> None:
    """Tiles in rows, their lines below them, the head above all."""
    wide = max(tile.pixels.shape[1] for row in rows for tile in row)
    columns = max(len(row) for row in rows)
    width = 2 * MARGIN + columns * wide + (columns - 1) * GAP
    letters = int(wide / LETTER)
    captions = [
        [[textwrap.shorten(line, letters, placeholder="…") for line in tile.lines] for tile in row] for row in rows
    ]
    title = [line for text in head for line in textwrap.wrap(text, int((width - 2 * MARGIN) / LETTER))[:3]]
    heights = [
        max(tile.pixels.shape[0] for tile in row) + LINE * max(map(len, said)) + 2 * GAP
        for row, said in zip(rows, captions, strict=True)
    ]
    top = MARGIN + LINE * len(title) + GAP
    height = top + sum(heights) + MARGIN - 2 * GAP
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a class name in another script
        figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="white")

        def say(x: int, y: int, line: str, bold: bool) -> None:
            figure.text(
                x / width, 1 - y / height, line, va="top", fontsize=8.5, color=INK if bold else MUTED,
                fontweight="bold" if bold else "normal", parse_math=False,
            )  # fmt: skip

        for number, line in enumerate(title):
            say(MARGIN, MARGIN + LINE * number, line, number == 0)
        for row, said, tall in zip(rows, captions, heights, strict=True):
            for column, (tile, lines) in enumerate(zip(row, said, strict=True)):
                left = MARGIN + column * (wide + GAP)
                below = top + tile.pixels.shape[0]
                figure.figimage(tile.pixels, left, height - below, origin="upper")
                for number, line in enumerate(lines):
                    say(left, below + 4 + LINE * number, line, number == 0)
            top += tall
        with replaced(path) as temporary:
            figure.savefig(temporary, format="png", dpi=DPI, metadata={"Title": head[0], "Software": "recast"})
