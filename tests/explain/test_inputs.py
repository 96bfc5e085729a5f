from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from recast.errors import RecastError
from recast.lab.config import Augmentation
from recast.lab.data import Data
from recast.lab.data.datasets import ImageTensors
from recast.lab.data.images import open_image, resize_and_crop, to_pixels
from recast.lab.explain.inputs import Input, find_inputs, read_image, read_inputs
from recast.papers.dense.detect.coco import Annotations
from recast.papers.dense.detect.objects import ObjectImages
from recast.papers.dense.segment.pairs import ImagePairs

SIZE = (16, 16)


def photo(height: int = 40, width: int = 40) -> Image.Image:
    """Brighter to the right in red, to the bottom in green."""
    rows, columns = np.mgrid[0:height, 0:width]
    red, green = 255 * columns / max(1, width - 1), 255 * rows / max(1, height - 1)
    return Image.fromarray(np.stack([red, green, np.zeros_like(red)], -1).astype(np.uint8))


def save(image: Image.Image, path: Path, **options: Any) -> Path:
    image.save(path, **options)
    return path


KINDS = {  # the modes that validation knows too are in tests/data
    "grey and alpha.png": photo().convert("LA"),
    "16 bit.png": Image.fromarray(np.asarray(photo().convert("L")).astype(np.uint16) * 257),
    "palette with transparency.png": photo().convert("P"),
    "palette.gif": photo().convert("P"),
    "CMYK.jpg": photo().convert("CMYK"),
    "one pixel.png": photo(1, 1),
    "a line.webp": photo(2, 9000),
    "a column.png": photo(9000, 1),
}
KINDS["palette with transparency.png"].info["transparency"] = 0


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("size", [SIZE, (12, 20)])
def test_every_kind_of_image_is_read(name: str, size: tuple[int, int], tmp_path: Path) -> None:
    pixels = read_image(save(KINDS[name], tmp_path / name), size).pixels
    assert (pixels.shape, pixels.dtype) == ((3, *size), torch.float32)
    assert 0 <= pixels.min() <= pixels.max() <= 1
    if min(KINDS[name].size) == 40:  # brighter towards the bottom right, whatever the mode
        assert pixels[..., -3:, -3:].mean() > pixels[..., :3, :3].mean() + 0.2


def test_a_photo_is_turned_upright_and_the_page_says_so(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[274] = 6  # the camera was turned: shown after a quarter turn clockwise
    path = save(photo().transpose(Image.Transpose.ROTATE_90), tmp_path / "turned.png", exif=exif)
    turned, plain = read_image(path, SIZE), read_image(save(photo(), tmp_path / "plain.png"), SIZE)
    assert torch.allclose(turned.pixels, plain.pixels, atol=1 / 255)
    assert "EXIF" in turned.notes[0]
    assert not any("EXIF" in note for note in plain.notes)
    assert not torch.allclose(turned.pixels, to_pixels(resize_and_crop(open_image(path), 16)), atol=0.1)


def test_the_page_says_which_bits_the_network_sees(tmp_path: Path) -> None:
    Image.fromarray(np.full((16, 16), 40000, np.uint16)).save(tmp_path / "deep.png")
    assert "16-bit" in read_image(tmp_path / "deep.png", SIZE).notes[0]
    assert not read_image(save(photo(16, 16), tmp_path / "a.png"), SIZE).notes


def test_what_cannot_be_read_is_one_line_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.png").touch()
    big = save(photo(60, 60), tmp_path / "big.png")
    for name, message in (("empty.png", r"cannot read .*empty\.png: it is empty"), ("none.png", "no such image")):
        with pytest.raises(RecastError, match=message):
            read_image(tmp_path / name, SIZE)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(RecastError, match=r"big\.png.*exceeds limit"):
        read_image(big, SIZE)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)  # between once and twice the limit: read, without a warning
    read_image(big, SIZE)


def test_folders_and_labels(tmp_path: Path) -> None:
    for name in ("val/cat/b.png", "val/dog/a.jpg", "val/dog/.hidden.png", "val/readme.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        photo().save(tmp_path / name) if name.endswith(("png", "jpg")) else (tmp_path / name).touch()
    paths: list[Any] = find_inputs([tmp_path / "val"])
    assert paths == [tmp_path / "val/cat/b.png", tmp_path / "val/dog/a.jpg"]
    assert [read_image(path, SIZE, {"dog": "hound"}).label for path in paths] == [None, "hound"]


def test_files_that_are_no_images_are_left_out_by_name(tmp_path: Path) -> None:
    for name in ("a.png", "c.png", "e.png"):
        save(photo(), tmp_path / name)
    bad = [tmp_path / f"b{i}.png" for i in range(3)]
    for path in bad:
        path.write_text("no image", encoding="utf-8")
    for most, shown in ((16, "ace"), (2, "ac")):  # a broken one does not take the place of another
        images, notes = read([tmp_path], most=most)
        assert [image.name for image in images] == [f"{letter}.png" for letter in shown]
        assert "b0.png" in notes[0]
    assert "2 of 3 images are shown" in notes[1]
    for words, message in (
        (bad, r"none of 3 files .*b0\.png"),
        (bad[:1], "cannot read image"),  # alone it is told as it is
        ([tmp_path / "a.png", "val:9"], "val:9"),  # a mistyped number is no bad file
    ):
        with pytest.raises(RecastError, match=message):
            read(words)


def read(words: Any, most: int = 16, size: tuple[int, int] = SIZE) -> tuple[list[Input], list[str]]:
    return read_inputs(find_inputs(words), size, most, data=small_data())


def small_data() -> Data:
    labels = torch.tensor([2, 2, 0, 1])
    pixels = torch.randint(0, 255, (4, 3, 16, 16), dtype=torch.uint8)
    images = ImageTensors(pixels, labels)
    return Data("three", images, images, ["a", "b", "c"], (0.5,) * 3, (0.5,) * 3, 16)


def test_validation_images_by_number_and_by_class(tmp_path: Path) -> None:
    data = small_data()
    images, _ = read_inputs([], SIZE, 16, data=data)
    assert [(image.name, image.label) for image in images] == [("val:0", "c"), ("val:2", "a"), ("val:3", "b")]
    assert torch.equal(images[2].pixels, data.val.batch([3])[0][0])
    save(photo(), tmp_path / "a.png")
    save(photo(), tmp_path / "b.png")
    words = ["val:1", tmp_path, "val:2"]
    for most, step, notes in (
        (16, 1, []),
        (2, 2, ["2 of 4 images are shown, spread evenly; --num-images shows more."]),
    ):
        images, notes_shown = read(words, most)
        names = ["val:1", "a.png", "b.png", "val:2"][::step]
        assert ([image.name for image in images], notes_shown) == (names, notes)
    with pytest.raises(RecastError, match=r"val:4 is out of range: three has 4"):
        read(["val:4"])
    with pytest.raises(RecastError, match="drop --img-size"):
        read(["val:1"], size=(8, 8))


@pytest.mark.parametrize("task", ["segment", "detect"])
def test_a_file_is_seen_as_its_task_sees_it(tmp_path: Path, task: str) -> None:
    file = save(photo().resize((50, 30)), tmp_path / "one.png")
    mask = save(Image.new("L", (50, 30)), tmp_path / "mask.png")
    nothing = Annotations(np.zeros((0, 4)), np.zeros(0, np.int64), np.zeros(0, bool), np.zeros(0))
    pairs = ImagePairs([str(file)], [str(mask)], 24, num_classes=2)
    part = pairs if task == "segment" else ObjectImages([str(file)], [nothing], 24)
    data = Data("dense", part, part, ["a", "b"], (0.5,) * 3, (0.5,) * 3, 24, Augmentation())
    (of_file, of_data), _ = read_inputs([file, 0], (24, 24), 16, crop_pct=0.5, data=data)
    assert torch.equal(of_file.pixels, of_data.pixels)
    assert ("all of it" in of_file.notes[0]) == (task == "detect")
