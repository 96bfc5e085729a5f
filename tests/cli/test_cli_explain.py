from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from recast.cli import main


@pytest.fixture(scope="session")
def kept_run(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that kept its weights before training and after each of two epochs, in both arms."""
    run = tmp_path_factory.mktemp("kept") / "run"
    words = ["train", str(shared / "tiny.yaml"), "--epochs", "2", "--keep-every", "1", "--out", str(run), "--json"]
    assert main(words) == 0
    return run


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two images in folders named as classes."""
    for label, name in (("3", "b.png"), ("7", "a.png")):
        folder = tmp_path / "photos" / label
        folder.mkdir(parents=True)
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30), dtype=np.uint8)).save(folder / name)
    return tmp_path / "photos"


def data_of(path: Path) -> dict[str, Any]:
    found = re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_a_page_of_a_run_over_its_epochs(cli: Callable[..., Any], kept_run: Path, photos: Path, tmp_path: Path) -> None:
    done = cli("explain", kept_run, photos / "3" / "b.png", "--out", tmp_path / "map.html")
    assert (done.code, done.out, done.err) == (0, f"page: {tmp_path / 'map.html'}\n", "")
    data = data_of(tmp_path / "map.html")
    assert [state["epoch"] for state in data["states"]] == [0, 1, 2]
    (picture,) = data["pictures"]
    assert (picture["name"], picture["label"], picture["size"]) == ("b.png", "3", [16, 16])
    assert [list(found) for found in picture["predictions"]] == [["parent", "finetuned", "recast"]] * 3
    before, *_, after = picture["predictions"]
    # before training all arms are one network; the parent stays it, the fine-tuned arm is shown at the same epoch
    assert before["parent"] == before["finetuned"] == before["recast"] == after["parent"]
    assert after["finetuned"] != before["finetuned"]
    assert after["recast"] != before["recast"]
    for name in data["order"]:
        gates = [dict(map(tuple, state["layers"][name]["gates"]))["γ"] for state in data["states"]]
        assert not any(gates[0])
        assert any(gates[2])


def test_folders_validation_images_and_json(cli: Callable[..., Any], shared: Path, photos: Path) -> None:
    run = shared / "run"
    found = json.loads(cli("explain", run, photos, "val:1", "--json").out)
    assert found["pages"] == [str(run / "explain" / "images.html")]
    assert [(one["name"], one["label"]) for one in found["images"]][:2] == [("b.png", "3"), ("a.png", "7")]
    assert found["epochs"] == []
    assert list(found["images"][0]["predictions"]) == ["parent", "finetuned", "recast"]
    assert sum(one["probability"] for one in found["images"][0]["predictions"]["recast"]) <= 1.0001
    assert [state["epoch"] for state in data_of(run / "explain" / "images.html")["states"]] == [None]
    assert cli("explain", run, photos).out == f"page: {run / 'explain' / 'photos.html'}\n"
    only = json.loads(cli("explain", run, photos, "--num-images", "1", "--json").out)
    assert [one["name"] for one in only["images"]] == ["b.png"]
    assert "1 of 2 images" in " ".join(only["notes"])
    without = json.loads(cli("explain", run, "--json").out)
    assert [one["name"][:4] for one in without["images"]] == ["val:"] * 4
    assert len({one["label"] for one in without["images"]}) == 4


def test_another_size(cli: Callable[..., Any], shared: Path, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "wide.html"
    assert cli("explain", shared / "run", photos / "3" / "b.png", "--img-size", "16x24", "--out", out).code == 0
    data = data_of(out)
    assert data["pictures"][0]["size"] == [16, 24]
    layer = data["states"][0]["layers"][data["order"][-1]]
    assert (layer["keys"][0][2], layer["keys"][1][2]) == (4, 6)


def test_a_run_that_recast_nothing(cli: Callable[..., Any], shared: Path, tmp_path: Path, photos: Path) -> None:
    run = tmp_path / "plain"
    assert cli("train", shared / "tiny.yaml", "--where", "none", "--keep-every", "1", "--out", run, "--json").code == 0
    assert cli("explain", run, photos / "3" / "b.png", "--out", tmp_path / "page.html").code == 0
    data = data_of(tmp_path / "page.html")
    assert data["order"] == []
    assert [list(found) for found in data["pictures"][0]["predictions"]] == [["recast"]] * 2


def test_mistakes_are_one_line_and_write_nothing(
    refused: Callable[..., str], shared: Path, photos: Path, tmp_path: Path
) -> None:
    run, image = shared / "run", photos / "3" / "b.png"
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff nothing")
    (tmp_path / "empty").mkdir()
    out = tmp_path / "page.html"
    for words, message in (
        ([tmp_path, image], "is no run folder"),
        ([run, tmp_path / "gone.png"], "no such image or folder"),
        ([run, tmp_path / "empty"], "no images in folder"),
        ([run, tmp_path / "broken.jpg"], "cannot read image"),
        ([run, "val:99"], "it has 20, counted from 0"),
        ([run, image, "--num-images", "0"], "--num-images must be at least 1"),
        ([run, image, "--img-size", "big"], "--img-size takes pixels"),
        ([run, image, "--imgsize", "3"], "img-size"),
        ([run, image, "--out", tmp_path / "no" / "page.html"], "does not exist"),
        ([run, image, "--out", tmp_path / "page.txt"], "ending .html"),
    ):
        extra = [] if "--out" in words else ["--out", out]
        assert message in refused("explain", *words, *extra)
    assert not out.exists()
