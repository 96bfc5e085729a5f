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
    rows: Tensor | None = field(default=None, kw_only=True)
    """(N,) int64: the index in `base` of each image; None: all of them."""

    def __post_init__(self) -> None:
        self.labels = self.base.labels if self.rows is None else self.base.labels[self.rows]
        self.img_size, self.augment = self.base.img_size, None

    def changed(self, rows: list[int]) -> Tensor:
        """(B, 3, height, width) of these images of `base`, of which there is one at least."""
        raise NotImplementedError

    def _in_base(self, indices: Sequence[int]) -> Tensor:
        chosen = torch.as_tensor(indices, dtype=torch.long)
        return chosen if self.rows is None else self.rows[chosen]

    def batch(self, indices: Sequence[int], seeds: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        rows = self._in_base(indices)
        return self.changed(rows.tolist()), self.base.labels[rows]

    def image_name(self, index: int) -> str:
        return self.base.image_name(int(self._in_base([index])))

    def subset(self, indices: Tensor) -> Self:
        return replace(self, rows=self._in_base(indices.tolist()))

    def augmented(self, augment: AugmentConfig | None) -> Self:
        if augment is not None:
            raise RecastError("images that are changed for a test are not augmented")
        return self


@dataclass(eq=False)
class ResizedImages(DerivedImages):
    """The images of `base` as (3, height, width); at the base's own size they are the same pixels."""

    base: ImageFiles | ImageTensors
    size: tuple[int, int]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.img_size = max(self.size)

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
