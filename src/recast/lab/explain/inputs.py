"""Read the inputs of a page: image files and validation images as the network sees them, and names of classes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps
from timm.data import ImageNetInfo
from torch import Tensor

from recast.errors import RecastError, listed
from recast.lab.data import Data
from recast.lab.data.bands import as_picture, cover, open_bands
from recast.lab.data.images import (
    BICUBIC,
    PADDING,
    bits_of,
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
from recast.lab.task import task_named
from recast.reading import decode, read_bytes

DIFFERENT = 4  # default number of validation images, each of a different class
NAMED = 3  # unreadable files named in a note


def rgb_bytes(pixels: Tensor, bands: Sequence[int] = ()) -> NDArray[np.uint8]:
    """Return pixels (C, height, width) as (height, width, 3) bytes; `bands` as in `as_picture`."""
    rgb: NDArray[np.uint8] = (as_picture(pixels, bands).clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    return rgb


@dataclass(frozen=True)
class Input:
    """An image as the network sees it, before normalisation."""

    name: str
    pixels: Tensor  # (C, height, width) float32, RGB in [0, 1]
    label: str | None = None
    notes: tuple[str, ...] = ()


def read_image(
    path: Path,
    size: tuple[int, int],
    labels: Mapping[str, str] | None = None,
    crop_pct: float | None = None,
    whole: bool = False,
) -> Input:
    """Read an image file, upright, and resize and crop it as validation does.

    Args:
        size: (height, width). A square uses `resize_and_crop`: short side to size / crop_pct, then the center. A
            rectangle is the largest of its shape in the middle of the image.
        labels: name of the file's folder → its class.
        whole: keep the whole image and pad it on the right and below, as for detectors.

    Raises:
        RecastError: the file is missing, truncated, not an image, or larger than Pillow opens.
    """
    notes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # twice that size is an error
        with opened(path, str(path)) as stored:
            is_deep = bits_of(stored) == 16
            turned = stored.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9)
            image = to_rgb(ImageOps.exif_transpose(stored) if turned else stored)
    if turned:
        notes.append("Rotated upright by its EXIF tag; training and evaluation read it as stored.")
    if is_deep:
        notes.append("The file has 16-bit pixels; the network sees their upper 8 bits.")
    width, height = image.size
    if whole:
        image, crop = ImageOps.pad(image, (size[1], size[0]), BICUBIC, PADDING, (0, 0)), 1.0
    elif size[0] == size[1]:
        image, crop = resize_and_crop(image, size[0], crop_pct), crop_pct or crop_fraction(size[0])
    else:
        image, crop = ImageOps.fit(middle(image), (size[1], size[0]), BICUBIC), 1.0
    if (width, height) != (size[1], size[0]):
        part = "its center" if crop == 1 else f"its center, {100 * crop:.3g} % of the short side"
        if whole or (crop == 1 and width * size[0] == height * size[1]):
            part = "all of it"
        notes.append(f"The file has {height}×{width} pixels (height × width); the network sees {part}, resized.")
    return Input(path.name, to_pixels(image), (labels or {}).get(path.resolve().parent.name), tuple(notes))


def page_stem(words: Sequence[str | Path]) -> str:
    """Return the file stem of a page: the name of the only image or folder, else "images", or "validation" if none."""
    if len(words) != 1:
        return "images" if words else "validation"
    name = str(words[0])
    return safe_stem(name if name.startswith("val:") else Path(name).resolve().stem) or "image"


def find_inputs(words: Sequence[str | Path]) -> list[int | Path]:
    """Return the images that `words` name: files, all images below a folder (sorted), or `val:N`, a validation image.

    Raises:
        RecastError: a file does not exist, or a folder has no images.
    """
    images: list[int | Path] = []
    for word in words:
        path = Path(word)
        if str(word).startswith("val:"):
            index = str(word).removeprefix("val:")
            if not index.isdecimal():
                raise RecastError(f"a validation image is given by its number, such as val:3, got {word}")
            images.append(int(index))
        elif path.is_dir():
            files = [file for file in sorted(path.rglob("*")) if is_image_name(file.name) and file.is_file()]
            files = [file for file in files if not any(map(is_hidden, file.relative_to(path).parts))]
            if not files:
                raise RecastError(f"no images in folder {path}: expected files such as .png, .jpg or .webp")
            images += files
        elif path.exists():
            images.append(path)
        else:
            raise RecastError(f"no such image or folder: {path}")
    return images


def read_inputs(
    images: Sequence[int | Path],
    size: tuple[int, int],
    most: int,
    labels: Mapping[str, str] | None = None,
    crop_pct: float | None = None,
    data: Data | None = None,
) -> tuple[list[Input], list[str]]:
    """Read at most `most` images, spread evenly, and return them with notes on unreadable files and images not shown.

    Args:
        images: files, read with `read_image`, and numbers of validation images of `data`, whose task crops files.
            Empty: the first validation image of each of `DIFFERENT` classes, or the first images without classes.

    Raises:
        RecastError: no file can be read, or a number is out of range.
    """
    task = task_named("classify") if data is None else task_named(data.val.task)
    crop_pct = task.crop_pct or crop_pct
    if data is not None and not images:
        images = task.examples(data, DIFFERENT)
    inputs: list[Input] = []
    broken: list[tuple[Path, RecastError]] = []
    # spread evenly, and the others in case some cannot be read
    for number in sorted(range(len(images)), key=lambda number: number * most % len(images) >= most):
        image = images[number]
        if len(inputs) == most:
            break
        if isinstance(image, int):
            assert data is not None  # only runs have numbered images
            inputs.append(_validation_image(data, image, size))
            continue
        try:
            if data is None or data.in_chans is None:
                inputs.append(read_image(image, size, labels, crop_pct, task.whole))
            else:
                pixels = cover(open_bands(str(image), data.in_chans), size, crop_pct or crop_fraction(size[0]))
                inputs.append(Input(image.name, pixels, (labels or {}).get(image.resolve().parent.name)))
        except RecastError as error:
            if len(images) == 1:
                raise
            broken.append((image, error))
    if not inputs:
        raise RecastError(f"none of {len(images)} files is a readable image; the first: {broken[0][1]}")
    notes = []
    if broken:
        notes.append(f"Skipped unreadable images: {listed([str(path) for path, _ in broken], NAMED)}.")
    if len(images) - len(broken) > most:
        notes.append(f"{most} of {len(images) - len(broken)} images are shown, spread evenly; --num-images shows more.")
    return inputs, notes


def _validation_image(data: Data, index: int, size: tuple[int, int]) -> Input:
    if not 0 <= index < len(data.val):
        raise RecastError(f"val:{index} is out of range: {data.name} has {len(data.val)} validation images, from val:0")
    pixels, labels = data.val.batch([index])
    height, width = pixels.shape[-2:]
    if (height, width) != size:
        raise RecastError(f"val:{index} has {height}×{width} pixels: drop --img-size, or name a file")
    return Input(f"val:{index}", pixels[0], task_named(data.val.task).answer(data, labels[0]))


def imagenet_names() -> tuple[list[str], dict[str, str]]:
    """Return ImageNet-1k's classes by their first name (all names if two classes share it), and folder → class."""
    info = ImageNetInfo()
    wnids = info.label_names()
    descriptions = [info.index_to_description(index) for index in range(len(wnids))]
    short = [text.partition(",")[0] for text in descriptions]
    names = [text if short.count(name) > 1 else name for text, name in zip(descriptions, short, strict=True)]
    return names, {name: name for name in names} | dict(zip(wnids, names, strict=True))


def read_class_names(path: Path) -> list[str]:
    """Read a text file with one class per line. Raises `RecastError` for an unreadable file and for empty lines."""
    names = [line.strip() for line in decode(read_bytes(path), path).rstrip().split("\n")]
    if "" in names:
        raise RecastError(f"{path} must name one class per line, but line {names.index('') + 1} is empty")
    return names


def read_outputs(logits: Tensor, outputs: Outputs | None = None) -> tuple[Tensor, Outputs]:
    """Convert logits (B, K) as `outputs` says and return them with it; default: a sigmoid if K is 1, else a softmax.

    Raises `RecastError` for a softmax of one output, which is always 1.
    """
    single, logits = logits.shape[1] == 1, logits.float()
    values = {"softmax": logits.softmax(1), "sigmoid": logits.sigmoid(), "logits": logits}
    scale = outputs or ("sigmoid" if single else "softmax")
    if scale not in values:
        raise RecastError(f"outputs must be one of {', '.join(values)}, got {outputs!r}")
    if single and scale == "softmax":
        raise RecastError("outputs: a softmax of one output is always 100 %; choose sigmoid or logits")
    return values[scale], scale


def likeliest(
    output: Any, classes: Sequence[str] | None, most: int, outputs: Outputs | None = None
) -> tuple[Prediction, ...]:
    """Return the `most` largest outputs, converted by `read_outputs`; empty unless all are finite numbers.

    Raises `RecastError` if the number of names differs from the number of outputs.
    """
    if isinstance(output, Tensor) and output.shape == (1,):  # one logit without the class dimension
        output = output[:, None]
    if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != 1 or not output.isfinite().all():
        return ()
    if classes is not None and len(classes) != output.shape[1]:
        raise RecastError(
            f"{len(classes)} class names for a network with {output.shape[1]} outputs: give one for each, in order"
        )
    values, scale = read_outputs(output, outputs)
    largest = output[0].topk(min(most, output.shape[1])).indices.tolist()  # of logits: sigmoids saturate
    return tuple(Prediction(str(i) if classes is None else classes[i], values[0, i].item(), i, scale) for i in largest)
