"""Draw a `Scene` as a contact sheet: a PNG with one row per image, the maps of one layer laid over it.

Does not import torch.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from recast.errors import RecastError
from recast.files import check_ours, replaced
from recast.lab.explain.pack import first_layer
from recast.lab.explain.scene import GRAD_CAM, Floats, Layer, Picture, Scene

SIDE = 224  # longer side of a picture, in pixels of the sheet
GAP, MARGIN, LINE = 10, 20, 17
LETTER = 6.2  # average width of a letter of a caption, in pixels
ROWS = 32  # images per sheet; the rest continue in NAME-2.png, …
MOST_CLASSES, MOST_HEADS = 4, 9  # maps per image: classes (or a mean and three heads); the heads of a 3×3 kernel
SIGNED, POSITIVE = "PuOr_r", "cividis"  # purple to orange through white at 0; dark blue to yellow; color-blind safe
OPACITY = 0.8  # of the largest weight
NEARLY_EVEN = 0.05  # maps whose weights differ by less from their middle: the colors exaggerate small differences
EVEN = 1e-3  # weights that differ by less than this share of the largest are drawn as uniform: the precision of a byte
VERBS = {"softmax": "predicted", "sigmoid": "sigmoid", "logits": "logit"}
INK, MUTED = "#1d2126", "#4c535c"

Pixels = NDArray[np.uint8]


class Tile(NamedTuple):
    """A picture and the lines below it, the first in bold."""

    pixels: Pixels
    lines: tuple[str, ...]


def write_sheet(scene: Scene, path: Path, layer: str | None = None) -> list[Path]:
    """Draw the maps of one layer over every image, in the last state, and return the files written.

    In a layer with queries the map of the middle query is drawn. Maps without a query are drawn from their smallest
    weight to their largest (min–max), interpolated, over the gray image; signed maps from −|largest| to |largest|.
    More than `ROWS` images continue in PATH-2.png.

    Args:
        layer: name of the layer; default the last with a map per class or head of a class token, else the last.

    Raises:
        RecastError: the layer or the scene has no maps, or a file cannot be written.
    """
    layers = {shown.name: shown for shown in scene.states[-1].layers}
    if layer is None:  # without class maps the deepest layer, which reflects best what the network sees
        names = [name for name in layers if name != GRAD_CAM] or [*layers]
        name = next(reversed([name for name in names if layers[name].kind == "classes"] or names), None)
    else:
        name = first_layer(scene, layer)
    if name is None:
        raise RecastError(
            f"{scene.title} has no maps to draw: write an .html page of its predictions, or give it attention pooling "
            "(recast train attention_pool_quick)"
        )
    if name not in layers:
        raise RecastError(f"{name} has no maps at the last epoch: choose --layer from {', '.join(layers)}")
    rows = [_row(scene, picture, layers[name]) for picture in scene.pictures]
    sheets = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
    paths = [path, *(path.with_name(f"{path.stem}-{number}{path.suffix}") for number in range(2, len(sheets) + 1))]
    for target in paths:
        check_ours(target)
    for sheet, target in zip(sheets, paths, strict=True):
        _draw(sheet, [scene.title, _subtitle(scene, layers[name])], target)
    return paths


def _subtitle(scene: Scene, layer: Layer) -> str:
    parts = [f"{layer.name}: {layer.description}"]
    if (epoch := scene.states[-1].epoch) is not None:
        parts.append(f"epoch {epoch}")
    if layer.kind != "classes":
        parts.append("query in the middle, outlined")
    signed = any(maps.signed for picture in scene.pictures if (maps := picture.maps[-1].get(layer.name)))
    scale = "by its largest weight of either sign" if signed else "from its smallest to its largest weight"
    return "; ".join([*parts, f"each map {scale}"])


def _row(scene: Scene, picture: Picture, layer: Layer) -> list[Tile]:
    """Return the image, its longer side scaled to `SIDE` (small images keep visible pixels), and its maps."""
    height, width = picture.pixels.shape[:2]
    scale = SIDE / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    resampling = Image.Resampling.NEAREST if scale > 2 else Image.Resampling.BICUBIC
    image = np.asarray(Image.fromarray(picture.pixels).resize(size, resampling))
    label = () if picture.label is None else (f"label: {picture.label}",)
    best = {arm: picture.predictions[-1][arm][0] for arm in scene.arms if arm in picture.predictions[-1]}
    names = scene.arms if len(best) > 1 else dict.fromkeys(best, VERBS[scene.scale])
    predictions = (f"{names[arm]}: {prediction.name} {prediction.value}" for arm, prediction in best.items())
    tiles = [Tile(image, (picture.name, *label, *predictions))]
    maps = picture.maps[-1].get(layer.name)
    if maps is None:
        return tiles
    query = len(layer.queries[0]) // 2, len(layer.queries[1]) // 2
    most = MOST_CLASSES if layer.kind == "classes" and layer.name != GRAD_CAM else MOST_HEADS
    for head, name in enumerate(layer.map_names(maps)[:most]):
        weights = layer.weights(maps, head, query)
        signed = maps.signed or float(weights.min()) < -1e-6 * float(np.abs(weights).max())
        overlay = lay_over(image, weights, signed)
        if layer.kind != "classes":
            overlay = _outlined(overlay, layer, query)
        tiles.append(Tile(overlay, (name, _range(weights))))
    return tiles


def _range(weights: Floats) -> str:
    """Return the smallest and the largest weight, with enough digits to differ."""

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
    """Return the gray image (height, width, 3) with the colors of a map (Y, X) over it, enlarged to its size.

    Colors are (w − min w) / (max w − min w), or w / max|w| with white at 0 if `signed`; a uniform map has the middle
    color. The opacity grows with the weight, so that the image keeps its brightness where there is little weight.
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
    gray = np.asarray(Image.fromarray(image).convert("L"), dtype=np.float32)[..., None]
    return np.asarray((opacity * colors + (1 - opacity) * gray).round(), dtype=np.uint8)


def _outlined(pixels: Pixels, layer: Layer, query: tuple[int, int]) -> Pixels:
    """Return the picture with a white and black frame around the pixel of the query."""
    spans = []
    for keys, queries, index, side in zip(layer.keys, layer.queries, query, pixels.shape[:2], strict=True):
        place = (queries[index] - keys.start) / keys.step
        low = min(max(place, 0), len(keys) - 1) * side / len(keys)
        spans.append((int(low), max(int(low) + 3, round(low + side / len(keys)))))
    (top, bottom), (left, right) = spans
    picture = Image.fromarray(pixels)
    draw = ImageDraw.Draw(picture)
    draw.rectangle((left, top, right - 1, bottom - 1), outline="white")
    draw.rectangle((left + 1, top + 1, right - 2, bottom - 2), outline="black")
    return np.asarray(picture)


def _draw(rows: Sequence[Sequence[Tile]], head: Sequence[str], path: Path) -> None:
    """Draw rows of tiles with their lines below them; the first line of `head` is the title."""
    fonts = [
        ImageFont.truetype(f"{mpl.get_data_path()}/fonts/ttf/DejaVuSans{style}.ttf", 12) for style in ("", "-Bold")
    ]
    tile_width = max(tile.pixels.shape[1] for row in rows for tile in row)
    columns = max(len(row) for row in rows)
    width = 2 * MARGIN + columns * tile_width + (columns - 1) * GAP
    title = [line for text in head for line in textwrap.wrap(text, int((width - 2 * MARGIN) / (1.15 * LETTER)))[:3]]
    heights = [max(tile.pixels.shape[0] + LINE * len(tile.lines) for tile in row) + 2 * GAP for row in rows]
    top = MARGIN + LINE * len(title) + GAP
    sheet = Image.new("RGB", (width, top + sum(heights) + MARGIN - 2 * GAP), "white")
    draw = ImageDraw.Draw(sheet)

    def write(left: int, top: int, lines: Sequence[str]) -> None:
        for number, line in enumerate(lines):
            draw.text((left, top + LINE * number), line, INK if number == 0 else MUTED, fonts[number == 0])

    write(MARGIN, MARGIN, title)
    for row, height in zip(rows, heights, strict=True):
        for column, tile in enumerate(row):
            left = MARGIN + column * (tile_width + GAP)
            sheet.paste(Image.fromarray(tile.pixels), (left, top))
            lines = [textwrap.shorten(line, int(tile_width / LETTER), placeholder="…") for line in tile.lines]
            write(left, top + tile.pixels.shape[0] + 4, lines)
        top += height
    metadata = PngInfo()
    metadata.add_text("Title", head[0])
    metadata.add_text("Software", "recast")
    with replaced(path) as temporary:
        sheet.save(temporary, format="png", pnginfo=metadata)
