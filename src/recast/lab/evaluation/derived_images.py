"""Data sets that are made from another one's images: at another size, or corrupted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recast.lab.data.datasets import ImageFiles, ImageTensors, LabelledImages
from recast.lab.data.images import crop_fraction, resize_to, to_pixels


@dataclass(eq=False)
class DerivedImages(LabelledImages):
    """The images of `base`, changed: what a change draws follows from the image's index alone."""

    base: LabelledImages

    def __post_init__(self) -> None:
        self.labels, self.img_size, self.augment = self.base.labels, self.base.img_size, None

    def changed(self, index: int) -> Tensor:
        """(3, height, width) of an image of `base`."""
        raise NotImplementedError

    def batch(self, indices: Sequence[int], seeds: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        return torch.stack([self.changed(index) for index in indices]), self.labels[torch.as_tensor(indices)]

    def image_name(self, index: int) -> str:
        return self.base.image_name(index)


@dataclass(eq=False)
class ResizedImages(DerivedImages):
    """The images of `base` as (3, height, width); at the base's own size they are the same pixels."""

    base: ImageFiles | ImageTensors
    size: tuple[int, int]

    def changed(self, index: int) -> Tensor:
        own, crop_pct = self.base.img_size, self.base.crop_pct
        if self.size == (own, own):
            return self.base.batch([index])[0][0]
        image = self.base.open(index)
        is_whole = crop_pct is None and image.size == (own, own)  # which is left as it is at its own size
        return to_pixels(resize_to(image, self.size, 1.0 if is_whole else crop_pct or crop_fraction(own)))
