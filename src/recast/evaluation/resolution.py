"""Suite `resolution`: top-1 on the validation images at several test sizes (T-CNN, d'Ascoli et al. 2021, Fig. 7).

The images are opened again and resized for each size; the share of an image that the crop keeps is that of the data's
own size at all of them, so that a larger size shows the same part of the image in more pixels.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from PIL import Image
from torch import Tensor

from recast.data.datasets import ImageTensors, LabelledImages
from recast.data.images import crop_fraction, middle, to_pixels
from recast.errors import RecastError
from recast.evaluation.bench import Batch, Bench, NotMeasured, Score, Source, is_correct
from recast.run.config import AugmentConfig

FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5)
"""Of the data's own side: the sizes that are measured where none are asked for."""


def parse_size(text: str) -> tuple[int, int]:
    """(height, width) of "160" or "128x192"; RecastError for anything else."""
    found = re.fullmatch(r"(\d+)(?:x(\d+))?", text.strip().lower())
    size = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if min(size) < 1:
        raise RecastError(f"sizes must be numbers such as 160, or HEIGHTxWIDTH such as 128x192, got {text!r}")
    return size


def default_sizes(side: int) -> tuple[tuple[int, int], ...]:
    """Half to one and a half of the own side, in multiples of 32 (8 below 128, 4 below 32), and the own side."""
    multiple = 32 if side >= 128 else 8 if side >= 32 else 4
    sides = {max(multiple, multiple * round(factor * side / multiple)) for factor in FACTORS if factor != 1}
    return tuple((each, each) for each in sorted({*sides, side}))


def resize_to(image: Image.Image, size: tuple[int, int], share: float) -> Image.Image:
    """The centre (height, width) of the image after the smallest bicubic resizing that covers (height, width)/share.

    For a square `recast.data.images.resize_and_crop`, with the same rounding.
    """
    image = middle(image)
    height, width = size
    tall, wide = int(height / share), int(width / share)
    if tall * image.width >= wide * image.height:
        resized = int(tall * image.width / image.height), tall
    else:
        resized = wide, int(wide * image.height / image.width)
    if resized != image.size:
        image = image.resize(resized, Image.Resampling.BICUBIC)
    left, top = round((image.width - width) / 2), round((image.height - height) / 2)
    return image.crop((left, top, left + width, top + height))


@dataclass(frozen=True, eq=False)
class ResizedImages(LabelledImages):
    """The images of `base` as (3, height, width); at the base's own size they are the same pixels."""

    base: LabelledImages
    size: tuple[int, int]
    labels: Tensor = field(init=False)
    img_size: int = field(init=False)
    augment: AugmentConfig | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", self.base.labels)
        object.__setattr__(self, "img_size", max(self.size))

    @property
    def identity(self) -> str:
        """What tells these images apart from others of the same base."""
        return f"resized {self.size}"

    def batch(self, indices: Sequence[int], seeds: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        own = self.base.img_size
        if self.size == (own, own):
            return self.base.batch(indices)
        crop_pct: float | None = getattr(self.base, "crop_pct", None)
        pixels = []
        for index in indices:
            image = open_original(self.base, index)
            whole = crop_pct is None and image.size == (own, own)  # which is left as it is at its own size
            share = 1.0 if whole else crop_pct or crop_fraction(own)
            pixels.append(to_pixels(resize_to(image, self.size, share)))
        stacked = torch.stack(pixels) if pixels else torch.empty(0, 3, *self.size)
        return stacked, self.labels[torch.as_tensor(indices, dtype=torch.long)]

    def image_name(self, index: int) -> str:
        return self.base.image_name(index)

    def subset(self, indices: Tensor) -> Self:
        return replace(self, base=self.base.subset(indices))

    def augmented(self, augment: AugmentConfig | None) -> Self:
        if augment is not None:
            raise RecastError("images of other test sizes are not augmented")
        return self


def open_original(images: LabelledImages, index: int) -> Image.Image:
    """The RGB image before any resizing; of images that are kept in memory, as they are kept."""
    if isinstance(images, ImageTensors):
        return Image.fromarray(images.pixels[index].permute(1, 2, 0).contiguous().numpy())
    opened: Image.Image = images.open(index)  # type: ignore[attr-defined]
    return opened


def sources_resolution(bench: Bench) -> list[Source]:
    """The validation images at each of options.sizes."""
    images = bench.data.val
    if not (isinstance(images, ImageTensors) or hasattr(images, "open")):
        raise NotMeasured(
            f"resolution opens the images again at every size, which the shards of {bench.data.name} do not allow: use "
            "an image folder, a zip or hfds/NAME"
        )
    asked = tuple(dict.fromkeys(parse_size(size) for size in bench.options.sizes))
    return [
        Source(f"{height}x{width}", ResizedImages(images, (height, width)), bench.data.name)
        for height, width in asked or default_sizes(images.img_size)
    ]


def score_resolution(bench: Bench, batch: Batch) -> Iterator[Score]:
    """top1@HxW; a model that cannot take a size has none, which is said once."""
    for name in bench.models:
        size = batch.source.part
        if bench.store.get(("resolution", name, size)) == "refused":
            continue
        try:
            logits = batch.logits(name)
        except (RecastError, torch.OutOfMemoryError):
            raise
        except (AssertionError, RuntimeError, ValueError, IndexError) as error:  # each network refuses in its own way
            if batch.first > 0:
                raise  # it could, for the images before these
            bench.store["resolution", name, size] = "refused"
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            warnings.warn(f"{name} cannot take images of {size} and is left out there: {reason}", stacklevel=2)
            continue
        yield Score(name, f"top1@{size}", is_correct(logits, batch.labels))
