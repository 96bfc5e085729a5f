"""What a page is made from: image files and validation images as the network sees them, class names, ranking."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import ExifTags, Image, ImageOps
from timm.data import ImageNetInfo
from torch import Tensor

from recast.errors import RecastError, listed
from recast.lab.data import Data
from recast.lab.data.images import (
    BICUBIC,
    PADDING,
    crop_fraction,
    is_hidden,
    is_image_name,
    middle,
    opened,
    resize_and_crop,
    to_pixels,
    to_rgb,
)
from recast.lab.explain.scene import Outputs, Prediction
from recast.lab.explain.write import safe_stem
from recast.lab.tasks import TASKS
from recast.reading import decode, read_bytes

VALIDATION = re.compile(r"val:(\d+)")
DIFFERENT = 4
"""How many validation images are shown where none is asked for, each of another class."""
NAMED = 3
"""How many files that cannot be read are named."""
MOST_FILES = 100_000
"""In a folder and below it: a link to / is told from photographs."""


@dataclass(frozen=True)
class Input:
    """An image as the network sees it, before normalisation."""

    name: str
    pixels: Tensor
    """(3, height, width) float32 in [0, 1]."""
    label: str | None = None
    notes: tuple[str, ...] = ()


def read_image(
    source: Path | Image.Image,
    size: tuple[int, int],
    labels: Mapping[str, str] | None = None,
    crop_pct: float | None = None,
    whole: bool = False,
) -> Input:
    """An image file (or a PIL image), upright, resized and cropped to `size` (height, width) as validation does.

    A square is `resize_and_crop`: short side to size / crop_pct, then the centre. A rectangle is the largest of its
    shape in the middle of the image. `whole`: all of it, the rest filled up to the right and below, as a detector's
    images are. labels: name of a file's folder → its class. Raises `RecastError` naming a file
    that is missing, truncated, no image, or larger than Pillow opens.
    """
    name, folder, notes = "the image", "", []
    if isinstance(source, Image.Image):
        image = to_rgb(source)
    else:
        name, folder = source.name, source.resolve().parent.name
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # twice that size is refused
            with opened(source, str(source)) as stored:
                turned = stored.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9)
                image = to_rgb(ImageOps.exif_transpose(stored) if turned else stored)
        if turned:
            notes.append("Turned upright as its EXIF tag says; training and evaluation read it as it is stored.")
    width, height = image.size
    if whole:
        image, crop = ImageOps.pad(image, (size[1], size[0]), BICUBIC, PADDING, (0, 0)), 1.0
    elif size[0] == size[1]:
        image, crop = resize_and_crop(image, size[0], crop_pct), crop_pct or crop_fraction(size[0])
    else:
        image, crop = ImageOps.fit(middle(image), (size[1], size[0]), BICUBIC), 1.0
    if (width, height) != (size[1], size[0]):
        part = "its middle" if crop == 1 else f"its middle, {100 * crop:.3g} % of the short side"
        kept = "all of it" if whole or (crop == 1 and width * size[0] == height * size[1]) else part
        notes.append(f"The file has {height}×{width} pixels (height × width); the network sees {kept}, resized.")
    return Input(name, to_pixels(image), (labels or {}).get(folder), tuple(notes))


def page_stem(words: Sequence[str | Path]) -> str:
    """What a page of the images that `words` name is called: that of the one word, else images, or validation."""
    if len(words) != 1:
        return "images" if words else "validation"
    name = str(words[0])
    return safe_stem(name if name.startswith("val:") else Path(name).resolve().stem) or "image"


def find_inputs(words: Sequence[str | Path]) -> list[int | Path]:
    """The images that the words mean: files as they are, of a folder every image below it, by name, and `val:N` for the
    N-th validation image. Raises `RecastError` for what is not there, and for a folder without images.
    """
    found: list[int | Path] = []
    for word in words:
        path = Path(word)
        if match := VALIDATION.fullmatch(str(word)):
            found.append(int(match[1]))
        elif str(word).startswith("val:"):
            raise RecastError(f"a validation image is named by its number, such as val:3, got {word}")
        elif path.is_dir():
            found += images_below(path)
        elif path.exists():
            found.append(path)
        else:
            raise RecastError(f"no such image or folder: {path}")
    return found


def images_below(folder: Path) -> list[Path]:
    """Every image in a folder and those below it, by name. Raises `RecastError` for none, and for too many files."""
    found: list[Path] = []
    seen = 0
    for below, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not is_hidden(name)]
        seen += len(folders) + len(names)
        if seen > MOST_FILES:
            raise RecastError(f"folder {folder} holds more than {MOST_FILES:,} files: name images, or a smaller folder")
        found += [path for name in names if is_image_name(name) and (path := Path(below, name)).is_file()]
    if not found:
        raise RecastError(
            f"no images in folder {folder}: files with endings such as .png, .jpg or .webp are looked for"
        )
    return sorted(found)


def some_of_validation(data: Data) -> list[int | Path]:
    """The first validation image of each of `DIFFERENT` classes; where images have none, the first ones."""
    return [*data.task.examples(data, DIFFERENT)]


def read_inputs(
    wanted: Sequence[int | Path],
    size: tuple[int, int],
    most: int,
    labels: Mapping[str, str] | None = None,
    crop_pct: float | None = None,
    data: Data | None = None,
) -> tuple[list[Input], list[str]]:
    """The first `most` images that can be read, and notes: which files cannot, and that there are more.

    Files as `read_image` reads them, and by number validation images of `data`, whose task says how files are cut. A
    file that is no image is left out as long as another one is left. Raises `RecastError` where none is, and for a
    number that there is not.
    """
    task = TASKS["classify"] if data is None else data.task
    crop_pct = task.crop_pct or crop_pct
    found: list[Input] = []
    broken: list[tuple[Path, RecastError]] = []
    for one in wanted:
        if len(found) == most:
            break
        if isinstance(one, int):
            assert data is not None  # a network without data has no numbers
            found.append(_of_validation(data, one, size))
            continue
        try:
            found.append(read_image(one, size, labels, crop_pct, task.whole))
        except RecastError as error:
            if len(wanted) == 1:
                raise
            broken.append((one, error))
    if not found:
        raise RecastError(f"none of {len(wanted)} files is an image that can be read; the first: {broken[0][1]}")
    notes = []
    if broken:
        names = listed([str(path) for path, _ in broken], NAMED)
        notes.append(f"Left out, because it is no image that can be read: {names}.")
    if len(wanted) - len(broken) > most:
        notes.append(f"{most} of {len(wanted) - len(broken)} images are shown: --num-images takes more.")
    return found, notes


def _of_validation(data: Data, index: int, size: tuple[int, int]) -> Input:
    if not 0 <= index < len(data.val):
        raise RecastError(f"val:{index} is no validation image of {data.name}: it has {len(data.val)}, counted from 0")
    pixels, labels = data.val.batch([index])
    if tuple(pixels.shape[-2:]) != size:
        raise RecastError(
            f"val:{index} is an image of {pixels.shape[-2]}×{pixels.shape[-1]} pixels: leave --img-size away, or name "
            "a file"
        )
    return Input(f"val:{index}", pixels[0], data.task.answer(data, labels[0]))


def imagenet_names() -> tuple[list[str], dict[str, str]]:
    """ImageNet-1k's classes by their first name (all of them where two classes share it), and folder → class."""
    info = ImageNetInfo()
    wnids = info.label_names()
    told = [info.index_to_description(index) for index in range(len(wnids))]
    first = [text.partition(",")[0] for text in told]
    names = [text if first.count(short) > 1 else short for text, short in zip(told, first, strict=True)]
    return names, {name: name for name in names} | dict(zip(wnids, names, strict=True))


def read_class_names(path: Path) -> list[str]:
    """The lines of a text file, a class each. Raises `RecastError` for a file that is none, and for empty lines."""
    try:
        names = [line.strip() for line in decode(read_bytes(path), path).rstrip().splitlines()]
    except (OSError, RecastError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RecastError(
            f"cannot read the names of classes in {path}: {reason}; one name a line is expected"
        ) from None
    if not names or "" in names:
        where = f"line {names.index('') + 1} is empty" if names else "it is empty"
        raise RecastError(f"{path} must name one class a line, but {where}")
    return names


def read_outputs(logits: Tensor, outputs: Outputs | None = None) -> tuple[Tensor, Outputs]:
    """Logits (B, K) as probabilities or as they are, and which. By default one output is a sigmoid, more a softmax.

    Raises `RecastError` for a softmax of one output, which is 1 whatever it says.
    """
    alone, logits = logits.shape[1] == 1, logits.float()
    read = {"softmax": logits.softmax(1), "sigmoid": logits.sigmoid(), "logits": logits}
    scale = outputs or ("sigmoid" if alone else "softmax")
    if scale not in read:
        raise RecastError(f"outputs must be one of {', '.join(read)}, got {outputs!r}")
    if alone and scale == "softmax":
        raise RecastError("outputs: a softmax of one output is always 100 %; choose sigmoid or logits")
    return read[scale], scale


def likeliest(
    output: Any, classes: Sequence[str] | None, most: int, outputs: Outputs | None = None
) -> tuple[Prediction, ...]:
    """The largest outputs, at most `most`, as `read_outputs` reads them; none if there is not one finite number each.

    Raises `RecastError` if there are names for another number of outputs.
    """
    if isinstance(output, Tensor) and output.shape == (1,):  # one logit, its dimension squeezed
        output = output[:, None]
    if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != 1 or not output.isfinite().all():
        return ()
    if classes is not None and len(classes) != output.shape[1]:
        raise RecastError(
            f"{len(classes)} names of classes for a network with {output.shape[1]} outputs: one for each is expected, "
            "in their order"
        )
    values, scale = read_outputs(output, outputs)
    largest = output[0].topk(min(most, output.shape[1])).indices.tolist()  # of logits: sigmoids saturate
    return tuple(Prediction(str(i) if classes is None else classes[i], values[0, i].item(), i, scale) for i in largest)
