import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from recast.errors import RecastError
from recast.lab.config import DataConfig
from recast.lab.data import load_data
from recast.lab.data.fingerprint import fingerprint_of
from recast.lab.folder.run import RunFolder
from recast.lab.open import check_classes, check_same

Change = Callable[[Path], object]
GoesOn = Callable[..., None]


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


def swap(folder: Path) -> None:
    for part in ("train", "val"):
        (folder / part / "cat").rename(folder / part / "x")
        (folder / part / "dog").rename(folder / part / "cat")
        (folder / part / "x").rename(folder / part / "dog")


def all_parts(change: Change) -> Change:
    return lambda folder: [change(folder / part) for part in ("train", "val")]


@pytest.fixture
def goes_on(tmp_path: Path) -> GoesOn:
    """`goes_on(data, change)`: begin a run, change its data, and check what a continuation checks."""

    def check(config: DataConfig, change: Callable[[], object], goes_on: bool = True) -> None:
        run, data = RunFolder(tmp_path / "run"), load_data(config)
        run.path.mkdir(exist_ok=True)
        run.fingerprint.write_text(json.dumps(fingerprint_of(data)), encoding="utf-8")
        run.classes_file.write_text(json.dumps(data.classes), encoding="utf-8")
        change()
        check_classes(run, load_data(config))
        check_same(run, load_data(config), goes_on=goes_on)

    return check


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap, "labels of the training images, .*labels of the validation images"),
        (
            all_parts(lambda part: (part / "cat").rename(part / "zebra")),
            "trained on 2 classes, .* lacks cat and adds zebra",
        ),
        (all_parts(lambda part: shutil.copytree(part / "cat", part / "ant")), "trained on 2 classes, .* adds ant"),
        (lambda folder: picture(folder / "train" / "cat" / "9.png", 5), "number of the training images"),
        (lambda folder: (folder / "val" / "cat" / "0.png").unlink(), "number of the validation images"),
        (lambda folder: (folder / "train/cat/0.png").rename(folder / "train/dog/new.png"), "labels of the training"),
    ],
)
def test_a_training_does_not_go_on_where_labels_moved(
    folder: Path, goes_on: GoesOn, change: Change, message: str
) -> None:
    with pytest.raises(RecastError, match=message):
        goes_on(DataConfig("folder", data_dir=str(folder), img_size=8), lambda: change(folder))


@pytest.mark.parametrize(("part", "is_resumed"), [("train", True), ("val", True), ("val", False)])
def test_other_images_are_reported(folder: Path, goes_on: GoesOn, part: str, is_resumed: bool) -> None:
    config = DataConfig("folder", data_dir=str(folder), img_size=8)
    with pytest.warns(UserWarning, match=f"contents of the {part}"):
        goes_on(config, lambda: picture(folder / part / "cat" / "0.png", 5), is_resumed)


def test_the_same_data_elsewhere_are_the_same(folder: Path, goes_on: GoesOn, tmp_path: Path) -> None:
    config = DataConfig("folder", data_dir=str(tmp_path / "data"), img_size=8)
    moved = DataConfig("folder", data_dir=str(tmp_path / "other" / "place"))
    goes_on(config, lambda: shutil.copytree(folder, tmp_path / "other" / "place"))
    check_same(RunFolder(tmp_path / "run"), load_data(moved), goes_on=True)
    RunFolder(tmp_path / "run").fingerprint.write_text('{"train": {}, "val": 3}', encoding="utf-8")
    with pytest.raises(RecastError, match="damaged"):
        check_same(RunFolder(tmp_path / "run"), load_data(config), goes_on=True)


def test_zips(folder: Path, goes_on: GoesOn, tmp_path: Path) -> None:
    def zip_anew() -> None:
        shutil.make_archive(str(tmp_path / "a"), "zip", folder)

    zip_anew()
    archive = DataConfig("zip", data_dir=str(tmp_path / "a.zip"), img_size=8)
    with pytest.warns(UserWarning, match="contents of the training images"):
        goes_on(archive, lambda: (picture(folder / "train" / "cat" / "0.png", 7), zip_anew()))
    with pytest.raises(RecastError, match="labels of"):
        goes_on(archive, lambda: (swap(folder), zip_anew()))


@pytest.mark.filterwarnings("ignore:.* masks. [0-9]")
def test_masks(goes_on: GoesOn, tmp_path: Path) -> None:
    def draw(path: Path, level: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), level, np.uint8)).save(path)

    pairs = tmp_path / "pairs"
    for part, k in itertools.product(("train", "val"), range(3)):
        picture(pairs / part / "images" / f"{k}.jpg", k)
        draw(pairs / part / "masks" / f"{k}.png", k % 2)
    with pytest.raises(RecastError, match="labels of the training"):
        goes_on(
            DataConfig("masks", data_dir=str(pairs), img_size=8), lambda: draw(pairs / "train" / "masks" / "0.png", 1)
        )


@pytest.mark.parametrize("name", ["digits", "odd_digit"])
def test_drawn_data_are_always_the_same(name: str) -> None:
    first, second = (fingerprint_of(load_data(DataConfig(name))) for _ in range(2))
    assert json.loads(json.dumps(first)) == second


def test_a_share_that_is_held_out_anew_is_reported(folder: Path, goes_on: GoesOn) -> None:
    config = DataConfig("folder", data_dir=str(folder / "train"), img_size=8)
    with pytest.warns(
        UserWarning,
        match="Of the 2 images, a share of the folder that is held out anew, at least 2 are training images of the run",
    ):
        goes_on(config, lambda: picture(folder / "train/cat/9.png", 5), goes_on=False)
