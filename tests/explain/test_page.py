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

PAGE = Path(recast.lab.explain.__file__).parent / "assets"


def some_maps(side: int = 6, heads: int = 9, seed: int = 0) -> Maps:
    values = np.random.default_rng(seed).dirichlet(np.ones(side * side), (heads, side, side))
    every = tuple(range(side))
    return Maps.of(values.reshape(heads, side, side, side, side).astype(np.float32), every, every)


def a_layer(name: str = "layer4", side: int = 6) -> Layer:
    ones = np.ones(9, dtype=np.float32)
    axis = range(1, side + 1)
    return Layer(
        name, "gpsa", "3×3 pad 1, linear gate", (3, 3), tuple((a, c) for a in (-1, 0, 1) for c in (-1, 0, 1)),
        (side + 2, side + 2), (axis, axis), (axis, axis), gates=(("γ", 0.1 * ones),), shift=0.9 * ones,
        gaussian=0 * ones, content=0.1 * ones, center=np.zeros((9, 2), dtype=np.float32), alpha=ones,
    )  # fmt: skip


def a_scene(pictures: int = 1, side: int = 6, **fields: Any) -> Scene:
    pixels = np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    shown = tuple(
        Picture(
            f"cat {i}.jpg", pixels, "cat", (),
            {"parent": (Prediction("dog", 0.5, 0),), "recast": (Prediction("cat", 0.75, 1),)},
            {"layer4": some_maps(side, seed=100 * i)},
        )
        for i in range(pictures)
    )  # fmt: skip
    return Scene(
        **{
            "title": "net on pets",
            "arms": {"parent": "Parent", "recast": "Recast"},
            "layers": (a_layer(side=side),),
            "pictures": shown,
            **fields,
        }
    )


def test_maps_of_classes_are_open_first(tmp_path: Path) -> None:
    kinds = dict(zip("abcd", ("gpsa", "classes", "classes", "maps"), strict=True))
    layers = tuple(replace(a_layer(name), kind=kind) for name, kind in kinds.items())
    scene = replace(a_scene(), layers=layers)
    assert (scene.first_layer(), scene.first_layer("a"), a_scene().first_layer()) == ("c", "a", "layer4")
    assert replace(a_scene(), layers=()).first_layer() is None
    cam = replace(a_layer(GRAD_CAM), kind="classes")  # where there is nothing else
    for layers in ((cam,), (a_layer("d"), cam)):
        assert replace(a_scene(), layers=layers).first_layer() == layers[0].name
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


def addresses(text: str) -> set[str]:
    """What a page would load, but for pictures in it."""
    found = re.findall(r'\s(?:src|href|srcset|action)="([^"]*)"', text)
    return {address for address in found if not address.startswith("data:image")}


def test_a_page_is_whole_and_fetches_nothing(tmp_path: Path) -> None:
    path = write_scene(a_scene(2), tmp_path / "page.html")
    text = path.read_text(encoding="utf-8")
    assert addresses(text) == {"data:,"}
    assert "url(" not in text
    assert not re.search(r"https?://|\bfetch\(|XMLHttpRequest|import\(", text)
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    assert LIMIT + sum(path.stat().st_size for path in PAGE.iterdir()) < 8_000_000  # as documented


def test_what_names_say_is_never_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>$style&amp;"
    scene = a_scene(title=evil, notes=(evil,), about=(("Run", evil),))
    picture = replace(scene.pictures[0], name=evil, label=evil, predictions={"recast": (Prediction(evil, 0.5, 0),)})
    path = write_scene(replace(scene, pictures=(picture,)), tmp_path / "page.html")
    text = path.read_text(encoding="utf-8")
    assert text.count("<script") == 2
    data = data_of(path)
    assert data["title"] == data["notes"][0] == data["pictures"][0]["name"] == evil
    assert data["pictures"][0]["predictions"]["recast"][0][0] == evil


def test_nowhere_to_write(tmp_path: Path) -> None:
    for out, message in (
        (tmp_path, "got the folder"),
        (tmp_path / "no" / "page.html", "does not exist"),
        (tmp_path / "page.pdf", r"page\.pdf: use the ending \.html"),
        (tmp_path / "page.JPG", r"page\.JPG: use the ending \.html"),
    ):
        with pytest.raises(RecastError, match=message):
            write_scene(a_scene(), out)
    page = tmp_path / "page.html"
    page.write_text("mine", encoding="utf-8")
    with pytest.raises(RecastError, match="was not written by this command"):
        write_scene(a_scene(), page)
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
