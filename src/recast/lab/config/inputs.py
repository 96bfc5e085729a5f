"""Which network, which images, and what training sees of them, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from recast.config import (
    Config,
    Count,
    CropShare,
    FilePath,
    Finite,
    MayChange,
    NotNegative,
    Pixels,
    Positive,
    ProperShare,
    Rare,
    Share,
    Workers,
    clash,
)

Crop = Literal["none", "pad", "random", "simple"]


class DataConfig(Config):
    """Images"""

    name: str = "digits"
    """digits, cifar10, cifar100, imagenet, folder, zip, torch/NAME, hfds/NAME. folder, zip: an ImageFolder tree. torch:
    torchvision; hfds: Hugging Face datasets. Segmentation: scenes, masks (folders of images and masks). Detection:
    scene_objects, coco (images and COCO's JSON)."""
    data_dir: FilePath | None = None
    """Folder with train/ and val/, or a .zip. test/, train.zip and test.zip will do too. None: $RECAST_DATA/NAME."""
    img_size: Pixels | None = None
    """Side in pixels. None: 32 for digits and CIFAR, 96 for scenes, the files' own (at most 224) for a zip and for a
    network that states no size, 224 otherwise."""
    test_size: Annotated[Pixels | None, Rare()] = None
    """Side in pixels in validation. None: img_size."""
    crop_pct: Annotated[CropShare | None, Rare()] = None
    """Share of the short side that validation's center crop keeps. None: 0.875, and 1 for small images."""
    mean: Annotated[tuple[Finite, Finite, Finite] | None, Rare()] = None
    """Per-channel mean of the normalization in [0, 1] pixels. None: what the network was trained with, if it says so
    (timm's do), else the data set's own."""
    std: Annotated[tuple[Positive, Positive, Positive] | None, Rare()] = None
    """Per-channel standard deviation of the normalization. None: as for the mean."""
    batch_size: Count = 128
    """Images per update, over all processes and accumulated parts."""
    workers: Annotated[Workers, MayChange()] = 0
    """Loader processes per process. 0 is fastest for small images held in memory."""
    num_train: Annotated[Count | ProperShare | None, Field(union_mode="left_to_right")] = None
    """Train on this many images, or on this share of every class (0.1). At least one; class-balanced, seeded. None:
    all."""
    num_val: Annotated[Count | None, Rare()] = None
    """Validate on this many images, class-balanced, seeded. None: all."""
    val_fraction: Annotated[ProperShare, Rare()] = 0.1
    """Share of every class that is held out where the data have no validation part."""
    bad_image: Annotated[Literal["stop", "skip"], Rare()] = "stop"
    """Image that cannot be read: stop and name it, or put the next image in its place, name and count it."""


class LabelsConfig(Config):
    """Labels of classes, or of coarse classes that hold several of them"""

    labels: Annotated[Literal["fine", "coarse"], Rare()] = "fine"
    """coarse: train with the labels of coarse classes, each of which holds several of the data's own, the fine ones."""
    coarse_file: Annotated[FilePath | None, Rare()] = None
    """A CSV with the columns fine and coarse, a line a class. None: CIFAR-100's 20 superclasses, or `rank`."""
    rank: Annotated[Literal["kingdom", "phylum", "class", "order", "family", "genus"] | None, Rare()] = None
    """Coarse classes by rank, from the class names of iNaturalist."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if None not in (self.coarse_file, self.rank):
            raise clash("`coarse_file` and `rank` both say what the coarse classes are; drop one of them")
        return self


class AugmentConfig(Config):
    """Augmentation"""

    crop: Crop | None = None
    """Training crop. none: as in validation. pad: shifted by up to S/8 (CIFAR's 4 of 32). random: random resized crop.
    simple: short side to S, then a random S x S window of the image padded by 4 (DeiT III). None: pad for small images,
    else random."""
    scale: tuple[Share, Share] = (0.08, 1.0)
    """Share of the area that the random crop cuts out."""
    flip: bool | None = None
    """Mirror half of the images. None: yes, but for digits."""
    color_jitter: Annotated[NotNegative, Rare()] = 0.0
    """Strength of brightness, contrast and saturation jitter. Under RandAugment and AutoAugment off, as in timm."""
    repeats: Annotated[Count, Rare()] = 1
    """Times that an image occurs in a batch. An epoch stays as long and shows 1/repeats of the images."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.scale[0] > self.scale[1]:
            raise clash(f"`scale` must be (smallest, largest) share of the area, got {self.scale}")
        return self


@dataclass(frozen=True)
class Augmentation:
    """What is done to a training image: the fields of `AugmentConfig` and of a task that concern images."""

    crop: Crop | None = None
    scale: tuple[float, float] = (0.08, 1.0)
    flip: bool | None = None
    color_jitter: float = 0.0
    auto_augment: str | None = None
    erasing: float = 0.0
    resize: tuple[float, float] = (0.5, 2.0)
