"""Settings of images, labels and augmentation, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from recast.config import Config, Count, FilePath, Finite, NotNegative, Pixels, Positive, Rare, clash, problem
from recast.lab.config.types import CropShare, MayChange, ProperShare, Share, Workers


def ordered(values: tuple[float, float]) -> tuple[float, float]:
    """Return (smallest, largest). Raises a validation error for another order."""
    if values[0] > values[1]:
        raise problem("must be (smallest, largest)")
    return values


FromData = BeforeValidator(lambda value: "data" if value in (["data"], ("data",)) else value)
"""Validator of numbers or the word data, which the command line gives as a list of one word."""
Crop = Literal["none", "pad", "random", "simple"]
FORMATS = ("folder", "zip", "csv", "csv_multilabel", "masks", "coco")
"""Values of `ImagesConfig.name` that name a format, not a data set."""


class ImagesConfig(Config):
    """Images of a data set"""

    name: str = "digits"
    """digits, cifar10, cifar100, imagenet, folder, csv, zip, torch/NAME, hfds/NAME. folder, zip: an ImageFolder tree.
    csv: the images of labels_file. torch: torchvision; hfds: Hugging Face datasets. Segmentation: scenes, masks
    (folders of images and masks). Detection: scene_objects, coco (images and COCO's JSON)."""
    data_dir: FilePath | None = None
    """Folder with train/ and val/, or a .zip. test/, train.zip and test.zip will do too. None: $RECAST_DATA/NAME."""
    img_size: Pixels | None = None
    """Side in pixels. None: 32 for digits and CIFAR, 96 for scenes, the files' own (at most 224) for a zip; else the
    network's, or the files' own if it states none."""
    test_size: Annotated[Pixels | None, Rare()] = None
    """Side in pixels in validation. None: img_size."""
    crop_pct: Annotated[CropShare | None, Rare()] = None
    """Share of the short side that validation's center crop keeps. None: 0.875, and 1 for small images."""
    mean: Annotated[tuple[Finite, ...] | Literal["data"] | None, FromData, Rare()] = None
    """Per-channel mean of the normalization in [0, 1] pixels, or data: measured on training images. None: what the
    network was trained with, if it says so (timm's do), else the data set's own."""
    std: Annotated[tuple[Positive, ...] | Literal["data"] | None, FromData, Rare()] = None
    """Per-channel standard deviation of the normalization, or data. None: as for the mean."""
    num_train: Annotated[Count | ProperShare | None, Field(union_mode="left_to_right")] = None
    """Train on this many images, or on this share of every class (0.1). At least one; class-balanced, seeded. None:
    all."""
    num_val: Annotated[Count | None, Rare()] = None
    """Validate on this many images, class-balanced, seeded. None: all."""
    val_fraction: Annotated[ProperShare, Rare()] = 0.1
    """Share of every class that is held out where the data have no validation part."""
    bad_image: Annotated[Literal["stop", "skip"], Rare()] = "stop"
    """Image that cannot be read: stop and name it, or put the next image in its place, name and count it."""
    labels_file: FilePath | None = None
    """CSV or Parquet file with one row per image, for csv: path below data_dir, label, optional split."""
    path_column: Annotated[str | None, Rare()] = None
    """Column of the paths in labels_file. None: path, file, filename, image, image_id, Image Index or the like."""
    label_column: Annotated[str | None, Rare()] = None
    """Column of the labels in labels_file, or several (a,b,c) of 0 and 1, a class each. None: label, labels, class,
    Finding Labels or the like."""
    label_separator: Annotated[str | None, Rare()] = None
    """Text between several labels in a cell; none: a cell is one label. None: | or ; where a cell has it."""

    @property
    def title(self) -> str:
        """Name of the images on pages: that of their folder or file where `name` is a format, else of the data set."""
        if self.name not in FORMATS or self.data_dir is None:
            return self.name.partition("/")[2] or self.name
        path = Path(self.data_dir).resolve()
        return path.stem if path.suffix.lower() == ".zip" else path.name

    @model_validator(mode="after")
    def _has_its_table(self) -> Self:
        if self.name.startswith("csv") and self.labels_file is None:
            raise clash(f"`name` {self.name} requires `labels_file`, a CSV or Parquet file of paths and labels")
        for name in ("labels_file", "path_column", "label_column", "label_separator"):
            if getattr(self, name) is not None and not self.name.startswith("csv"):
                raise clash(f"`{name}` requires `name` csv, got {self.name}")
        return self


class DataConfig(ImagesConfig):
    """Images, and how they are loaded"""

    batch_size: Count = 128
    """Images per update, over all processes and accumulated parts."""
    workers: Annotated[Workers, MayChange()] = 0
    """Loader processes per process. 0 is fastest for small images held in memory."""


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
    scale: Annotated[tuple[Share, Share], AfterValidator(ordered)] = (0.08, 1.0)
    """Range of the random crop's area, relative to the image."""
    flip: bool | None = None
    """Mirror half of the images. None: yes, except for digits."""
    color_jitter: Annotated[NotNegative, Rare()] = 0.0
    """Strength of brightness, contrast and saturation jitter. Off under every policy but 3a, as in timm."""
    repeats: Annotated[Count, Rare()] = 1
    """Times that an image occurs in a batch. An epoch stays as long and shows 1/repeats of the images."""


@dataclass(frozen=True)
class Augmentation:
    """Augmentation of a training image: the fields of `AugmentConfig` and of a task that concern images."""

    crop: Crop | None = None
    scale: tuple[float, float] = (0.08, 1.0)
    flip: bool | None = None
    color_jitter: float = 0.0
    auto_augment: str | None = None
    erasing: float = 0.0
    resize: tuple[float, float] = (0.5, 2.0)
