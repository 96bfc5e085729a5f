"""A `Scene` as JSON for the page: its maps deflated, and coarser where the page would be too large."""

from __future__ import annotations

import base64
import math
import zlib
from itertools import pairwise
from typing import Any

import numpy as np

from recast.errors import RecastError, suggest
from recast.lab.explain.scene import GRAD_CAM, Maps, Scene
from recast.lab.report.neighbours import png

LIMIT = 7_600_000
"""Bytes of a page's data; the page promises to stay below 8 MB."""

PictureState = tuple[int, int]
"""Number of the picture, number of the state."""


def pack_maps(maps: Maps) -> dict[str, Any]:
    """Scales, least values where maps are stored from there (float32, little-endian), then bytes; deflated (raw), in
    base64."""
    low = b"" if maps.low is None else maps.low.astype("<f4").tobytes()
    content = maps.scale.astype("<f4").tobytes() + low + maps.stored.tobytes()
    data = zlib.compress(content, 6, wbits=-15)  # level 9 takes up to 15 times as long for 4 % fewer bytes
    return {
        "rows": maps.rows,
        "columns": maps.columns,
        "pool": maps.pool,
        "blocks": maps.stored.shape[-2:],
        "names": maps.names,
        "signed": maps.signed,
        "fromLeast": maps.low is not None,
        "data": base64.b64encode(data).decode("ascii"),
    }


def first_layer(scene: Scene, wanted: str | None = None) -> str | None:
    """The layer that is shown first: the wanted one, else the last that has a map for each class, else the first.

    Grad-CAM is no layer: it comes first where there is nothing else.

    None where nothing has maps. Raises `RecastError` for a wanted layer that the scene does not have.
    """
    if wanted is not None:
        if wanted not in scene.layer_order:
            known = ", ".join(scene.layer_order) or "none"
            raise RecastError(
                f"no layer {wanted!r} has maps.{suggest(wanted, scene.layer_order)} Those that do: {known}"
            )
        return wanted
    kinds = {layer.name: layer.kind for state in scene.states for layer in state.layers if layer.name != GRAD_CAM}
    of_classes = [name for name in scene.layer_order if kinds.get(name) == "classes"]
    return of_classes[-1] if of_classes else next(iter(scene.layer_order), None)


def pack(scene: Scene, limit: int | None = LIMIT, layer: str | None = None) -> dict[str, Any]:
    """The scene as JSON-able data, with notes on what is not stored in full; `layer` is open first.

    Above `limit` bytes the largest layer becomes coarser, again and again, until all fit (None: as large as it is).
    Raises `RecastError` as `first_layer` does.
    """
    first = first_layer(scene, layer)
    sources = [png(picture.pixels) for picture in scene.pictures]
    packed, notes = _packed_maps(scene, math.inf if limit is None else limit - sum(map(len, sources)))
    return {
        "title": scene.title,
        "arms": scene.arms,
        "scale": scene.scale,
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
        "pictures": [
            {
                "name": picture.name,
                "label": picture.label,
                "notes": picture.notes,
                "size": picture.pixels.shape[:2],
                "src": source,
                "predictions": [
                    {arm: [(one.name, round(one.probability, 5)) for one in best] for arm, best in state.items()}
                    for state in picture.predictions
                ],
                "maps": [
                    {name: packed[name][index, state] for name in maps} for state, maps in enumerate(picture.maps)
                ],
            }
            for index, (picture, source) in enumerate(zip(scene.pictures, sources, strict=True))
        ],
    }


def _packed_maps(scene: Scene, budget: float) -> tuple[dict[str, dict[PictureState, dict[str, Any]]], list[str]]:
    """Every layer's maps of every picture in every state, the largest layers coarser until all fit; and what is not
    stored in full."""
    found: dict[str, dict[PictureState, Maps]] = {}
    for index, picture in enumerate(scene.pictures):
        for state, layers in enumerate(picture.maps):
            for name, maps in layers.items():
                found.setdefault(name, {})[index, state] = maps
    packed = {name: {key: pack_maps(maps) for key, maps in of.items()} for name, of in found.items()}
    sizes = {name: sum(len(one["data"]) for one in of.values()) for name, of in packed.items()}
    ending = "."
    while sizes and sum(sizes.values()) > budget:
        name = max(sizes, key=sizes.__getitem__)
        first = next(iter(found[name].values()))
        queries, blocks = len(first.rows) * len(first.columns), first.stored.shape[-1] * first.stored.shape[-2]
        if max(queries, blocks) <= 4:  # as coarse as it goes
            break
        coarser = Maps.fewer_queries if queries >= blocks else Maps.coarser_keys  # whichever there are more of
        found[name] = {key: coarser(maps) for key, maps in found[name].items()}
        packed[name] = {key: pack_maps(maps) for key, maps in found[name].items()}
        sizes[name] = sum(len(one["data"]) for one in packed[name].values())
        ending = " to keep the page small."
    notes = [_coarseness(name, next(iter(of.values()))) for name, of in found.items()]
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


def _plain(value: Any) -> Any:
    """A field of a layer as what JSON knows; a range as [start, step, length]."""
    if isinstance(value, np.ndarray):
        return np.round(value.astype(float), 7).tolist()
    if isinstance(value, range):
        return [value.start, value.step, len(value)]
    return [_plain(one) for one in value] if isinstance(value, tuple) else value
