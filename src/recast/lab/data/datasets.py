"""Map-style data sets of (image, label) pairs: kept in memory as bytes, or decoded each time they are asked for.

Shapes: B images of C = 3 channels and S x S pixels, float32 in [0, 1].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any, ClassVar, Self

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from recast.errors import RecastError
from recast.lab.config import Augmentation, Crop
from recast.lab.data.augment import file_transform, only_shifts, resolve, shift_and_flip
from recast.lab.data.images import PHOTO, open_image, resize_and_crop, to_bytes
from recast.lab.data.seeding import drawing, epoch_order, mix_seed

MAX_BYTES = 4 * 2**30
"""What decoded images may take in memory."""

SIZED = 15
"""Images among which the usual size is looked for."""

MAX_BAD = 100
"""So many unreadable images in a row are not a few bad files but a disk that is gone."""

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of R, G, B in [0, 1] pixels."""


class LabelledImages(Dataset[tuple[Tensor, int]]):
    """What every data set here can do."""

    labels: Tensor
    """(N,) int64."""
    img_size: int
    """Side S in pixels."""
    augment: Augmentation | None
    """What is done to an image; None: what validation does."""
    crop_pct: float | None = None
    task: ClassVar[str] = "classify"
    """Name of the task that the labels are for (`recast.lab.tasks.TASKS`)."""

    def __post_init__(self) -> None:
        if self.augment is not None:
            self.augment = resolve(self.augment, self.img_size)
        self.transform = file_transform(self.img_size, self.augment, self.crop_pct)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Sequence[int], seeds: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """Images (B, C, S, S) and labels (B,) of the indices, stacked.

        seeds: a number below 2^63 for each image, from which all of its augmentation follows, whatever else is in the
        batch. None: they are drawn from torch's global generator where there is augmentation. Raises RecastError
        naming an image that cannot be read.
        """
        raise NotImplementedError

    def image_name(self, index: int) -> str:
        """How an error names an image."""
        return f"image {index}"

    def order(self, seed: int | None, epoch: int, repeats: int) -> Iterable[Any]:
        """The items of an epoch in their order, as `epoch_order` has it: here indices."""
        return epoch_order(len(self), seed, epoch, repeats).tolist()

    def load(self, items: Sequence[Any], seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
        """As `batch`, of items of `order`."""
        return self.batch(items, seeds)

    def candidates(self, items: Sequence[Any], slot: int) -> Sequence[Any]:
        """The item in a slot of a batch, and what may take its place if it cannot be read, the nearest first."""
        return [(items[slot] + step) % len(self) for step in range(min(len(self), MAX_BAD))]

    def subset(self, indices: Tensor) -> Self:
        """The same data set with these items only, in this order."""
        raise NotImplementedError

    def relabelled(self, labels: Tensor) -> Self:
        """The same images with these labels (N,)."""
        return replace(self, labels=labels)  # type: ignore[type-var]  # every subclass is a data class

    def augmented(self, augment: Augmentation | None) -> Self:
        """The same images with this augmentation; None: without any."""
        return replace(self, augment=augment)  # type: ignore[type-var]  # every subclass is a data class

    def resized(self, img_size: int, crop_pct: float | None) -> Self:
        """The same images on `img_size` pixels, cut to that share."""
        return replace(self, img_size=img_size, crop_pct=crop_pct)  # type: ignore[type-var]  # as above

    def targets(self) -> list[str]:
        """What each image is labelled, as texts, so that other labels are noticed; none where they are not known."""
        return list(map(str, self.labels.tolist()))

    def label_source(self, index: int) -> Any:
        """A file or a tensor that holds the labels of an image; None: its text among `targets` says them all."""
        return None

    @staticmethod
    def joined(labels: Sequence[Any]) -> Any:
        """The labels of several batches as those of one."""
        return torch.cat(labels)  # type: ignore[arg-type]

    def plain(self) -> Self:
        """The same images without augmentation."""
        return self.augmented(None)

    def prepared(self, images: Iterable[Image.Image], seeds: Sequence[int] | None) -> Tensor:
        """Images → (B, 3, S, S) pixels, each transformed with the global generators seeded for it alone."""
        if self.augment is None:
            results = [self.transform(image) for image in images]
        else:
            results = []
            for image, seed in zip(images, seeds or (), strict=True):
                with drawing(seed):
                    results.append(self.transform(image))
        return torch.stack(results) if results else torch.empty(0, 3, self.img_size, self.img_size)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Any]]:
        labels: Any
        images, labels = self.batch(indices)
        if isinstance(labels, Tensor):
            labels = labels.tolist() if labels.dim() == 1 else labels.unbind()
        return list(zip(images.unbind(), labels, strict=True))

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} images")
        return self.__getitems__([index % len(self)])[0]


def drawn_seeds(count: int) -> list[int]:
    """Seeds that follow torch's global generator."""
    base = int(torch.randint(2**62, ()))
    return [mix_seed("drawn", base, position) for position in range(count)]


@dataclass(eq=False)
class ImageTensors(LabelledImages):
    """Small images, decoded once: pixels is (N, 3, S, S) uint8, labels is (N,) int64."""

    pixels: Tensor
    labels: Tensor
    augment: Augmentation | None = None
    img_size: int = field(init=False)

    def __post_init__(self) -> None:
        self.img_size = self.pixels.shape[-1]
        super().__post_init__()

    def batch(self, indices: Sequence[int], seeds: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices, dtype=torch.long)
        pixels, labels = self.pixels.index_select(0, chosen), self.labels[chosen]  # 20 times faster than [chosen]
        if self.augment is None or len(pixels) == 0:
            return pixels.float().div_(255), labels
        seeds = drawn_seeds(len(pixels)) if seeds is None else seeds
        if only_shifts(self.augment):
            return shift_and_flip(pixels, torch.as_tensor(seeds), self.augment).float().div_(255), labels
        images = (Image.fromarray(image.numpy()) for image in pixels.permute(0, 2, 3, 1).contiguous())
        return self.prepared(images, seeds), labels

    def open(self, index: int) -> Image.Image:
        """The RGB image as it is kept."""
        return Image.fromarray(self.pixels[index].permute(1, 2, 0).contiguous().numpy())

    def subset(self, indices: Tensor) -> Self:
        return replace(self, pixels=self.pixels[indices], labels=self.labels[indices])

    def resized(self, img_size: int, crop_pct: float | None) -> Self:
        """As they are: they were brought to their size when they were decoded."""
        return self


@dataclass(eq=False)
class ImageFiles(LabelledImages):
    """Images that are decoded each time they are asked for: of files, or of another library's data set."""

    labels: Tensor
    img_size: int
    items: Sequence[Any]
    """What `read` takes, one for each image: paths, or the library's own numbers."""
    read: Callable[[Any], Image.Image] = open_image
    """The whole RGB image; raises RecastError if it cannot be read. Loader workers get a copy of this function."""
    where: str = ""
    """How an error names the data set, before the item."""
    augment: Augmentation | None = field(default=None, kw_only=True)
    crop_pct: float | None = field(default=None, kw_only=True)

    def open(self, index: int) -> Image.Image:
        """The RGB image, as large as it is."""
        return self.read(self.items[index])

    def batch(self, indices: Sequence[int], seeds: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        labels = self.labels[torch.as_tensor(indices, dtype=torch.long)]
        seeds = drawn_seeds(len(labels)) if seeds is None and self.augment is not None else seeds
        return self.prepared((self.open(index) for index in indices), seeds), labels

    def image_name(self, index: int) -> str:
        return f"{self.where} {self.items[index]}".strip()

    def subset(self, indices: Tensor) -> Self:
        return replace(self, items=[self.items[index] for index in indices.tolist()], labels=self.labels[indices])

    def own_size(self, skip: bool) -> int:
        """Median short side of a few images (`skip`: of those that can be read), at most 224."""
        sides = []
        for index in range(0, len(self), max(1, len(self) // SIZED)):
            try:
                sides.append(min(self.open(index).size))
            except RecastError:
                if not skip:
                    raise
        return min(median_low(sides or [PHOTO]), PHOTO)

    def decoded(self, skip: bool) -> tuple[ImageTensors, list[str]]:
        """All images in memory as validation sees them, and the names of those that cannot be read.

        Raises RecastError naming the first of these; with `skip` they are left out instead, unless none is left. Raises
        it too for more than is kept in memory.
        """
        count, side = len(self), self.img_size
        if (needed := count * 3 * side**2) > MAX_BYTES:
            raise RecastError(
                f"{self.where.rstrip(':')}: {count} images at img_size={side} are {needed / 2**30:.1f} GiB; at most "
                f"{MAX_BYTES / 2**30:.0f} GiB are kept in memory. Use fewer (num_train), a smaller img_size, or unpack "
                "archives and use name=folder"
            )
        pixels = torch.empty(count, 3, side, side, dtype=torch.uint8)
        kept: list[int] = []
        bad: list[str] = []
        for index in range(count):
            try:
                pixels[len(kept)] = to_bytes(resize_and_crop(self.open(index), side, self.crop_pct))
                kept.append(index)
            except RecastError:
                if not skip:
                    raise
                bad.append(self.image_name(index))
        if bad and not kept:
            raise RecastError(f"not one image could be read; the first is {bad[0]}")
        return ImageTensors(pixels[: len(kept)], self.labels[kept], self.augment), bad


@dataclass
class Found:
    """What a source gives: both parts without augmentation, and the data set's own defaults."""

    name: str
    train: LabelledImages | None
    """None: there is only something to evaluate on."""
    val: LabelledImages | None
    """None: a share of the training images is held out."""
    classes: list[str] | None
    """None: they have numbers only."""
    norm: tuple[tuple[float, ...], tuple[float, ...]] = IMAGENET
    crop: Crop | None = None
    """None: by size."""
    flip: bool = True
    in_memory: bool = False
    """Small images: what is chosen of them is decoded once; their own size is that of the first one."""
    kinds: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Kinds of classes that are measured by themselves too: name → classes."""
    notes: Sequence[str] = ()
    """What was chosen, and what was left out, a line each."""
