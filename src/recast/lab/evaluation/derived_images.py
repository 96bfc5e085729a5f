"""Data sets derived from the images of another: at another size, or corrupted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recast.lab.data.bands import cover
from recast.lab.data.datasets import ImageFiles, ImageTensors, LabelledImages
from recast.lab.data.images import crop_fraction, resize_to, to_bytes


@dataclass(eq=False)
class DerivedImages(LabelledImages):
    """Changed images of `base`; random numbers of a change depend on the index of an image alone."""

    base: LabelledImages

    def __post_init__(self) -> None:
        self.labels, self.img_size, self.augment = self.base.labels, self.base.img_size, None

    def changed(self, index: int) -> Tensor:
        """Return the changed image (3, height, width), as bytes or in [0, 1]."""
        raise NotImplementedError

    def load(self, indices: Sequence[int], seeds: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        return torch.stack([self.changed(index) for index in indices]), self.labels[torch.as_tensor(indices)]

    def image_name(self, index: int) -> str:
        return self.base.image_name(index)


@dataclass(eq=False)
class ResizedImages(DerivedImages):
    """Images of `base` resized to (3, height, width); at the size of `base` the pixels are equal."""

    base: ImageFiles | ImageTensors
    size: tuple[int, int]

    def changed(self, index: int) -> Tensor:
        side, crop_pct = self.base.img_size, self.base.crop_pct
        if self.size == (side, side):
            return self.base.load([index])[0][0]
        image = self.base.open(index)
        size = image.shape[-2:] if isinstance(image, Tensor) else image.size
        is_whole = crop_pct is None and size == (side, side)  # `resize_and_crop` does not crop it either
        share = 1.0 if is_whole else crop_pct or crop_fraction(side)
        if isinstance(image, Tensor):
            return cover(image, self.size, share)
        return to_bytes(resize_to(image, self.size, share))
