"""Settings of images, labels and augmentation, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from recast.config import Config, Count, FilePath, Finite, NotNegative, Pixels, Positive, Rare, clash, problem
from recast.lab.config.types import CropShare, MayChange, Probability, ProperShare, Share, Workers


def ordered(values: tuple[float, float]) -> tuple[float, float]:
    """Return (smallest, largest). Raises a validation error for another order."""
    if values[0] > values[1]:
        raise problem("must be (smallest, largest)")
    return values


FromData = BeforeValidator(lambda value: "data" if value in (["data"], ("data",)) else value)
"""Validator of numbers or the word data, which the command line gives as a list of one word."""
Crop = Literal["none", "pad", "random", "simple"]
SOURCES = ("digits", "one_digit", "odd_digit", "folder", "csv", "zip", "cifar10", "cifar100", "imagenet")
"""Values of `ImagesConfig.name` besides torch/NAME, hfds/NAME and the `TaskConfig.data_sets` of tasks."""
FORMATS = ("folder", "zip", "csv", "csv_multilabel", "masks", "coco")
"""Values of `ImagesConfig.name` that name a format, not a data set."""
EMBEDDED = {
    "digits": "folder",
    "one_digit": "folder",
    "odd_digit": "folder",
    "scenes": "masks",
    "scene_objects": "coco",
}
"""Values that name images of the package → the format of own images for the same task."""


def is_of_lab(name: str) -> bool:
    """Return True for a data set that needs no paper."""
    return name in (*SOURCES, "csv_multilabel") or "/" in name


class ImagesConfig(Config):
    """Images of a data set"""

    name: str = "digits"
    """Data set: digits, cifar10, cifar100, imagenet, folder, csv, zip, torch/NAME, hfds/NAME. folder, zip: an
    ImageFolder tree. csv: the images of labels_file. torch: torchvision. hfds: Hugging Face datasets. Segmentation:
    scenes, masks (folders of images and masks). Detection: scene_objects, coco (images and COCO's JSON)."""
    data_dir: FilePath | None = None
    """Folder with train/ and val/ (or test/, train.zip, test.zip), or a .zip. None: $RECAST_DATA/NAME."""
    img_size: Pixels | None = None
    """Image side in pixels. None: 32 for digits and CIFAR, 96 for scenes, the files' size (at most 224) for a zip; else
    the network's, or the files' size if it states none."""
    test_size: Annotated[Pixels | None, Rare()] = None
    """Image side in pixels in validation. None: img_size."""
    crop_pct: Annotated[CropShare | None, Rare()] = None
    """Share of the short side that validation's center crop keeps. None: 0.875, or 1 for small images."""
    mean: Annotated[tuple[Finite, ...] | Literal["data"] | None, FromData, Rare()] = None
    """Per-channel mean of the normalization in [0, 1] pixels, or data: measured on training images. None: that of the
    network's training, if it states one (as timm's do), else the data set's own."""
    std: Annotated[tuple[Positive, ...] | Literal["data"] | None, FromData, Rare()] = None
    """Per-channel standard deviation of the normalization, or data. None: as for the mean."""
    num_train: Annotated[Count | ProperShare | None, Field(union_mode="left_to_right")] = None
    """Number of training images, or share of every class (0.1, at least one image); class-balanced, drawn with seed.
    None: all."""
    num_val: Annotated[Count | None, Rare()] = None
    """Number of validation images, with the class shares of all. None: all."""
    val_fraction: Annotated[ProperShare, Rare()] = 0.1
    """Share of every class to hold out if the data have no validation part."""
    bad_image: Annotated[Literal["stop", "skip"], Rare()] = "stop"
    """Unreadable images. stop: raise an error that names the file. skip: use the next image instead, name and count it.
    """
    labels_file: FilePath | None = None
    """CSV or Parquet file for csv, one row per image: path below data_dir, label, optional split."""
    path_column: Annotated[str | None, Rare()] = None
    """Column of the paths in labels_file. None: path, file, filename, image, image_id, Image Index or similar."""
    label_column: Annotated[str | None, Rare()] = None
    """Column of the labels in labels_file or of hfds/NAME, or one 0/1 column per class (a,b,c). None: label, labels,
    class, Finding Labels or similar."""
    label_separator: Annotated[str | None, Rare()] = None
    """Separator of several labels in a cell; none: each cell is one label. None: lists, or | or ; if cells contain
    it."""
    group_column: Annotated[str | None, Rare()] = None
    """Column of labels_file whose equal cells (patient, video) stay together when a share is held out."""
    max_ignored: Annotated[Probability | None, Rare()] = None
    """Largest share of unknown pixels (255) in masks; more is an error. None: 0.05."""

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
        for name in ("labels_file", "path_column", "label_column", "label_separator", "group_column"):
            fits = self.name.startswith(("csv", "hfds/") if name == "label_column" else "csv")
            if getattr(self, name) is not None and not fits:
                raise clash(f"`{name}` requires `name` csv, got {self.name}")
        if self.data_dir is not None and (own := EMBEDDED.get(self.name)):
            raise clash(f"`data_dir` is not for `name` {self.name}, images of the package: `name` {own} reads your own")
        if self.max_ignored is not None and self.name != "masks":
            raise clash(f"`max_ignored` requires `name` masks, got {self.name}")
        return self


class DataConfig(ImagesConfig):
    """Images, and how they are loaded"""

    batch_size: Count = 128
    """Images per update, over all processes and accumulated parts."""
    workers: Annotated[Workers, MayChange()] = 0
    """Loader processes per training process. 0 is fastest for small images held in memory."""


class AugmentConfig(Config):
    """Augmentation"""

    crop: Crop | None = None
    """Training crop to S x S pixels. none: as in validation. pad: shifted by up to S/8 (CIFAR's 4 of 32). random:
    random resized crop. simple: short side to S, then a random S x S window of the image padded by 4 (DeiT III). None:
    pad for small images, else random."""
    scale: Annotated[tuple[Share, Share], AfterValidator(ordered)] = (0.08, 1.0)
    """Range of the random crop's area, relative to the image."""
    flip: bool | None = None
    """Mirror half of the images horizontally. None: yes, except for digits."""
    color_jitter: Annotated[NotNegative, Rare()] = 0.0
    """Strength of brightness, contrast and saturation jitter. As in timm, off with every auto_augment except 3a."""
    repeats: Annotated[Count, Rare()] = 1
    """Repeated augmentation: copies of an image per batch. An epoch is as long, with 1/repeats of the images."""


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
