"""Data that changed between the start of a run and its resumption."""

import itertools
import json
import shutil
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from recast.errors import RecastError
from recast.lab.config import DataConfig
from recast.lab.data import Data, load_data
from recast.lab.data.fingerprint import FINGERPRINT, check_classes, check_same, fingerprint_of

Change = Callable[[Path], object]


def picture(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes, six images for training and two for validation in each."""
    for c, name in enumerate(("cat", "dog")):
        for part, count in (("train", 6), ("val", 2)):
            for k in range(count):
                picture(tmp_path / "data" / part / name / f"{k}.png", 1000 * c + 100 * count + k)
    return tmp_path / "data"


def began(run: Path, data: Data) -> None:
    run.mkdir()
    (run / FINGERPRINT).write_text(json.dumps(fingerprint_of(data)), encoding="utf-8")
    (run / "classes.json").write_text(json.dumps(data.classes), encoding="utf-8")


def swap(folder: Path) -> None:
    for part in ("train", "val"):
        (folder / part / "cat").rename(folder / part / "x")
        (folder / part / "dog").rename(folder / part / "cat")
        (folder / part / "x").rename(folder / part / "dog")


def all_parts(change: Change) -> Change:
    return lambda folder: [change(folder / part) for part in ("train", "val")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap, "labels of the training images, .*labels of the validation images"),
        (all_parts(lambda part: (part / "cat").rename(part / "zebra")), "class 0 was 'cat'"),
        (all_parts(lambda part: shutil.copytree(part / "cat", part / "ant")), "2 classes"),
        (lambda folder: picture(folder / "train" / "cat" / "9.png", 5), "number of the training images"),
        (lambda folder: (folder / "val" / "cat" / "0.png").unlink(), "number of the validation images"),
        (lambda folder: (folder / "train/cat/0.png").rename(folder / "train/dog/new.png"), "labels of the training"),
    ],
)
def test_a_training_does_not_go_on_where_labels_moved(
    folder: Path, tmp_path: Path, change: Change, message: str
) -> None:
    config = DataConfig("folder", data_dir=str(folder), img_size=8)
    began(tmp_path / "run", load_data(config))
    change(folder)
    data = load_data(config)
    check = check_classes if "class" in message else partial(check_same, goes_on=True)
    with pytest.raises(RecastError, match=message):
        check(tmp_path / "run", data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: picture(folder / "train" / "cat" / "0.png", 5), "contents of the training"),
        (lambda folder: picture(folder / "val" / "cat" / "0.png", 5), "contents of the validation"),
    ],
)
def test_other_images_are_said(folder: Path, tmp_path: Path, change: Change, message: str) -> None:
    config = DataConfig("folder", data_dir=str(folder), img_size=8)
    began(tmp_path / "run", load_data(config))
    change(folder)
    with pytest.warns(UserWarning, match=message):
        check_same(tmp_path / "run", load_data(config), goes_on=True)
    if "validation" in message:
        with pytest.warns(UserWarning, match=message):
            check_same(tmp_path / "run", load_data(config), goes_on=False)


def test_the_same_data_elsewhere_are_the_same(folder: Path, tmp_path: Path) -> None:
    began(tmp_path / "run", load_data(DataConfig("folder", data_dir=str(folder), img_size=8)))
    shutil.copytree(folder, tmp_path / "other" / "place")
    check_same(tmp_path / "run", load_data(DataConfig("folder", data_dir=str(tmp_path / "other/place"))), goes_on=True)
    (tmp_path / "run" / FINGERPRINT).write_text('{"train": {}, "val": 3}', encoding="utf-8")
    with pytest.raises(RecastError, match="damaged"):
        check_same(tmp_path / "run", load_data(DataConfig("folder", data_dir=str(folder))), goes_on=True)


def test_zips_lists_and_masks(folder: Path, tmp_path: Path) -> None:
    def zipped(top: Path) -> str:
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
            for path in sorted(top.rglob("*.png")):
                file.write(path, path.relative_to(top))
        return str(tmp_path / "a.zip")

    archive = DataConfig("zip", data_dir=zipped(folder), img_size=8)
    began(tmp_path / "zip", load_data(archive))
    picture(folder / "train" / "cat" / "0.png", 7)
    zipped(folder)
    with pytest.warns(UserWarning, match="contents of the training images"):
        check_same(tmp_path / "zip", load_data(archive), goes_on=True)
    swap(folder)
    zipped(folder)
    with pytest.raises(RecastError, match="labels of"):
        check_same(tmp_path / "zip", load_data(archive), goes_on=True)
    rows = ["file,class_index", *(f"train/cat/{k}.png,{k % 2}" for k in range(6))]
    (folder / "index.csv").write_text("\n".join(rows), encoding="utf-8")
    listed = DataConfig("folder", data_dir=str(folder), img_size=8)
    began(tmp_path / "csv", load_data(listed))
    (folder / "index.csv").write_text("\n".join([*rows[:-1], "train/cat/5.png,0"]), encoding="utf-8")
    with pytest.raises(RecastError, match="labels of the validation"):
        check_same(tmp_path / "csv", load_data(listed), goes_on=True)
    top = tmp_path / "pairs"
    for part, k in itertools.product(("train", "val"), range(3)):
        picture(top / part / "images" / f"{k}.jpg", k)
        (top / part / "masks").mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), k % 2, np.uint8)).save(top / part / "masks" / f"{k}.png")
    masks = DataConfig("masks", data_dir=str(top), img_size=8)
    began(tmp_path / "masks run", load_data(masks))
    Image.fromarray(np.full((8, 8), 1, np.uint8)).save(top / "train" / "masks" / "0.png")
    with pytest.raises(RecastError, match="labels of the training"):
        check_same(tmp_path / "masks run", load_data(masks), goes_on=True)


@pytest.mark.parametrize("name", ["digits", "odd_digit"])
def test_drawn_data_are_always_the_same(name: str) -> None:
    config = DataConfig(name)
    assert json.loads(json.dumps(fingerprint_of(load_data(config)))) == fingerprint_of(load_data(config))
