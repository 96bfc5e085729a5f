"""Images for an explain page: files of any kind, folders, and validation images of a run, as the network sees them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image, ImageOps
from torch import Tensor

from recast.data import Data
from recast.data.images import crop_fraction, decode_errors, is_image_name, middle, resize_and_crop, to_pixels, to_rgb
from recast.errors import RecastError

ORIENTATION = 274
"""The EXIF tag that says which side is up."""
VALIDATION = re.compile(r"val:(\d+)")
DIFFERENT = 4
"""How many validation images are shown where none is asked for, each of another class."""

NAMED = 3
"""How many files that cannot be read are named."""


@dataclass(frozen=True)
class Input:
    """An image as the network sees it, before normalisation."""

    name: str
    pixels: Tensor
    """(3, height, width) float32 in [0, 1]."""
    label: str | None = None
    notes: tuple[str, ...] = field(default=())


def read_image(
    source: Path | Image.Image, size: tuple[int, int], classes: Sequence[str] = (), crop_pct: float | None = None
) -> Input:
    """An image file (or a PIL image), upright, resized and cropped to `size` (height, width) as validation does.

    A square is `resize_and_crop`: short side to size / crop_pct, then the centre. A rectangle is the largest of its
    shape in the middle of the image. The label is the name of the file's folder, where that is a class. Raises
    `RecastError` naming a file that is missing, truncated, no image, or larger than Pillow opens.
    """
    if isinstance(source, Image.Image):
        name, folder, image, turned = "the image", "", to_rgb(source), False
    else:
        name, folder = source.name, source.resolve().parent.name
        image, turned = _upright(source)
    width, height = image.size
    notes = []
    if turned:
        notes.append("Turned upright as its EXIF tag says; training and evaluation read it as it is stored.")
    image = middle(image)
    if size[0] == size[1]:
        image, crop = resize_and_crop(image, size[0], crop_pct), crop_pct or crop_fraction(size[0])
    else:
        image, crop = _cut(image, size), 1.0
    if (width, height) != (size[1], size[0]):
        part = "its middle" if crop == 1 else f"its middle, {100 * crop:.3g} % of the short side"
        kept = "all of it" if crop == 1 and width * size[0] == height * size[1] else part
        notes.append(f"The file has {height}×{width} pixels (height × width); the network sees {kept}, resized.")
    return Input(name, to_pixels(image), folder if folder in classes else None, tuple(notes))


def _upright(path: Path) -> tuple[Image.Image, bool]:
    """The image in RGB, and whether an EXIF tag had it turned."""
    with decode_errors(str(path)), warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # twice that size is refused
        with Image.open(path) as opened:
            turned = opened.getexif().get(ORIENTATION, 1) in range(2, 9)
            return to_rgb(ImageOps.exif_transpose(opened) if turned else opened), turned


def _cut(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The largest middle part of the shape `size`, resized to it (bicubic)."""
    height, width = size
    scale = max(height / image.height, width / image.width)
    wide, high = width / scale, height / scale
    left, top = (image.width - wide) / 2, (image.height - high) / 2
    box = (max(left, 0.0), max(top, 0.0), min(left + wide, image.width), min(top + high, image.height))
    return image.resize((width, height), Image.Resampling.BICUBIC, box=box)


def page_stem(words: Sequence[str | Path]) -> str:
    """What a page of the images that `words` name is called: that of the one word, else images, or validation."""
    if len(words) != 1:
        return "images" if words else "validation"
    name = str(words[0])
    return safe_stem(name if name.startswith("val:") else Path(name).resolve().stem) or "image"


def safe_stem(name: str) -> str:
    """A name with nothing in it that a file's name should not have."""
    return re.sub(r"[^\w.-]+", "-", name).strip(".-")


def find_images(words: Sequence[str | Path]) -> list[Path]:
    """The files that are meant: files as they are, of a folder every image below it, by name.

    Raises `RecastError` for what is not there, and for a folder without images.
    """
    found: list[Path] = []
    for word in words:
        path = Path(word)
        if not path.is_dir():
            if not path.exists():
                raise RecastError(f"no such image or folder: {path}")
            found.append(path)
            continue
        inside = sorted(file for file in path.rglob("*") if is_image_name(file.name) and file.is_file())
        if not inside:
            raise RecastError(
                f"no images in folder {path}: files with endings such as .png, .jpg or .webp are looked for"
            )
        found += inside
    return found


def find_inputs(words: Sequence[str | Path]) -> list[int | Path]:
    """Files, and numbers of validation images, that the words mean. Raises `RecastError` as `find_images` does."""
    wanted: list[int | Path] = []
    for word in words:
        if match := VALIDATION.fullmatch(str(word)):
            wanted.append(int(match[1]))
        elif str(word).startswith("val:"):
            raise RecastError(f"a validation image is named by its number, such as val:3, got {word}")
        else:
            wanted += find_images([word])
    return wanted


def read_inputs(
    words: Sequence[str | Path], data: Data, size: tuple[int, int], most: int, crop_pct: float | None = None
) -> tuple[list[Input], list[str]]:
    """What the words of a command mean: files, folders, and `val:N` for the N-th validation image.

    The first `most` of them, and notes as `read_files` gives them. No word at all: one validation image of each of
    `DIFFERENT` classes. Raises `RecastError` as `find_images` and `read_files` do, and for a number that the validation
    images do not have.
    """
    if not words:
        chosen = _different(data)
        return [_of_validation(data, index, size) for index in chosen[:most]], _more(len(chosen), most)

    def read(one: int | Path) -> Input:
        return (
            _of_validation(data, one, size) if isinstance(one, int) else read_image(one, size, data.classes, crop_pct)
        )

    return read_files(find_inputs(words), read, most)


def read_files(
    wanted: Sequence[int | Path], read: Callable[[int | Path], Input], most: int
) -> tuple[list[Input], list[str]]:
    """The first `most` images that can be read, and notes: which files cannot, and that there are more.

    A file that is no image is left out as long as another one is left. Raises `RecastError` where none is.
    """
    found: list[Input] = []
    broken: list[tuple[Path, RecastError]] = []
    for seen, one in enumerate(wanted):
        if len(found) == most:
            return found, [*_left_out(broken), *_more(len(wanted) - len(broken), most)]
        try:
            found.append(read(one))
        except RecastError as error:
            if isinstance(one, int) or (seen == len(wanted) - 1 and not found and not broken):
                raise
            broken.append((one, error))
    if not found:
        raise RecastError(f"none of {len(wanted)} files is an image that can be read; the first: {broken[0][1]}")
    return found, _left_out(broken)


def _left_out(broken: Sequence[tuple[Path, RecastError]]) -> list[str]:
    """One note on files that are left out: the first by name."""
    if not broken:
        return []
    names = ", ".join(str(path) for path, _ in broken[:NAMED])
    rest = f" and {len(broken) - NAMED} more" if len(broken) > NAMED else ""
    return [f"Left out, because it is no image that can be read: {names}{rest}."]


def _more(found: int, most: int) -> list[str]:
    return [f"{most} of {found} images are shown: --num-images takes more."] if found > most else []


def _different(data: Data) -> list[int]:
    """The first validation images of `DIFFERENT` classes."""
    first: dict[int, int] = {}
    for index, label in enumerate(data.val.labels.tolist()):
        first.setdefault(int(label), index)
        if len(first) == DIFFERENT:
            break
    return list(first.values())


def _of_validation(data: Data, index: int, size: tuple[int, int]) -> Input:
    if not 0 <= index < len(data.val):
        raise RecastError(f"val:{index} is no validation image of {data.name}: it has {len(data.val)}, counted from 0")
    pixels, labels = data.val.batch([index])
    if tuple(pixels.shape[-2:]) != size:
        raise RecastError(
            f"val:{index} is an image of {pixels.shape[-2]}×{pixels.shape[-1]} pixels: leave --img-size away, or name "
            "a file"
        )
    return Input(f"val:{index}", pixels[0], data.classes[int(labels[0])])
