"""Images with more than one class: masks or objects, which are cut, scaled and mirrored with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms

from recast.errors import RecastError
from recast.lab.config import Augmentation
from recast.lab.data.augment import resolve
from recast.lab.data.datasets import LabelledImages, drawn_seeds
from recast.lab.data.images import open_image


@dataclass(eq=False)
class DenseImages(LabelledImages):
    """Base class of images with masks or objects."""

    items: Sequence[str] | Tensor
    """Paths that are read at each access, or (N, 3, H, W) uint8."""
    _: KW_ONLY
    augment: Augmentation | None = None
    crop_pct: float | None = None
    labels: Tensor = field(init=False)
    """Zeros: an image has no class, so that every choice of images is a plain one."""
    have: ClassVar[str]
    """Name of the field with the masks or objects."""

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
        """Return the RGB image at its full size."""
        item = self.items[index]
        return Image.fromarray(item.permute(1, 2, 0).numpy()) if isinstance(item, Tensor) else open_image(item)

    def draw(self, index: int, seed: int) -> tuple[Tensor, Any]:
        """Return the pixels of an image and its mask or objects, as `batch` gives them."""
        raise NotImplementedError

    def drawn(self, indices: Sequence[int], seeds: Sequence[int] | None) -> list[tuple[Tensor, Any]]:
        """Return `draw` of each index, by the seeds of `batch`."""
        if seeds is None:
            seeds = drawn_seeds(len(indices)) if self.augment is not None else [0] * len(indices)
        return [self.draw(index, seed) for index, seed in zip(indices, seeds, strict=True)]

    def cut(self, size: tuple[int, int], scale: float, augment: Augmentation) -> tuple[float, list[int], list[int]]:
        """Draw a factor of `augment.resize`; return scale, sides, and the left and top corner of a random S x S cut."""
        smallest, largest = augment.resize
        scale *= smallest + (largest - smallest) * float(torch.rand(()))
        sides = [max(1, round(side * scale)) for side in size]
        return scale, sides, [int(torch.randint(max(side - self.img_size, 0) + 1, ())) for side in sides]

    def image_name(self, index: int) -> str:
        item = self.items[index]
        return f"image {index}" if isinstance(item, Tensor) else item

    def relabelled(self, labels: Tensor) -> Self:
        raise RecastError(f"images with {self.have} have no labels to change")

    def subset(self, indices: Tensor) -> Self:
        def chosen(values: Any) -> Any:
            return values[indices] if isinstance(values, Tensor) else [values[index] for index in indices.tolist()]

        return replace(self, items=chosen(self.items), **{self.have: chosen(getattr(self, self.have))})


def mirrored(augment: Augmentation) -> bool:
    """Draw whether an image is mirrored."""
    return bool(augment.flip and torch.rand(()) < 0.5)


def coloured(image: Image.Image, augment: Augmentation) -> Image.Image:
    """Return the image with random brightness, contrast and saturation."""
    jitter = augment.color_jitter
    return transforms.ColorJitter(jitter, jitter, jitter)(image) if jitter else image
