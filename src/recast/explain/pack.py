"""A `Scene` as JSON for the page: its maps deflated, and coarser where the page would be too large."""

from __future__ import annotations

import base64
import io
import math
import zlib
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from recast.errors import RecastError, suggest
from recast.explain.scene import Maps, Picture, Scene

LIMIT = 7_600_000
"""Bytes of a page's data; the page promises to stay below 8 MB."""


Key = tuple[int, int, str]
"""Number of the picture, number of the state, name of the layer."""


def pack_maps(maps: Maps) -> dict[str, Any]:
    """Scales, least values where maps are stored from there (float32, little-endian), then bytes; deflated (raw), in
    base64."""
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)  # 9 takes up to 15 times as long for 4 % fewer bytes
    low = b"" if maps.low is None else maps.low.astype("<f4").tobytes()
    data = packer.compress(maps.scale.astype("<f4").tobytes() + low + maps.stored.tobytes()) + packer.flush()
    return {
        "rows": list(maps.rows),
        "columns": list(maps.columns),
        "pool": maps.pool,
        "blocks": list(maps.stored.shape[-2:]),
        "names": list(maps.names),
        "signed": maps.signed,
        "fromLeast": maps.low is not None,
        "data": base64.b64encode(data).decode("ascii"),
    }


def first_layer(scene: Scene, wanted: str | None = None) -> str | None:
    """The layer that is shown first: the wanted one, else the last that has a map for each class, else the first.

    None where nothing has maps. Raises `RecastError` for a wanted layer that the scene does not have.
    """
    if wanted is not None:
        if wanted not in scene.layer_order:
            known = ", ".join(scene.layer_order) or "none"
            raise RecastError(
                f"no layer {wanted!r} has maps.{suggest(wanted, scene.layer_order)} Those that do: {known}"
            )
        return wanted
    kinds = {layer.name: layer.kind for state in scene.states for layer in state.layers}
    of_classes = [name for name in scene.layer_order if kinds.get(name) == "classes"]
    return of_classes[-1] if of_classes else next(iter(scene.layer_order), None)


def pack(scene: Scene, limit: int | None = LIMIT, layer: str | None = None) -> dict[str, Any]:
    """The scene as JSON-able data, with notes on what is not stored in full; `layer` is open first.

    Above `limit` bytes the largest layer becomes coarser, again and again, until all fit (None: as large as it is).
    Raises `RecastError` as `first_layer` does.
    """
    first = first_layer(scene, layer)
    pictures = [_picture(picture) for picture in scene.pictures]
    budget = math.inf if limit is None else limit - sum(len(picture["src"]) for picture in pictures)
    packed, notes = _packed_maps(scene, budget)
    for index, picture in enumerate(scene.pictures):
        states = enumerate(picture.maps)
        pictures[index]["maps"] = [{name: packed[index, state, name] for name in maps} for state, maps in states]
    return {
        "title": scene.title,
        "arms": scene.arms,
        "notes": [*scene.notes, *notes],
        "facts": scene.about,
        "order": scene.layer_order,
        "first": first,
        "states": [
            {
                "epoch": state.epoch,
                "layers": {
                    layer.name: {field: _plain(value) for field, value in vars(layer).items() if field != "name"}
                    for layer in state.layers
                },
            }
            for state in scene.states
        ],
        "pictures": pictures,
    }


def _packed_maps(scene: Scene, budget: float) -> tuple[dict[Key, dict[str, Any]], list[str]]:
    """Every picture's maps in every state, the largest layers coarser until all fit."""
    found: dict[Key, Maps] = {
        (index, state, name): maps
        for index, picture in enumerate(scene.pictures)
        for state, layers in enumerate(picture.maps)
        for name, maps in layers.items()
    }
    packed = {key: pack_maps(maps) for key, maps in found.items()}
    ending = "."
    while True:
        sizes: Counter[str] = Counter()
        for key, one in packed.items():
            sizes[key[2]] += len(one["data"])
        if not found or sizes.total() <= budget:
            break
        name = max(sizes, key=lambda name: sizes[name])
        keys = [key for key in found if key[2] == name]
        first = found[keys[0]]
        queries, blocks = len(first.rows) * len(first.columns), first.stored.shape[-1] * first.stored.shape[-2]
        if max(queries, blocks) <= 4:  # as coarse as it goes
            break
        for key in keys:  # whichever of queries and keys has more
            found[key] = found[key].fewer_queries() if queries >= blocks else found[key].coarser_keys()
            packed[key] = pack_maps(found[key])
        ending = " to keep the page small."
    by_layer = {name: maps for (_, _, name), maps in reversed(found.items())}
    notes = [_coarseness(name, by_layer[name]) for name in dict.fromkeys(name for _, _, name in found)]
    return packed, [note + ending for note in notes if note]


def _coarseness(name: str, maps: Maps) -> str:
    said = []
    step = max((b - a for line in (maps.rows, maps.columns) for a, b in pairwise(line)), default=1)
    if step > 1:
        ordinal = {2: "second", 3: "third"}.get(step, f"{step}th")
        said.append(f"for every {ordinal} query in each direction (others show the nearest)")
    if maps.pool > 1:
        said.append(f"over blocks of {maps.pool}×{maps.pool} pixels")
    return f"{name}: stored maps are kept {' and '.join(said)}" if said else ""


def _picture(picture: Picture) -> dict[str, Any]:
    return {
        "name": picture.name,
        "label": picture.label,
        "notes": list(picture.notes),
        "size": list(picture.pixels.shape[:2]),
        "src": png(picture.pixels),
        "predictions": [
            {arm: [[one.name, round(one.probability, 5)] for one in ranked] for arm, ranked in state.items()}
            for state in picture.predictions
        ],
    }


def png(pixels: NDArray[np.uint8], most: int | None = None) -> str:
    """(height, width, 3) as a data: URI; shrunk to sides of `most` pixels where they are longer."""
    buffer = io.BytesIO()
    picture = Image.fromarray(pixels)
    if most is not None:
        picture.thumbnail((most, most))
    picture.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _plain(value: Any) -> Any:
    """A field of a layer as what JSON knows; a range as [start, step, length]."""
    if isinstance(value, np.ndarray):
        return np.round(value.astype(float), 7).tolist()
    if isinstance(value, range):
        return [value.start, value.step, len(value)]
    return [_plain(one) for one in value] if isinstance(value, tuple) else value
