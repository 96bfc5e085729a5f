"""From arrays to HTML: no model, no browser."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_pages import data_of

import recast.lab.explain
from recast.errors import RecastError
from recast.lab.explain.scene import GRAD_CAM, Layer, Maps, Picture, Prediction, Scene
from recast.lab.explain.write import LIMIT, pack, write_scene

ASSETS = Path(recast.lab.explain.__file__).parent / "assets"


def a_layer(name: str = "layer4", kind: str = "gpsa", side: int = 6) -> Layer:
    grid = range(side), range(side)
    return Layer(name, kind, "3×3 pad 1", (3, 3), (), (side + 2, side + 2), grid, grid)


def a_scene(count: int = 1, side: int = 6, **fields: Any) -> Scene:
    random, stored = np.random.default_rng(0), tuple(range(side))
    pixels = random.integers(0, 255, (8, 8, 3), dtype=np.uint8)
    predictions = {"parent": (Prediction("dog", 0.5, 0),), "recast": (Prediction("cat", 0.75, 1),)}
    shown = []
    for number in range(count):
        values = random.dirichlet(np.ones(side * side), (9, side, side)).reshape(9, side, side, side, side)
        maps = Maps.of(values.astype(np.float32), stored, stored)
        shown.append(Picture(f"cat {number}.jpg", pixels, "cat", (), predictions, {"layer4": maps}))
    arms = {"parent": "Parent", "recast": "Recast"}
    return replace(Scene("net on pets", arms, (a_layer(side=side),), tuple(shown)), **fields)


def test_maps_of_classes_are_open_first(tmp_path: Path) -> None:
    kinds = zip("abcd", ("gpsa", "classes", "classes", "maps"), strict=True)
    scene = a_scene(layers=tuple(a_layer(name, kind) for name, kind in kinds))
    assert (scene.first_layer(), scene.first_layer("a"), a_scene().first_layer()) == ("c", "a", "layer4")
    cam = a_layer(GRAD_CAM, "classes")  # where there is nothing else
    for layers, first in (((), None), ((cam,), GRAD_CAM), ((a_layer("d"), cam), "d")):
        assert a_scene(layers=layers).first_layer() == first
    with pytest.raises(RecastError, match=r"'layer5' .*Did you mean layer4"):
        write_scene(a_scene(), tmp_path / "page.html", layer="layer5")
    assert list(tmp_path.iterdir()) == []


def test_a_page_too_large_gets_coarser_maps_and_says_so() -> None:
    def maps(limit: int) -> tuple[dict[str, Any], list[str]]:
        packed = pack(a_scene(side=8), limit=limit)
        return packed["pictures"][0]["maps"]["layer4"], packed["notes"]

    full, notes = maps(LIMIT)
    assert notes == []
    half, notes = maps(len(full["data"]) // 2)
    assert len(half["data"]) < len(full["data"]) / 2
    coarse = "layer4: maps are stored for every second query in each direction (others show the nearest)"
    assert notes == [f"{coarse} to keep the page small."]
    assert maps(0)[0]["blocks"] == (2, 2)  # as coarse as it goes, never for ever


def test_a_page_is_whole_and_fetches_nothing(tmp_path: Path) -> None:
    path = write_scene(a_scene(2), tmp_path / "page.html")
    text = path.read_text(encoding="utf-8")
    addresses = set(re.findall(r'\s(?:src|href|srcset|action)="([^"]*)"', text))
    assert {address for address in addresses if not address.startswith("data:image")} == {"data:,"}
    assert "url(" not in text
    assert not re.search(r"https?://|\bfetch\(|XMLHttpRequest|import\(", text)
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    assert LIMIT + sum(path.stat().st_size for path in ASSETS.iterdir()) < 8_000_000  # as documented


def test_what_names_say_is_never_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>$style&amp;"
    predictions = {"recast": (Prediction(evil, 0.5, 0),)}
    picture = replace(a_scene().pictures[0], name=evil, label=evil, predictions=predictions)
    scene = a_scene(title=evil, notes=(evil,), about=(("Run", evil),), pictures=(picture,))
    path = write_scene(scene, tmp_path / "page.html")
    assert path.read_text(encoding="utf-8").count("<script") == 2
    data = data_of(path)
    assert data["title"] == data["notes"][0] == data["pictures"][0]["name"] == evil
    assert data["pictures"][0]["predictions"]["recast"][0][0] == evil


def test_nowhere_to_write(tmp_path: Path) -> None:
    (tmp_path / "mine.html").write_text("mine", encoding="utf-8")
    for out, message in (
        (tmp_path / "mine.html", "was not written by this command"),
        (tmp_path, "got the folder"),
        (tmp_path / "no" / "page.html", "does not exist"),
        (tmp_path / "page.pdf", r"page\.pdf: use the ending \.html"),
        (tmp_path / "page.JPG", r"page\.JPG: use the ending \.html"),
    ):
        with pytest.raises(RecastError, match=message):
            write_scene(a_scene(), out)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.html"]
