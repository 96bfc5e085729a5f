"""Write a `Scene` as an HTML page: maps are deflated, and made coarser if it would be too large. No torch."""

from __future__ import annotations

import base64
import json
import re
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from recast.errors import RecastError
from recast.files import check_place, write_text
from recast.lab.explain.scene import Maps, Scene
from recast.lab.folder.files import check_ours
from recast.lab.pages.formats import png
from recast.lab.pages.template import fill_page

PAGES = (".html", ".htm")
SCRIPTS = ("maps.js", "colors.js", "words.js", "explain.js")
LIMIT = 7_600_000
"""Bytes of a page's data; a page stays below 8 MB."""


def write_scene(scene: Scene, out: Path, layer: str | None = None) -> Path:
    """Write the scene to `out`, under a temporary name that is renamed.

    Args:
        layer: layer to open first (default: `Scene.first_layer`).

    Raises:
        RecastError: the layer has no maps, or the file cannot be written.
    """
    check_target(out)
    packed = pack(scene, layer=layer)
    data = json.dumps(packed, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    data = data.replace("<", "\\u003c")  # "</script>" in a name must not end the script
    write_text(out, fill_page("explain.html.j2", "explain.css", SCRIPTS, title=scene.title, data=Markup(data)))
    return out


def check_target(out: Path) -> None:
    """Raise `RecastError` unless `out` can be written as a page."""
    check_place(out, "the page", "explain.html")
    if out.suffix.lower() not in PAGES:
        raise RecastError(f"unknown format of {out}: use the ending .html")
    check_ours(out)


def safe_stem(name: str) -> str:
    """Replace characters that are unsafe in a file name by "-"."""
    return re.sub(r"[^\w.-]+", "-", name).strip(".-")


def pack_maps(maps: Maps) -> dict[str, Any]:
    """Return maps as JSON-able data.

    The bytes are scales, then least values (float32, little-endian), then the stored values; raw deflate in base64.
    """
    content = maps.scale.astype("<f4").tobytes() + maps.low.astype("<f4").tobytes() + maps.stored.tobytes()
    data = zlib.compress(content, 6, wbits=-15)  # level 9 takes up to 15 times as long for 4 % fewer bytes
    return {
        "rows": maps.rows,
        "columns": maps.columns,
        "pool": maps.pool,
        "blocks": maps.stored.shape[-2:],
        "names": maps.names,
        "signed": maps.signed,
        "data": base64.b64encode(data).decode("ascii"),
    }


def pack(scene: Scene, limit: int = LIMIT, layer: str | None = None) -> dict[str, Any]:
    """Return the scene as JSON-able data that opens with `layer`, and notes on maps that are not stored in full.

    While the data exceed `limit` bytes, the largest layer is made coarser. Raises RecastError for a layer without maps.
    """
    sources = [png(picture.pixels) for picture in scene.pictures]
    packed, notes = _packed_maps(scene, limit - sum(map(len, sources)))
    return {
        "title": scene.title,
        "arms": scene.arms,
        "scale": scene.scale,
        "notes": [*scene.notes, *notes],
        "facts": scene.about,
        "order": [layer.name for layer in scene.layers],
        "first": scene.first_layer(layer),
        "layers": {
            layer.name: {field: _plain(value) for field, value in vars(layer).items() if field != "name"}
            for layer in scene.layers
        },
        "pictures": [
            {
                "name": picture.name,
                "label": picture.label,
                "notes": picture.notes,
                "size": picture.pixels.shape[:2],
                "src": source,
                "predictions": {
                    arm: [(best.name, round(best.probability, 5)) for best in ranking]
                    for arm, ranking in picture.predictions.items()
                },
                "maps": {name: packed[name][index] for name in picture.maps},
            }
            for index, (picture, source) in enumerate(zip(scene.pictures, sources, strict=True))
        ],
    }


def _packed_maps(scene: Scene, budget: int) -> tuple[dict[str, dict[int, dict[str, Any]]], list[str]]:
    """Return the packed maps by layer and picture, the largest layers coarser until all fit, and notes."""
    layers: dict[str, dict[int, Maps]] = {}
    for index, picture in enumerate(scene.pictures):
        for name, maps in picture.maps.items():
            layers.setdefault(name, {})[index] = maps
    packed = {name: {key: pack_maps(maps) for key, maps in layer.items()} for name, layer in layers.items()}
    sizes = {name: sum(len(maps["data"]) for maps in layer.values()) for name, layer in packed.items()}
    ending = "."
    while sizes and sum(sizes.values()) > budget:
        name = max(sizes, key=sizes.__getitem__)
        first = next(iter(layers[name].values()))
        queries, blocks = len(first.rows) * len(first.columns), first.stored.shape[-1] * first.stored.shape[-2]
        if max(queries, blocks) <= 4:  # cannot be made coarser
            break
        coarser = Maps.fewer_queries if queries >= blocks else Maps.coarser_keys
        layers[name] = {key: coarser(maps) for key, maps in layers[name].items()}
        packed[name] = {key: pack_maps(maps) for key, maps in layers[name].items()}
        sizes[name] = sum(len(maps["data"]) for maps in packed[name].values())
        ending = " to keep the page small."
    notes = [_coarseness(name, next(iter(layer.values()))) for name, layer in layers.items()]
    return packed, [note + ending for note in notes if note]


def _coarseness(name: str, maps: Maps) -> str:
    parts = []
    step = max((b - a for indices in (maps.rows, maps.columns) for a, b in pairwise(indices)), default=1)
    if step > 1:
        ordinal = {2: "second", 3: "third"}.get(step, f"{step}th")
        parts.append(f"for every {ordinal} query in each direction (others show the nearest)")
    if maps.pool > 1:
        parts.append(f"over blocks of {maps.pool}×{maps.pool} pixels")
    return f"{name}: maps are stored {' and '.join(parts)}" if parts else ""


def _plain(value: Any) -> Any:
    """Convert a field of a layer to JSON types; a range becomes [start, step, length], and NaN null."""
    if isinstance(value, np.ndarray):
        numbers = np.round(value.astype(float), 7).astype(object)
        numbers[np.isnan(value)] = None
        return numbers.tolist()
    if isinstance(value, range):
        return [value.start, value.step, len(value)]
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
