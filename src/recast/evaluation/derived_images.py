"""Data sets that are made from another one's images: at another size, or corrupted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from recast.data.datasets import ImageFiles, ImageTensors, LabelledImages
from recast.data.images import crop_fraction, resize_to, to_pixels
from recast.errors import RecastError
from recast.run.config import AugmentConfig


@dataclass(eq=False)
class DerivedImages(LabelledImages):
    """Images of `base`, changed: what a change draws follows from the image's index in `base` alone."""

    base: LabelledImages
    rows: Tensor = field(kw_only=True, default=None)  # type: ignore[assignment]
    """(N,) int64: the index in `base` of each image; None: all of them."""
    labels: Tensor = field(init=False)
    img_size: int = field(init=False)
    augment: AugmentConfig | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.rows = torch.arange(len(self.base)) if self.rows is None else self.rows
        self.labels, self.img_size = self.base.labels[self.rows], max(self.size)

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the images."""
        return self.base.img_size, self.base.img_size

    @property
    def identity(self) -> str:
        """What tells these images apart from others of the same base."""
        raise NotImplementedError

    def changed(self, rows: list[int]) -> Tensor:
        """(B, 3, height, width) of these images of `base`."""
        raise NotImplementedError

    def batch(self, indices: Sequence[int], seeds: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices, dtype=torch.long)
        images = self.changed(self.rows[chosen].tolist()) if len(chosen) else torch.empty(0, 3, *self.size)
        return images, self.labels[chosen]

    def image_name(self, index: int) -> str:
        return self.base.image_name(int(self.rows[index]))

    def subset(self, indices: Tensor) -> Self:
        return replace(self, rows=self.rows[indices])

    def augmented(self, augment: AugmentConfig | None) -> Self:
        if augment is not None:
            raise RecastError("images that are changed for a test are not augmented")
        return self


@dataclass(eq=False)
class ResizedImages(DerivedImages):
    """The images of `base` as (3, height, width); at the base's own size they are the same pixels."""

    base: ImageFiles | ImageTensors
    target: tuple[int, int]

    @property
    def size(self) -> tuple[int, int]:
        return self.target

    @property
    def identity(self) -> str:
        return f"resized {self.size}"

    def changed(self, rows: list[int]) -> Tensor:
        own = self.base.img_size
        if self.size == (own, own):
            return self.base.batch(rows)[0]
        crop_pct = self.base.crop_pct
        pixels = []
        for row in rows:
            image = self.base.open(row)
            is_whole = crop_pct is None and image.size == (own, own)  # which is left as it is at its own size
            share = 1.0 if is_whole else crop_pct or crop_fraction(own)
            pixels.append(to_pixels(resize_to(image, self.size, share)))
        return torch.stack(pixels)
