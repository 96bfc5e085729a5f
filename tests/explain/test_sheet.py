"""The contact sheet: its pixels are where they should be, and the maps are those of the layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from recast.errors import RecastError
from recast.lab.explain.scene import Layer, Maps, Picture, Prediction, Scene, State
from recast.lab.explain.sheet import GAP, MARGIN, SIDE, write_sheet
from recast.lab.explain.write import write_pages

GRID, ONE = (range(4), range(8)), (range(1), range(1))


def spot(row: int, column: int) -> np.ndarray:
    values = np.full((4, 8), 0.01, dtype=np.float32)
    values[row, column] = 0.69
    return values


def a_scene(pictures: int = 1, signed: bool = False) -> Scene:
    """Light grey images of 40×80 pixels; two classes whose maps have one hot spot each, and a third that is even."""
    values = np.stack([spot(0, 7), spot(3, 0), np.full((4, 8), 1 / 32, dtype=np.float32)])
    if signed:
        values[:2] -= 2 * spot(1, 2)
    heads = np.stack([spot(i, j) for i in range(4) for j in range(8)]).reshape(1, 4, 8, 4, 8)
    every = tuple(range(4)), tuple(range(8))
    pool = Layer("pool", "classes", "attention pooling", (1, 1), (), (4, 8), GRID, ONE, names=("1.", "2.", "3."))
    last = Layer("last", "maps", "one head", (1, 1), (), (4, 8), GRID, GRID, names=("head 1",))
    stored = {
        "pool": Maps.of(
            values.reshape(3, 1, 1, 4, 8), (0,), (0,), names=("cat 61 %", "$dog_$ 20 %", "牛"), signed=signed
        ),
        "last": Maps.of(heads, *every),
    }
    pixels = np.full((40, 80, 3), 230, dtype=np.uint8)
    said: dict[str, Any] = {"recast": (Prediction("cat", 0.61, 0), Prediction("dog", 0.2, 1))}
    shown = tuple(Picture(f"{i}.png", pixels, "cat", (), [said], [stored]) for i in range(pictures))
    return Scene("net", {"recast": "Network"}, (State(None, (pool, last)),), shown, layer_order=("pool", "last"))


def read(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def tiles(path: Path, columns: int) -> list[np.ndarray]:
    """The pictures of the first row, cut out of the sheet: found by its first picture's top left corner."""
    sheet = read(path)
    (top,) = np.flatnonzero((sheet[:, MARGIN] == 230).all(-1))[:1]
    lefts = [MARGIN + column * (SIDE + GAP) for column in range(columns)]
    return [sheet[top : top + SIDE // 2, left : left + SIDE] for left in lefts]


def hottest(tile: np.ndarray) -> tuple[int, int]:
    """Row and column of the 4×8 grid where yellow (red + green − blue) is strongest."""
    yellow = tile[..., 0].astype(int) + tile[..., 1] - tile[..., 2]
    row, column = np.unravel_index(yellow.argmax(), yellow.shape)
    return int(row) * 4 // tile.shape[0], int(column) * 8 // tile.shape[1]


def test_a_row_is_the_image_and_its_maps(tmp_path: Path) -> None:
    scene = a_scene()
    assert write_pages(scene, tmp_path / "map.PNG") == [tmp_path / "map.PNG"]
    image, first, second, even = tiles(tmp_path / "map.PNG", 4)
    assert read(tmp_path / "map.PNG").shape[1] == 2 * MARGIN + 4 * SIDE + 3 * GAP
    assert np.unique(image).tolist() == [230]  # as the network saw it
    assert (hottest(first), hottest(second)) == ((0, 7), (3, 0))
    for tile, cold in ((first, (0, 0)), (second, (3, 7))):  # the image shows where there is little weight
        assert np.abs(tile[SIDE // 8 * cold[0], SIDE // 8 * cold[1]].astype(int) - 230).max() <= 2
    assert len(np.unique(even.reshape(-1, 3), axis=0)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["map.PNG"]


def test_a_layer_with_queries_shows_the_middle_one(tmp_path: Path) -> None:
    write_sheet(a_scene(), tmp_path / "map.png", "last")
    _, tile = tiles(tmp_path / "map.png", 2)
    assert hottest(tile) == (2, 4)
    cell = SIDE // 8
    assert [tile[2 * cell + i, 4 * cell + 5].tolist() for i in (0, 1)] == [[255] * 3, [0] * 3]  # its frame
    without = replace(a_scene(), states=(State(None, a_scene().states[0].layers[1:]),), layer_order=("last",))
    write_sheet(without, tmp_path / "other.png")
    assert np.array_equal(tiles(tmp_path / "other.png", 2)[1], tile)


def test_what_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "map.png"
    empty = replace(a_scene(), states=(State(None, ()),), layer_order=())
    with pytest.raises(RecastError, match=r"net has no maps to draw: write an \.html page"):
        write_pages(empty, target)
    with pytest.raises(RecastError, match=r"no layer 'lsat' has maps. Did you mean last\?"):
        write_pages(a_scene(), target, layer="lsat")
    gone = replace(a_scene(), states=(a_scene().states[0], State(5, a_scene().states[0].layers[:1])))
    with pytest.raises(RecastError, match="last has no maps at the last epoch: choose --layer from pool"):
        write_pages(gone, target, layer="last")
    monkeypatch.setattr("recast.lab.explain.write.find_spec", lambda name: None)
    with pytest.raises(RecastError, match="needs matplotlib: pip install matplotlib"):
        write_pages(a_scene(), target)
    assert list(tmp_path.iterdir()) == []
