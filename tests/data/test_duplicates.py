import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from recast.lab.config import DataConfig
from recast.lab.data import Data, duplicates, load_data
from recast.lab.data.datasets import ImageTensors
from recast.lab.data.duplicates import find_duplicates, report_duplicates
from recast.lab.data.fingerprint import fingerprint_of
from recast.lab.folder.tables import read_table


def photo(seed: int) -> Image.Image:
    rng = np.random.default_rng(seed)
    smooth = np.array(Image.fromarray(rng.integers(0, 256, (6, 6, 3), np.uint8)).resize((160, 120), Image.BICUBIC))
    noise = rng.integers(-20, 20, smooth.shape)
    return Image.fromarray((smooth.astype(int) + noise).clip(0, 255).astype(np.uint8))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve training images and four others, two of which are copies of training images, in the validation part."""
    for number in range(16):
        path = tmp_path / ("train", "val")[number >= 12] / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        photo(number).save(path, quality=92)
    shutil.copy(tmp_path / "train/a/2.jpg", tmp_path / "val/a/copy.jpg")
    with Image.open(tmp_path / "train/b/5.jpg") as image:
        image.resize((120, 90)).save(tmp_path / "val/b/saved_anew.png")
    return tmp_path


def names(data: Data) -> dict[str, str]:
    pairs, _ = find_duplicates(data.train, data.val)
    return {Path(data.val.image_name(a)).stem: Path(data.train.image_name(b)).stem for a, b in pairs.items()}


def test_copies_and_pictures_saved_anew_are_found(folder: Path) -> None:
    with Image.open(folder / "train/a/6.jpg") as image:
        image.convert("L").save(folder / "val/a/grey.webp", quality=90)
    data = load_data(DataConfig("folder", str(folder)))
    assert names(data) == {"copy": "2", "grey": "6", "saved_anew": "5"}
    line = report_duplicates(data, folder / "duplicates.csv")
    assert "3 of 7" in line
    assert "42.9 %" in line
    rows = [[Path(cell).stem for cell in row] for row in read_table(folder / "duplicates.csv").rows]
    assert rows == [["copy", "2"], ["grey", "6"], ["saved_anew", "5"]]


def test_an_unreadable_or_missing_image_has_no_duplicate(folder: Path) -> None:
    data = load_data(DataConfig("folder", str(folder)))
    (folder / "val/b/saved_anew.png").write_bytes(b"broken")
    (folder / "train/a/2.jpg").unlink()
    for path in ("train/a/0.jpg", "val/a/12.jpg"):
        (folder / path).write_bytes(b"<html>404</html>")
    for path in ("train/a/4.jpg", "val/a/14.jpg"):
        (folder / path).unlink()
        os.mkfifo(folder / path)  # whose bytes never come
    assert fingerprint_of(data)["val"]["number"] == 6
    assert names(data) == {}
    assert report_duplicates(data, folder / "duplicates.csv") == ""


def test_what_is_too_much_is_not_compared_and_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = load_data(DataConfig("folder", str(folder)))
    monkeypatch.setattr(duplicates, "MOST_PICTURES", 17)
    assert names(data) == {"copy": "2"}
    assert find_duplicates(data.train, data.val)[1] in report_duplicates(data, folder / "duplicates.csv")
    monkeypatch.setattr(duplicates, "MOST_FILES", 17)
    assert names(data) == {}
    assert report_duplicates(data, folder / "duplicates.csv").startswith("duplicates: none found; 18 images")


def test_images_in_memory_and_flat_ones() -> None:
    pixels = torch.randint(256, (6, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    pixels[3:5] = 7  # pictures without content are not one picture
    train, val = (
        ImageTensors(part, torch.zeros(len(part), dtype=torch.long)) for part in (pixels[:4], pixels[[4, 5, 1]])
    )
    assert find_duplicates(train, val)[0] == {2: 1}
    digits = load_data(DataConfig())
    assert find_duplicates(digits.train, digits.val) == ({}, "")
