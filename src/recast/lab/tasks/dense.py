"""Images with more on them than one class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Self

import torch
from PIL import Image
from torch import Tensor

from recast.errors import RecastError
from recast.lab.config import Augmentation
from recast.lab.data.augment import resolve
from recast.lab.data.datasets import LabelledImages, drawn_seeds
from recast.lab.data.images import open_image


@dataclass(eq=False)
class DenseImages(LabelledImages):
    """Images with more on them than one class, which is cut, scaled and mirrored with them."""

    items: Sequence[str] | Tensor
    """Paths that are read each time, or (N, 3, H, W) uint8."""
    _: KW_ONLY
    augment: Augmentation | None = None
    crop_pct: float | None = None
    labels: Tensor = field(init=False)
    """Zeros: an image has no class, so every choice of images is a plain one."""
    have: ClassVar[str]
    """What is on them, for messages."""

    def __post_init__(self) -> None:
        self.labels = torch.zeros(len(self.items), dtype=torch.long)
        if self.augment is not None:
            self.augment = resolve(self.augment, self.img_size)
            if self.augment.crop not in ("none", "random") or self.augment.auto_augment is not None:
                got = f"crop={self.augment.crop}, auto_augment={self.augment.auto_augment or 'none'}"
                raise RecastError(
                    f"images with {self.have} take augment.crop none or random (scaled by augment.resize, then cut), "
                    f"flip and color_jitter, got {got}"
                )

    def open(self, index: int) -> Image.Image:
        """The RGB image, as large as it is."""
        item = self.items[index]
        return Image.fromarray(item.permute(1, 2, 0).numpy()) if isinstance(item, Tensor) else open_image(item)

    def draw(self, index: int, seed: int) -> tuple[Tensor, Any]:
        """The pixels of an image and what is on them, as `batch` gives them."""
        raise NotImplementedError

    def drawn(self, indices: Sequence[int], seeds: Sequence[int] | None) -> list[tuple[Tensor, Any]]:
        """`draw` of each, by the seeds of `batch`."""
        if seeds is None:
            seeds = drawn_seeds(len(indices)) if self.augment is not None else [0] * len(indices)
        return [self.draw(index, seed) for index, seed in zip(indices, seeds, strict=True)]

    def image_name(self, index: int) -> str:
        item = self.items[index]
        return f"image {index}" if isinstance(item, Tensor) else item

    def relabelled(self, labels: Tensor) -> Self:
        raise RecastError(f"images with {self.have} have no labels to change")


def chosen(items: Any, indices: Tensor) -> Any:
    """Some of a list or of a tensor, as what it is."""
    return items[indices] if isinstance(items, Tensor) else [items[index] for index in indices.tolist()]
