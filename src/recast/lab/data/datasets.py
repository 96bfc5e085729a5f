"""Map-style data sets of (image, label) pairs, in memory as bytes or decoded at each access.

Shapes: B images of C channels (3 where `in_chans` is None) and S x S pixels, float32 in [0, 1].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from statistics import median_low
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2.functional import rgb_to_grayscale

from recast.errors import RecastError
from recast.lab.config import Augmentation, Crop
from recast.lab.data.augment import file_transform, only_shifts, resolve, shift_and_flip
from recast.lab.data.bands import band_transform, bands_of, open_bands
from recast.lab.data.device import check_memory
from recast.lab.data.images import PHOTO, in_unit, open_image, resize_and_crop, to_bytes, to_picture
from recast.lab.data.seeding import mix_seed, seeded
from recast.models.register import IMAGENET, Stats

SIZED = 15
"""Number of images whose sizes are read to choose `img_size`."""

MAX_BAD = 100
"""Number of unreadable images in a row that stops a run: the disk is missing, not a few files broken."""


class LabelledImages(Dataset[tuple[Tensor, Any]]):
    """Base class of all data sets here."""

    labels: Tensor
    """(N,) int64."""
    img_size: int
    """Side S in pixels."""
    augment: Augmentation | None
    """Augmentation of an image; None: that of validation."""
    crop_pct: float | None = None
    in_chans: int | None = None
    """Number of bands of an image; None: RGB pictures."""
    task: ClassVar[str] = "classify"
    """Name of the task of the labels (`recast.lab.task.TASKS`)."""

    def __post_init__(self) -> None:
        if self.augment is not None:
            self.augment = resolve(self.augment, self.img_size)
        make = file_transform if self.in_chans is None else band_transform
        self.transform = make(self.img_size, self.augment, self.crop_pct)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Sequence[int], seeds: Sequence[int] | None = None) -> tuple[Tensor, Any]:
        """Return images (B, C, S, S), float32 in [0, 1], and labels (B,) of the indices, as `load` does."""
        images, labels = self.load(indices, seeds)
        return in_unit(images), labels

    def load(self, indices: Sequence[int], seeds: Sequence[int] | None = None) -> tuple[Tensor, Any]:
        """Return the images of `batch` as uint8, a quarter of its bytes, and the labels; images of bands are float32.

        seeds: a number below 2^63 for each image, which alone decides its augmentation. None: drawn from torch's global
        generator if there is augmentation. Raises RecastError with the name of an image that cannot be read.
        """
        raise NotImplementedError

    def image_name(self, index: int) -> str:
        """Return the name of an image for messages."""
        return f"image {index}"

    def is_readable(self, index: int) -> bool:
        """Return False for an image that cannot be read."""
        try:
            self.batch([index])
        except RecastError:
            return False
        return True

    def subset(self, indices: Tensor) -> Self:
        """Return the data set of these images, in this order."""
        raise NotImplementedError

    def relabelled(self, labels: Tensor) -> Self:
        """Return the same images with labels (N,)."""
        return replace(self, labels=labels)  # type: ignore[type-var]  # every subclass is a data class

    def augmented(self, augment: Augmentation | None) -> Self:
        """Return the same images with this augmentation (None: without)."""
        return replace(self, augment=augment)  # type: ignore[type-var]  # as above

    def resized(self, img_size: int, crop_pct: float | None) -> Self:
        """Return the same images at `img_size` pixels with the crop `crop_pct`."""
        return replace(self, img_size=img_size, crop_pct=crop_pct)  # type: ignore[type-var]  # as above

    def banded(self, in_chans: int) -> Self:
        """Return the same images with this number of bands. Raises RecastError if they can only be RGB."""
        raise RecastError(f"in_chans={in_chans} requires images with classes in files: --data folder, csv or zip")

    def targets(self) -> list[str]:
        """Return the label of each image as text, for fingerprints."""
        return list(map(str, self.labels.tolist()))

    def label_source(self, index: int) -> Any:
        """Return a file or tensor with the labels of an image; None if `targets` holds them completely."""
        return None

    @staticmethod
    def joined(labels: Sequence[Any]) -> Any:
        """Concatenate the labels of several batches."""
        return torch.cat(labels)  # type: ignore[arg-type]

    def plain(self) -> Self:
        """Return the same images without augmentation."""
        return self.augmented(None)

    def prepared(self, images: Iterable[Any], seeds: Sequence[int] | None) -> Tensor:
        """Transform images to (B, C, S, S), each with the global generators seeded for it alone."""
        if self.augment is None:
            results = [self.transform(image) for image in images]
        else:
            results = []
            for image, seed in zip(images, seeds or (), strict=True):
                with seeded(seed):
                    results.append(self.transform(image))
        return torch.stack(results) if results else torch.empty(0, self.in_chans or 3, *[self.img_size] * 2)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        images, labels = self.batch([range(len(self))[index]])
        label: Any = labels[0]
        return images[0], label.item() if isinstance(label, Tensor) and label.dim() == 0 else label


def drawn_seeds(count: int) -> list[int]:
    """Return seeds that follow from torch's global generator."""
    base = int(torch.randint(2**62, ()))
    return [mix_seed("drawn", base, position) for position in range(count)]


@dataclass(eq=False)
class ImageTensors(LabelledImages):
    """Small images, decoded once: pixels is (N, C, S, S) uint8, of bands also float32; labels is (N,) int64."""

    pixels: Tensor
    labels: Tensor
    augment: Augmentation | None = None
    img_size: int = field(init=False)
    in_chans: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.img_size = self._side()
        super().__post_init__()

    def _side(self) -> int:
        return self.pixels.shape[-1]

    def taken(self, indices: Tensor) -> Tensor:
        """Return pixels (B, C, S, S) in the dtype of the stored ones."""
        return self.pixels.index_select(0, indices)  # 20 times faster than [indices]

    def load(self, indices: Sequence[int], seeds: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        index = torch.as_tensor(indices, dtype=torch.long)
        pixels, labels = self.taken(index), self.labels[index]
        if self.augment is None or len(pixels) == 0:
            return pixels, labels
        seeds = drawn_seeds(len(pixels)) if seeds is None else seeds
        if only_shifts(self.augment):
            return shift_and_flip(pixels, torch.as_tensor(seeds), self.augment), labels
        return self.prepared(map(self.open, indices), seeds), labels

    def banded(self, in_chans: int) -> Self:
        if in_chans not in (1, 3):
            super().banded(in_chans)
        pixels = self.pixels
        if in_chans == 1:
            pixels = torch.cat([rgb_to_grayscale(part.float()).round().byte() for part in pixels.split(1024)])
        return replace(self, pixels=pixels, in_chans=in_chans)

    def open(self, index: int) -> Any:
        """Return the stored RGB image, or its bands (C, S, S) in [0, 1]."""
        (pixels,) = self.taken(torch.tensor([index]))
        return to_picture(pixels) if self.in_chans is None else in_unit(pixels)

    def subset(self, indices: Tensor) -> Self:
        return replace(self, pixels=self.pixels[indices], labels=self.labels[indices])

    def resized(self, img_size: int, crop_pct: float | None) -> Self:
        """Return the images unchanged: they were resized when they were decoded."""
        return self


@dataclass(eq=False)
class SmallImages(ImageTensors):
    """RGB images stored at their own size, (N, 3, H, W) uint8; an access resizes to what `ImageTensors` would hold."""

    side: int = field(kw_only=True)
    share: float | None = field(kw_only=True)
    """`crop_pct` of the resizing. That of the class stays None: nothing cuts the resized images again."""

    def _side(self) -> int:
        return self.side

    def taken(self, indices: Tensor) -> Tensor:
        pictures = map(to_picture, self.pixels.index_select(0, indices))
        resized = [to_bytes(resize_and_crop(picture, self.side, self.share)) for picture in pictures]
        return torch.stack(resized) if resized else self.pixels.new_empty(0, 3, self.side, self.side)


@dataclass(eq=False)
class ImageFiles(LabelledImages):
    """Images that are decoded at each access: files, or items of another library's data set."""

    labels: Tensor
    img_size: int
    items: Sequence[Any]
    """Arguments of `read`, one for each image: paths, or indices of the other library."""
    read: Callable[[Any], Any] = open_image
    """Return the whole RGB image, or its bands (C, H, W); raises RecastError if it cannot be read. Loader workers get a
    copy of it."""
    where: str = ""
    """Name of the data set for messages, before the item."""
    augment: Augmentation | None = field(default=None, kw_only=True)
    crop_pct: float | None = field(default=None, kw_only=True)
    in_chans: int | None = field(default=None, kw_only=True)

    def open(self, index: int) -> Any:
        """Return the RGB image at its full size, or its bands (C, H, W)."""
        image = self.read(self.items[index])
        if self.in_chans is None or isinstance(image, Tensor):
            return image
        return bands_of(image, self.in_chans, self.image_name(index))

    def banded(self, in_chans: int) -> Self:
        bands = open_bands if self.read is open_image else getattr(self.read, "bands", None)
        read = partial(bands, in_chans=in_chans, kinds={}) if bands else self.read
        return replace(self, read=read, in_chans=in_chans)

    def load(self, indices: Sequence[int], seeds: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        labels = self.labels[torch.as_tensor(indices, dtype=torch.long)]
        seeds = drawn_seeds(len(labels)) if seeds is None and self.augment is not None else seeds
        return self.prepared((self.open(index) for index in indices), seeds), labels

    def image_name(self, index: int) -> str:
        return f"{self.where} {self.items[index]}".strip()

    def subset(self, indices: Tensor) -> Self:
        return replace(self, items=[self.items[index] for index in indices.tolist()], labels=self.labels[indices])

    def own_size(self) -> int:
        """Return the median short side of a few readable images, at most 224."""
        sides = []
        for index in range(0, len(self), max(1, len(self) // SIZED)):
            with suppress(RecastError):
                image = self.open(index)
                sides.append(min(image.shape[-2:] if isinstance(image, Tensor) else image.size))
        return min(median_low(sides or [PHOTO]), PHOTO)

    def decoded(self, skip: bool, as_stored: bool = False) -> tuple[ImageTensors, list[str]]:
        """Decode all images as validation sees them; return them and the names of unreadable ones.

        as_stored: keep RGB images at their own size, if all have one that takes less memory, and resize at each access.

        Raises RecastError for the first unreadable image (`skip`: only if all are unreadable), and if the images do not
        fit into memory.
        """
        count, side, is_rgb = len(self), self.img_size, self.in_chans is None
        width, height = self.open(0).size if as_stored and is_rgb and count and self.is_readable(0) else (side, side)
        as_stored = width * height < side**2
        size = (count, self.in_chans or 3, *((height, width) if as_stored else (side, side)))
        check_memory(prod(size) * (1 if is_rgb else 4), f"{self.where} {count:,} images of {size[-1]} pixels a side")
        pixels = torch.empty(size, dtype=torch.uint8 if is_rgb else torch.float32)
        readable: list[int] = []
        bad: list[str] = []
        for index in range(count):
            try:
                image = self.open(index)
                if as_stored and image.size != (width, height):
                    return self.decoded(skip)
                if is_rgb:
                    image = to_bytes(image if as_stored else resize_and_crop(image, side, self.crop_pct))
                else:
                    image = self.transform(image)
                pixels[len(readable)] = image
                readable.append(index)
            except RecastError:
                if not skip:
                    raise
                bad.append(self.image_name(index))
        if bad and not readable:
            raise RecastError(f"no image could be read; the first is {bad[0]}")
        rows, labels = pixels[: len(readable)], self.labels[readable]
        if as_stored:
            return SmallImages(rows, labels, self.augment, side=side, share=self.crop_pct), bad
        return ImageTensors(rows, labels, self.augment, in_chans=self.in_chans), bad


@dataclass
class RawData:
    """A data set as its source gives it, before held-out images, subsets, sizes and augmentation make it `Data`."""

    name: str
    train: LabelledImages | None
    """None: the data can only be evaluated on."""
    val: LabelledImages | None
    """None: a share of the training images is to be held out."""
    classes: list[str] | None
    """None: the labels are their only names."""
    norm: Stats = IMAGENET
    crop: Crop | None = None
    """None: by size."""
    flip: bool = True
    in_memory: bool = False
    """True for small images: they are decoded once, by default at the size of the files."""
    is_held_out: bool = False
    """`val` was a share of the training images, and no part of its own."""
    kinds: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Groups of classes that are also measured separately: name → classes."""
    notes: Sequence[str] = ()
    """Notes on chosen and skipped folders and files."""
