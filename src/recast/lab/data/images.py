"""From an image file to pixels: a (3, S, S) float32 tensor in [0, 1]. Normalisation is never done here."""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from recast.errors import RecastError, first_line
from recast.reading import open_now

_SAFE = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
EXTENSIONS = frozenset(ending for ending, kind in Image.registered_extensions().items() if kind in _SAFE)

FORMATS = tuple(kind for kind in _SAFE if kind in Image.OPEN)
"""That are read, whatever a file is called: for others Pillow may run a program, Ghostscript for EPS."""

TOOLS = frozenset(
    "__macosx __pycache__ @eadir @recycle @recently-snapshot @tmp @__thumb #recycle #snapshot $recycle.bin recycler "
    "lost+found".split()
) | {"system volume information", "network trash folder", "temporary items"}
"""Folders that systems and tools leave among images, in lower case."""

# Everything that Pillow's decoders were seen to raise on broken files; OSError covers UnidentifiedImageError.
_DECODE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    EOFError,
    IndexError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)

SIXTEEN_BIT = ("PNG", "PPM")
"""Formats of which Pillow may give 16-bit pixels as 32-bit ones."""

NEAREST, BICUBIC = Image.Resampling.NEAREST, Image.Resampling.BICUBIC
PADDING = (124, 116, 104)
"""Colour around an image that does not fill its square: ImageNet's mean."""

LONGEST = 20
"""Long side over short side of what is resized."""

PHOTO = 224
"""Side in pixels that photographs are brought to unless another is asked for."""

SMALL = 96
"""Sides below it are small images: kept whole, shifted by a padded crop."""


def is_hidden(name: str) -> bool:
    """True for the name of a folder or file that no data set means: hidden (`._0.png`), or left by a tool."""
    return name.startswith(".") or name.lower() in TOOLS


def is_image_name(name: str) -> bool:
    """True for a name with the ending of an image that is not hidden."""
    return os.path.splitext(name)[1].lower() in EXTENSIONS and not is_hidden(os.path.basename(name))


def open_image(source: str | Path | IO[bytes], name: str | None = None) -> Image.Image:
    """Decode the whole image to RGB. Raises RecastError naming the file (`name`, or the path) if it cannot be read."""
    with opened(source, name or str(source)) as image:
        return to_rgb(image)


@contextmanager
def opened(source: str | Path | IO[bytes], name: str) -> Iterator[Image.Image]:
    """An image file as Pillow has it; what cannot be read of it in the block is a RecastError that names it."""
    with decode_errors(name):
        if isinstance(source, str | Path):
            if stat.S_ISDIR(mode := os.stat(source).st_mode):
                raise IsADirectoryError
            if not stat.S_ISREG(mode):
                raise OSError("it is no regular file")  # a pipe or a device may never end
        with nullcontext(source) if hasattr(source, "read") else open_now(source) as file:
            with Image.open(file, formats=FORMATS) as image:
                yield image


@contextmanager
def decode_errors(name: str) -> Iterator[None]:
    """Turns what decoding an image can raise into a RecastError that names it."""
    try:
        yield
    except FileNotFoundError:
        raise RecastError(f"no such image: {name}") from None
    except IsADirectoryError:
        raise RecastError(f"expected an image file, got a folder: {name}") from None
    except _DECODE_ERRORS as error:
        unknown = isinstance(error, Image.UnidentifiedImageError)  # whose text repeats the path, or names a BytesIO
        reason = "not an image in a known format, or truncated" if unknown else first_line(error).rstrip(".")
        raise RecastError(f"cannot read image {name}: {reason}. Replace or remove the file") from None


def to_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB, whatever its mode; grey ones get three equal channels."""
    if image.mode == "F" or (image.mode == "I" and image.format not in SIXTEEN_BIT):
        raise RecastError(f"pixels of 32 bits (mode {image.mode}), of which nobody knows what is white: save it with 8")
    if image.mode.startswith("I"):  # 16-bit grey: Pillow's own conversion clips at 255 instead of scaling
        grey = np.asarray(image).astype(np.float32) / 257
        return Image.fromarray(grey.round().clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def crop_fraction(img_size: int) -> float:
    """Share of the short side that the centre crop keeps: 0.875 (256 to 224) for photographs, all of a small image."""
    return 1.0 if img_size < SMALL else 0.875


def resize_and_crop(image: Image.Image, img_size: int, crop_pct: float | None = None) -> Image.Image:
    """Short side to img_size / crop_pct (bicubic), then the centre img_size x img_size.

    Rounds as torchvision's Resize and CenterCrop do, so that validation sees the pixels that timm's transform gives.
    crop_pct None: `crop_fraction`, and an image that has exactly the wanted size is left as it is.
    """
    if crop_pct is None and image.size == (img_size, img_size):
        return image
    return resize_to(image, (img_size, img_size), crop_pct or crop_fraction(img_size))


def resize_to(image: Image.Image, size: tuple[int, int], share: float, how: Image.Resampling = BICUBIC) -> Image.Image:
    """The centre (height, width) of the image after the smallest resizing that covers (height, width)/share."""
    image = middle(image)
    height, width = size
    tall, wide = int(height / share), int(width / share)
    if tall * image.width >= wide * image.height:
        resized = int(tall * image.width / image.height), tall
    else:
        resized = wide, int(wide * image.height / image.width)
    if resized != image.size:
        image = image.resize(resized, how)
    left, top = round((image.width - width) / 2), round((image.height - height) / 2)
    return image.crop((left, top, left + width, top + height))


def middle(image: Image.Image) -> Image.Image:
    """The middle of an image that is more than 20 times as long as wide: resized whole it could fill the memory."""
    width, height = image.size
    most = LONGEST * min(width, height)
    if max(width, height) <= most:
        return image
    left, top = max(0, width - most) // 2, max(0, height - most) // 2
    return image.crop((left, top, width - left, height - top))


def to_bytes(image: Image.Image) -> Tensor:
    """RGB image to a (3, H, W) uint8 tensor."""
    return torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1).contiguous()


def to_pixels(image: Image.Image) -> Tensor:
    """RGB image to a (3, H, W) float32 tensor in [0, 1]."""
    return to_bytes(image).float() / 255
