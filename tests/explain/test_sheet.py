"""The contact sheet: its pixels are where they should be, and the maps are those of the layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from recast.errors import RecastError
from recast.lab.explain import sheet
from recast.lab.explain.scene import Layer, Maps, Picture, Prediction, Scene, State
from recast.lab.explain.sheet import GAP, MARGIN, SIDE, lay_over, write_sheet
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


def test_a_map_is_min_max_over_the_grey_image() -> None:
    image = np.zeros((40, 80, 3), dtype=np.uint8)
    image[:, 40:] = 255
    ramp = np.tile(np.linspace(0.2, 0.3, 8, dtype=np.float32), (4, 1))
    laid = lay_over(image, ramp, False).astype(float)
    assert np.abs(laid[:, 0]).max() == 0  # the smallest weight lets all of the image through, which is black here
    assert np.abs(laid[20, -1] - (0.8 * np.array((254, 232, 56)) + 0.2 * 255)).max() <= 2  # the largest a fifth
    white = lay_over(np.full_like(image, 255), ramp, False).astype(float)
    share = np.interp(np.arange(80), [4.5, 74.5], [0, 1])[10:38]  # between, the opacity follows the weight
    assert np.abs((white - laid)[20, 10:38, 0] / 255 - (1 - 0.8 * share)).max() < 0.05
    nearly = ramp * 1e-4 + 1  # what a byte cannot tell is not blown up to a pattern
    assert len(np.unique(lay_over(np.full_like(image, 255), nearly, False).reshape(-1, 3), axis=0)) == 1


def test_weights_of_either_sign_have_white_at_zero(tmp_path: Path) -> None:
    write_sheet(a_scene(signed=True), tmp_path / "map.png")
    first = tiles(tmp_path / "map.png", 2)[1].astype(int)
    cell = SIDE // 8
    purple, orange = (first[cell * row + cell // 2, cell * column + cell // 2] for row, column in ((1, 2), (0, 7)))
    assert purple[2] > purple[0]
    assert orange[0] > orange[2]
    assert np.ptp(first[-1, -cell]) < 12  # near 0: no colour


def test_a_layer_with_queries_shows_the_middle_one(tmp_path: Path) -> None:
    write_sheet(a_scene(), tmp_path / "map.png", "last")
    _, tile = tiles(tmp_path / "map.png", 2)
    assert hottest(tile) == (2, 4)
    cell = SIDE // 8
    assert [tile[2 * cell + i, 4 * cell + 5].tolist() for i in (0, 1)] == [[255] * 3, [0] * 3]  # its frame
    without = replace(a_scene(), states=(State(None, a_scene().states[0].layers[1:]),), layer_order=("last",))
    write_sheet(without, tmp_path / "other.png")
    assert np.array_equal(tiles(tmp_path / "other.png", 2)[1], tile)


def test_many_images_go_on_in_another_sheet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sheet, "ROWS", 2)
    paths = write_sheet(a_scene(3), tmp_path / "map.png")
    assert [path.name for path in paths] == ["map.png", "map-2.png"]
    heights = [len(read(path)) for path in paths]
    assert heights[0] - heights[1] > SIDE // 2


def test_what_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "map.png"
    empty = replace(a_scene(), states=(State(None, ()),), layer_order=())
    with pytest.raises(RecastError, match=r"nothing in net has maps that could be drawn: write an \.html page"):
        write_pages(empty, target)
    with pytest.raises(RecastError, match=r"no layer 'lsat' has maps. Did you mean last\?"):
        write_pages(a_scene(), target, layer="lsat")
    gone = replace(a_scene(), states=(a_scene().states[0], State(5, a_scene().states[0].layers[:1])))
    with pytest.raises(RecastError, match="last has no maps at the last epoch: choose another --layer of pool"):
        write_pages(gone, target, layer="last")
    monkeypatch.setattr("recast.lab.explain.write.find_spec", lambda name: None)
    with pytest.raises(RecastError, match="needs matplotlib: pip install matplotlib"):
        write_pages(a_scene(), target)
    assert list(tmp_path.iterdir()) == []


def test_coarse_maps_are_shared_out_evenly() -> None:
    layer = Layer("last", "maps", "", (1, 1), (), (4, 7), (range(4), range(7)), GRID)
    values = np.random.default_rng(0).random((1, 2, 2, 2, 4)).astype(np.float32)
    maps = Maps.of(values, (1, 3), (0, 6), 2)
    found = layer.weights(maps, 0, (3, 2))
    assert found.shape == (4, 7)
    assert found.sum() == pytest.approx(maps.values[0, 1, 0].sum(), rel=1e-5)
    assert np.allclose(found[:2, 6], maps.values[0, 1, 0, 0, 3] / 2)  # a block of two pixels at the edge
