"""Images of any number of bands as float32 tensors (C, H, W): grey and multi-band TIFF, NumPy arrays.

RGB pictures stay Pillow's, in `images` and `augment`; these functions do the same to tensors.
"""

from __future__ import annotations

import math
import os
import warnings
import zipfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import IO, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from recast.errors import RecastError
from recast.lab.config import Augmentation
from recast.lab.data.augment import crop_and_flip
from recast.lab.data.images import (
    ARRAYS,
    BIT_DEPTH,
    FORMAT,
    PALETTE,
    SAMPLES,
    WHITE_IS_ZERO,
    bits_of,
    check_regular,
    crop_fraction,
    decode_errors,
    opened,
)
from recast.lab.plugins import optional_package
from recast.reading import check_member, check_unpacked

BICUBIC = v2.InterpolationMode.BICUBIC
TIFF = (".tif", ".tiff")


def open_bands(source: str | IO[bytes], in_chans: int, name: str = "", kinds: dict[bool, str] | None = None) -> Tensor:
    """Read an image of `in_chans` bands, (C, H, W). Unsigned integers are divided by their largest value.

    source: a path, or the content of the file `name`. Raises RecastError if it cannot be read or has another number of
    bands. An RGB picture for one band becomes grey.
    kinds: keeps, over the images of a data set, the first one that was divided (True) and the first one beyond 1 that
    was not: both in one set are an error.
    """
    name = name or str(source)
    if name.lower().endswith(ARRAYS):
        pixels, white = _array(source, name), None
    elif name.lower().endswith(TIFF) and not (in_chans in (1, 3) and _is_picture(source, name)):
        pixels, white = _tiff(source, name)
    else:
        with opened(source, name) as image:
            pixels, white = _numbers(image, in_chans), None
    tensor = _as_tensor(pixels, in_chans, name, white)
    if kinds is not None:
        _check_kind(tensor, pixels.dtype, name, kinds)
    return tensor


def bands_of(image: Image.Image, in_chans: int, name: str) -> Tensor:
    """Convert a picture to `in_chans` bands, as `open_bands` does."""
    return _as_tensor(_numbers(image, in_chans), in_chans, name)


def _check_kind(tensor: Tensor, dtype: np.dtype, name: str, kinds: dict[bool, str]) -> None:
    """Raise RecastError for floats of 0 to 255, say, among bytes, which are read as 0 to 1."""
    is_divided = dtype.kind == "u"
    if is_divided or tensor.max() > 1:
        kinds.setdefault(is_divided, name)
        if other := kinds.get(not is_divided):
            most = "unsigned integers, read as 0 to 1" if is_divided else f"{dtype} up to {float(tensor.max()):.4g}"
            raise RecastError(f"{name} has {most}, unlike {other}: store all images as the same kind of number")


def _numbers(image: Image.Image, in_chans: int) -> np.ndarray:
    """Return the numbers of a picture, with all their bits."""
    if bits_of(image) == 16:
        if image.mode.startswith("I"):  # of 32 bits in a PPM
            return np.asarray(image).astype(np.uint16)
        if image.format != "PNG":
            raise RecastError(f"16-bit colour is not read from {image.format}: convert to PNG or TIFF")
        pixels = _deep_colour(image.fp)  # type: ignore[attr-defined]  # open, as nothing is decoded yet
        is_opaque = pixels.shape[2] not in (2, 4) or in_chans != pixels.shape[2] - 1
        return pixels if is_opaque else pixels[..., :-1]
    if image.mode in ("P", "1", "CMYK", "YCbCr"):
        image = image.convert("RGB")
    grey, bands = image.mode in ("L", "LA"), len(image.getbands())
    if in_chans == 1 and image.mode in ("RGB", "RGBA", "LA"):
        image = image.convert("L")
    elif in_chans == 3 and (grey or bands == 4):
        image = image.convert("RGB")
    return np.asarray(image)


def _deep_colour(file: IO[bytes]) -> np.ndarray:
    """Decode a PNG whose numbers have 16 bits, of which Pillow drops eight."""
    from torchvision.io import decode_image  # deprecated: here, other images do not depend on it

    file.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return decode_image(torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)).permute(1, 2, 0).numpy()


def _array(source: str | IO[bytes], name: str) -> np.ndarray:
    with decode_errors(name):
        check_regular(source)
        with open(source, "rb") if isinstance(source, str) else nullcontext(source) as file:
            if file.read(2) != b"PK":
                return _stored_array(file, file.seek(0, os.SEEK_END))
            with zipfile.ZipFile(file) as archive:
                if len(members := archive.infolist()) != 1:
                    raise ValueError(f"it holds {len(members)} arrays, expected one")
                check_member(archive, members[0])
                with archive.open(members[0]) as member:
                    return _stored_array(member, members[0].file_size)


def _stored_array(file: IO[bytes], size: int) -> np.ndarray:
    """Read a .npy file of `size` bytes, after comparing that with the array's own header."""
    file.seek(0)
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(file)
    if math.prod(shape) * dtype.itemsize > size:
        raise ValueError(f"truncated, it states an array of {shape} {dtype}")
    file.seek(0)
    return np.asarray(np.lib.format.read_array(file, allow_pickle=False))


def _is_picture(source: str | IO[bytes], name: str) -> bool:
    """Return True for a TIFF of one page of unsigned bytes, which Pillow reads as other pictures."""
    with suppress(RecastError), opened(source, name) as image:
        tags, bands = getattr(image, "tag_v2", {}), len(image.getbands())
        is_bytes = max(tags.get(BIT_DEPTH, (8,))) <= 8 and set(tags.get(FORMAT, (1,))) == {1}
        return is_bytes and tags.get(SAMPLES, bands) == bands and getattr(image, "n_frames", 1) == 1
    return False


def _tiff(source: str | IO[bytes], name: str) -> tuple[np.ndarray, int | None]:
    """Return numbers in which more is brighter, as Pillow does, and the largest one where they are unsigned."""
    tifffile = optional_package("tifffile", "'recast-vision[bands]'", f"the bands of {name} require tifffile")
    with decode_errors(name):
        check_regular(source)
        if not isinstance(source, str):
            source.seek(0)
        with tifffile.TiffFile(source) as file:
            check_unpacked(sum(pages.nbytes for pages in file.series[:1]), file.filehandle.size)
            try:
                pixels: np.ndarray = file.asarray()
            except ModuleNotFoundError as error:  # zstd: of Python 3.14, or of imagecodecs
                raise ValueError("its compression requires the 'imagecodecs' package") from error
            if not file.series:
                return pixels, None  # empty
            page = file.series[0].keyframe
        white = 2**page.bitspersample - 1 if pixels.dtype.kind == "u" else None
        if page.photometric == PALETTE:
            raise RecastError("its numbers are those of a palette: convert to RGB")
        if page.photometric == WHITE_IS_ZERO:
            if white is None:
                raise RecastError(f"0 is white, and black is unknown in {pixels.dtype}: convert to unsigned integers")
            pixels = white - pixels
    return pixels, white


def _as_tensor(pixels: np.ndarray, in_chans: int, name: str, white: int | None = None) -> Tensor:
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.ndim != 3 or 0 in pixels.shape or pixels.dtype.kind not in "uifb":
        got = f"got {pixels.shape} of {pixels.dtype}"
        raise RecastError(f"{name} is not an image: expected rows x columns x bands, {got}")
    if pixels.shape[-1] != in_chans and pixels.shape[0] == in_chans:
        pixels = np.moveaxis(pixels, 0, -1)
    if pixels.shape[-1] != in_chans:
        bands = pixels.shape[0 if pixels.shape[0] < min(pixels.shape[1:]) else -1]
        raise RecastError(f"{name} has {bands} bands, the network takes {in_chans} (--in-chans)")
    scale = white or (np.iinfo(pixels.dtype).max if pixels.dtype.kind == "u" else 1)
    tensor = torch.from_numpy(pixels.astype(np.float32) / np.float32(scale)).permute(2, 0, 1).contiguous()
    if not tensor.isfinite().all():
        raise RecastError(f"{name} has pixels that are NaN or infinite: replace them, or remove the file")
    return tensor


def cover(image: Tensor, size: tuple[int, int], share: float) -> Tensor:
    """Resize to the smallest image that covers (height, width)/share (bicubic), and cut the center (height, width)."""
    sides = image.shape[-2:]
    factor = max(int(target / share) / side for target, side in zip(size, sides, strict=True))
    resized = functional.resize(image, [max(1, round(side * factor)) for side in sides], BICUBIC, antialias=True)
    return _clipped(functional.center_crop(resized, list(size)), image)


def _in_unit(pixels: Tensor) -> bool:
    return 0 <= float(pixels.min()) and float(pixels.max()) <= 1


def _clipped(resized: Tensor, image: Tensor) -> Tensor:
    """Return the resized image in [0, 1] if the image was: bicubic resize overshoots, and Pillow clips to its bytes."""
    return resized.clamp(0, 1) if _in_unit(image) else resized


def as_validation(image: Tensor, img_size: int, crop_pct: float | None = None) -> Tensor:
    """Do what `resize_and_crop` does to a picture."""
    if crop_pct is None and image.shape[-2:] == (img_size, img_size):
        return image
    return cover(image, (img_size, img_size), crop_pct or crop_fraction(img_size))


def band_transform(
    img_size: int, augment: Augmentation | None = None, crop_pct: float | None = None
) -> Callable[[Any], Tensor]:
    """Return the crops and flip of `file_transform` for tensors; `augment` is resolved."""
    whole = partial(as_validation, img_size=img_size, crop_pct=crop_pct)
    if augment is None:
        return whole
    random_crop = v2.RandomResizedCrop(img_size, augment.scale, interpolation=BICUBIC, antialias=True)
    return partial(_augmented, steps=v2.Compose(crop_and_flip(img_size, augment, whole, random_crop)))


def _augmented(image: Tensor, steps: Callable[[Tensor], Tensor]) -> Tensor:
    return _clipped(steps(image), image)


def is_rgb(pixels: Tensor, bands: Sequence[int] = ()) -> bool:
    """Return True for images (…, C, H, W) that `as_picture` shows with their own contrast."""
    return not bands and pixels.shape[-3] == 3 and _in_unit(pixels)


def as_picture(pixels: Tensor, bands: Sequence[int] = ()) -> Tensor:
    """Return three bands of images (…, C, H, W) for the eye: RGB as it is, others from their 2 % to 98 % quantile.

    bands: their numbers, from 1; default the first three, and a single one as grey.
    """
    channels = pixels.shape[-3]
    if is_rgb(pixels, bands):
        return pixels
    if wrong := [band for band in bands if not 1 <= band <= channels]:
        raise RecastError(f"--bands {wrong[0]}: the images have the bands 1 to {channels}")
    chosen = [band - 1 for band in bands] or list(range(min(channels, 3)))
    shown = pixels[..., (chosen * 3)[:3] if len(chosen) == 1 else [*chosen, chosen[-1]][:3], :, :].float()
    low, high = shown.flatten(-2).quantile(torch.tensor([0.02, 0.98]), dim=-1)[..., None, None]
    return ((shown - low) / (high - low).clamp(min=1e-6)).clamp(0, 1)
