"""The contact sheet: the maps are those of the layers, where they should be."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

from recast.errors import RecastError
from recast.lab.explain.scene import Layer, Maps, Picture, Prediction, Scene, ViewState
from recast.lab.explain.sheet import draw_sheet
from recast.lab.explain.write import write_scene

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
            values.reshape(3, 1, 1, 4, 8), (0,), (0,), names=("cat 61 %", "$dog_$ 20 %", "cow"), signed=signed
        ),
        "last": Maps.of(heads, *every),
    }
    pixels = np.full((40, 80, 3), 230, dtype=np.uint8)
    said: dict[str, Any] = {"recast": (Prediction("cat", 0.61, 0), Prediction("dog", 0.2, 1))}
    shown = tuple(Picture(f"{i}.png", pixels, "cat", (), [said], [stored]) for i in range(pictures))
    return Scene("net", {"recast": "Network"}, (ViewState(None, (pool, last)),), shown, layer_order=("pool", "last"))


def hottest(axes: Axes) -> tuple[int, int]:
    """Row and column of the 4×8 grid where yellow (red + green − blue) is strongest."""
    pixels = np.asarray(axes.images[0].get_array(), dtype=int)
    yellow = pixels[..., 0] + pixels[..., 1] - pixels[..., 2]
    row, column = np.unravel_index(yellow.argmax(), yellow.shape)
    return int(row) * 4 // pixels.shape[0], int(column) * 8 // pixels.shape[1]


def test_a_row_is_the_image_and_its_maps(tmp_path: Path) -> None:
    image, first, second, even = draw_sheet(a_scene()).axes
    assert np.unique(image.images[0].get_array()).tolist() == [230]  # as the network saw it
    assert (hottest(first), hottest(second)) == ((0, 7), (3, 0))
    assert [axes.texts[0].get_text().split("\n")[0] for axes in (image, first, second, even)] == [
        "0.png", "cat 61 %", r"\$dog_\$ 20 %", "cow",
    ]  # fmt: skip
    for axes, cold in ((first, (0, 0)), (second, (-1, -1))):  # the image shows where there is little weight
        assert np.abs(np.asarray(axes.images[0].get_array())[cold].astype(int) - 230).max() <= 2
    assert len(np.unique(np.asarray(even.images[0].get_array()).reshape(-1, 3), axis=0)) == 1
    assert write_scene(a_scene(), tmp_path / "map.PNG") == tmp_path / "map.PNG"
    assert [path.name for path in tmp_path.iterdir()] == ["map.PNG"]


def test_a_layer_with_queries_shows_the_middle_one() -> None:
    _, tile = draw_sheet(a_scene(2), "last").axes[:2]
    assert hottest(tile) == (2, 4)
    (frame,) = tile.patches
    height, width = np.asarray(tile.images[0].get_array()).shape[:2]
    assert frame.get_bbox().bounds == (width / 2, height / 2, width / 8, height / 4)  # type: ignore[attr-defined]
    assert len(draw_sheet(a_scene(2), "last").axes) == 4


def test_what_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "map.png"
    empty = replace(a_scene(), states=(ViewState(None, ()),), layer_order=())
    with pytest.raises(RecastError, match=r"net has no maps to draw: write an \.html page"):
        write_scene(empty, target)
    with pytest.raises(RecastError, match=r"no layer 'lsat' has maps. Did you mean last\?"):
        write_scene(a_scene(), target, layer="lsat")
    monkeypatch.setattr("recast.lab.explain.write.find_spec", lambda name: None)
    with pytest.raises(RecastError, match="needs matplotlib: pip install matplotlib"):
        write_scene(a_scene(), target)
    assert list(tmp_path.iterdir()) == []
