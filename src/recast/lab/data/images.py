"""Image files to pixels: (3, S, S) bytes, or float32 tensors in [0, 1], not normalised."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import center_crop

from recast.errors import RecastError, first_line

_SAFE = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
EXTENSIONS = frozenset(ending for ending, kind in Image.registered_extensions().items() if kind in _SAFE)

ARRAYS = (".npy", ".npz")
"""Endings of NumPy arrays: images of any number of bands (`bands`), where a folder holds no pictures."""

FORMATS = tuple(kind for kind in _SAFE if kind in Image.OPEN)
"""Formats that are decoded, whatever the name of a file: for others Pillow may run a program (Ghostscript for EPS)."""

TOOLS = frozenset(
    "__macosx __pycache__ @eadir @recycle @recently-snapshot @tmp @__thumb #recycle #snapshot $recycle.bin recycler "
    "lost+found".split()
) | {"system volume information", "network trash folder", "temporary items"}
"""Folders that systems and tools leave among images, in lower case."""

SIXTEEN_BIT = ("PNG", "PPM")
"""Formats whose 16-bit pixels Pillow may open as 32-bit integers."""

BIT_DEPTH, PHOTOMETRIC, SAMPLES, FORMAT = 258, 262, 277, 339
"""Tags of a TIFF: bits of every band, meaning of its numbers, number of bands, kind of numbers (1: unsigned)."""
ORIENTATION = 274
"""Tag of EXIF: how to rotate and mirror an image (1: as it is)."""
WHITE_IS_ZERO, PALETTE = 0, 3
"""Meanings of the numbers of a TIFF."""

NEAREST, BICUBIC = Image.Resampling.NEAREST, Image.Resampling.BICUBIC
PADDING = (124, 116, 104)
"""Colour around an image that does not fill its square: ImageNet's mean."""

logging.getLogger("PIL.TiffImagePlugin").setLevel(logging.CRITICAL)  # repeats every error that it raises

LONGEST = 20
"""Largest ratio of long to short side that is resized."""

PHOTO = 224
"""Default side of photographs in pixels."""

SMALL = 96
"""Images with a shorter side are small: validation shows them whole, training shifts them by a padded crop."""


def is_hidden(name: str) -> bool:
    """Return True for the name of a hidden file or folder (`._0.png`) and of a folder that a tool made."""
    return name.startswith(".") or name.lower() in TOOLS


def is_image_name(name: str) -> bool:
    """Return True for a name with the ending of an image that is not hidden."""
    return os.path.splitext(name)[1].lower() in EXTENSIONS and not is_hidden(os.path.basename(name))


def open_image(source: str | Path | IO[bytes], name: str | None = None) -> Image.Image:
    """Decode a whole image to RGB. Raises RecastError with the `name` (default: the path) if it cannot be read."""
    with opened(source, name or str(source)) as image:
        return to_rgb(image)


def check_regular(source: str | Path | IO[bytes]) -> None:
    """Raise OSError for a pipe, a device and a file of /proc, which may never end; `source` may be an open file."""
    if not isinstance(source, str | Path):
        return
    status = os.stat(source)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise OSError("expected a regular file")
    if not status.st_size:
        raise OSError("it is empty")


@contextmanager
def opened(source: str | Path | IO[bytes], name: str) -> Iterator[Image.Image]:
    """Open an image file with Pillow; errors of the block become a RecastError as in `decode_errors`."""
    with decode_errors(name):
        check_regular(source)
        with Image.open(source, formats=FORMATS) as image:
            yield image


@contextmanager
def decode_errors(name: str) -> Iterator[None]:
    """Turn errors of decoding an image into a RecastError with its name."""
    try:
        yield
    except MemoryError:
        raise
    except RecastError as error:
        raise RecastError(str(error) if name in str(error) else f"cannot read image {name}: {error}") from None
    except FileNotFoundError:
        raise RecastError(f"no such image: {name}") from None
    except IsADirectoryError:
        raise RecastError(f"expected an image file, got a folder: {name}") from None
    except Exception as error:  # Pillow's decoders raise errors of any kind on broken files
        unknown = isinstance(error, Image.UnidentifiedImageError)  # its text repeats the path, or names a BytesIO
        reason = "not an image in a known format, or truncated" if unknown else first_line(error).rstrip(".")
        if unknown and name.lower().endswith((*ARRAYS, ".tif", ".tiff")):
            raise RecastError(
                f"{name} is not an RGB image, or truncated; give its number of bands with --in-chans N"
            ) from None
        remedy = "pip install imagecodecs" if "imagecodecs" in reason else "Replace or remove the file"
        raise RecastError(f"cannot read image {name}: {reason}. {remedy}") from None


def bits_of(image: Image.Image) -> int:
    """Return the bits of a number in a file: 8, 16 or 32. Pillow knows those of colours only before it decodes them."""
    if image.mode == "F" or (image.mode == "I" and image.format not in SIXTEEN_BIT):
        return 32
    tile = getattr(image, "tile", None)
    stored = tile[0][3] if tile else ()  # ("RGB;16B",) of a PNG, ("RGB", largest value) of a PPM
    is_deep = image.format == "PPM" and isinstance(stored, tuple) and len(stored) == 2 and stored[1] > 255
    return 16 if is_deep or ";16" in str(stored) or image.mode.startswith("I") else 8


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to RGB; a grey image gets three equal channels."""
    if bits_of(image) == 32:
        raise RecastError(f"32-bit pixels (mode {image.mode}) have no defined white level; convert to 8 bits")
    if image.mode.startswith("I"):  # 16-bit grey: Pillow's own conversion clips at 255 instead of scaling
        tags = getattr(image, "tag_v2", {})
        white = 2 ** tags.get(BIT_DEPTH, (16,))[0] - 1  # Pillow opens 12 bits of a TIFF as 16
        grey = np.asarray(image).astype(np.float32) * np.float32(255 / white)
        if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO:  # Pillow inverts 8 bits
            grey = 255 - grey
        return Image.fromarray(grey.round().clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def crop_fraction(img_size: int) -> float:
    """Return the share of the short side that the centre crop keeps: 0.875 (256 to 224), or 1 for small images."""
    return 1.0 if img_size < SMALL else 0.875


def resize_and_crop(image: Image.Image, img_size: int, crop_pct: float | None = None) -> Image.Image:
    """Resize the short side to img_size / crop_pct (bicubic) and cut the centre img_size x img_size.

    Rounds as torchvision's Resize and CenterCrop do: validation sees the pixels of timm's evaluation transform.
    crop_pct None: `crop_fraction`, and an image of exactly this size is returned unchanged.
    """
    if crop_pct is None and image.size == (img_size, img_size):
        return image
    return resize_to(image, (img_size, img_size), crop_pct or crop_fraction(img_size))


def resize_to(
    image: Image.Image, size: tuple[int, int], share: float, resample: Image.Resampling = BICUBIC
) -> Image.Image:
    """Resize to the smallest image that covers (height, width)/share, and cut the centre (height, width)."""
    image = middle(image)
    height, width = size
    tall, wide = int(height / share), int(width / share)
    if tall * image.width >= wide * image.height:
        resized = int(tall * image.width / image.height), tall
    else:
        resized = wide, int(wide * image.height / image.width)
    if resized != image.size:
        image = image.resize(resized, resample)
    return center_crop(image, [height, width])


def middle(image: Image.Image) -> Image.Image:
    """Cut an image more than 20 times as long as wide to its middle: resized whole it could fill the memory."""
    width, height = image.size
    most = LONGEST * min(width, height)
    if max(width, height) <= most:
        return image
    left, top = max(0, width - most) // 2, max(0, height - most) // 2
    return image.crop((left, top, width - left, height - top))


def to_bytes(image: Image.Image) -> Tensor:
    """Convert an RGB image to a (3, H, W) uint8 tensor."""
    return torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1).contiguous()


def to_picture(pixels: Tensor) -> Image.Image:
    """Convert a (3, H, W) uint8 tensor to an RGB image."""
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())


def to_pixels(image: Image.Image) -> Tensor:
    """Convert an RGB image to a (3, H, W) float32 tensor in [0, 1]."""
    return in_unit(to_bytes(image))


def in_unit(pixels: Tensor) -> Tensor:
    """Return bytes as float32 in [0, 1], the same to the bit on every device; floats as they are."""
    if pixels.is_floating_point():
        return pixels
    floats = pixels.float()
    return floats.div_(floats.new_full((), 255))  # by a number, a GPU would multiply by its reciprocal
