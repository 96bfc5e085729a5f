"""Map-style data sets of (image, label) pairs: kept in memory as bytes, or read from files.

Shapes: B images of C = 3 channels and S x S pixels, float32 in [0, 1].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchvision.transforms import v2

from recast.data.images import open_image, resize_and_crop, to_pixels

Augment = Literal["none", "crop", "crop_flip", "imagenet"]


class LabelledImages(Dataset[tuple[Tensor, int]]):
    """What every data set here can do. Augmentation draws from the global generators (torch, numpy, random)."""

    labels: Tensor
    """(N,) int64."""

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Images (B, C, S, S) and labels (B,) of the indices, stacked."""
        raise NotImplementedError

    def subset(self, indices: Tensor) -> Self:
        """The same data set with these items only, in this order."""
        raise NotImplementedError

    def augmented(self, augment: Augment) -> Self:
        """The same images with this augmentation."""
        raise NotImplementedError

    def plain(self) -> Self:
        """The same images without augmentation."""
        return self.augmented("none")

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        images, labels = self.batch(indices)
        return list(zip(images.unbind(), labels.tolist(), strict=True))

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} images")
        return self.__getitems__([index])[0]


@dataclass(frozen=True, eq=False)
class ImageTensors(LabelledImages):
    """Small images, decoded once: pixels is (N, 3, S, S) uint8, labels is (N,) int64."""

    pixels: Tensor
    labels: Tensor
    augment: Augment = "none"

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices, dtype=torch.long)
        return augment_batch(self.pixels[chosen].float() / 255, self.augment), self.labels[chosen]

    def subset(self, indices: Tensor) -> Self:
        return replace(self, pixels=self.pixels[indices], labels=self.labels[indices])

    def augmented(self, augment: Augment) -> Self:
        return replace(self, augment=augment)


@dataclass(frozen=True, eq=False)
class ImageFiles(LabelledImages):
    """Images that are decoded each time they are asked for; an unreadable one raises RecastError with its name."""

    paths: list[str]
    labels: Tensor
    img_size: int
    augment: Augment = "none"

    def __post_init__(self) -> None:
        object.__setattr__(self, "_transform", file_transform(self.img_size, self.augment))

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        transform: Callable[[Image.Image], Tensor] = self._transform  # type: ignore[attr-defined]
        images = torch.stack([transform(open_image(self.paths[index])) for index in indices])
        return images, self.labels[torch.as_tensor(indices, dtype=torch.long)]

    def subset(self, indices: Tensor) -> Self:
        return replace(self, paths=[self.paths[index] for index in indices.tolist()], labels=self.labels[indices])

    def augmented(self, augment: Augment) -> Self:
        return replace(self, augment=augment)


def augment_batch(images: Tensor, augment: Augment) -> Tensor:
    """Augment (B, C, S, S) pixels, with one draw per image (torchvision's v2 transforms share a draw in a batch).

    crop: pad by S/8 with zeros (4 of 32), cut a random S x S window. crop_flip: and mirror half of the images.
    imagenet: a random part of 8 to 100 % of the area, resized to S x S, mirrored half of the time.
    """
    if augment == "none" or len(images) == 0:
        return images
    if augment == "imagenet":
        transform = v2.RandomResizedCrop(images.shape[-1], antialias=True)
        images = torch.stack([transform(image) for image in images])
        return torch.where(_coins(len(images))[:, None, None, None], images.flip(-1), images)
    return _shift_and_flip(images, padding=_padding(images.shape[-1]), flip=augment == "crop_flip")


def _shift_and_flip(images: Tensor, padding: int, flip: bool) -> Tensor:
    count, channels, height, width = images.shape
    top, left = torch.randint(0, 2 * padding + 1, (2, count, 1))
    rows, columns = top + torch.arange(height), left + torch.arange(width)  # (B, S): window of each image
    if flip:
        columns = torch.where(_coins(count)[:, None], columns.flip(1), columns)
    padded = F.pad(images, [padding] * 4)
    of_image, of_channel = torch.arange(count)[:, None, None, None], torch.arange(channels)[:, None, None]
    return padded[of_image, of_channel, rows[:, None, :, None], columns[:, None, None, :]]


def _coins(count: int) -> Tensor:
    return torch.rand(count) < 0.5


def _padding(img_size: int) -> int:
    return max(1, img_size // 8)


def file_transform(img_size: int, augment: Augment) -> Callable[[Image.Image], Tensor]:
    """From an RGB image to (3, S, S) pixels in [0, 1]; imagenet: timm's random resized crop, flip, RandAugment."""
    if augment == "none":
        return _EvalTransform(img_size)
    if augment == "imagenet":
        timm_transform = create_transform(
            img_size,
            is_training=True,
            auto_augment="rand-m9-mstd0.5-inc1",
            interpolation="bicubic",
            normalize=False,
        )
        return v2.Compose([timm_transform, v2.ToDtype(torch.float32, scale=True)])
    steps = [v2.RandomCrop(img_size, padding=_padding(img_size))]
    if augment == "crop_flip":
        steps.append(v2.RandomHorizontalFlip())
    return v2.Compose([_EvalTransform(img_size), *steps])


@dataclass(frozen=True)
class _EvalTransform:  # a class, not a closure: spawned loader workers pickle it
    img_size: int

    def __call__(self, image: Image.Image) -> Tensor:
        return to_pixels(resize_and_crop(image, self.img_size))
