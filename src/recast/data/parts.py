"""From what a source found to `Data`: subsets, sizes, augmentation, checks."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from recast.data.augment import resolve
from recast.data.datasets import LabelledImages
from recast.data.splits import choose_balanced, choose_fraction
from recast.data.streaming import ImageStream
from recast.errors import RecastError
from recast.run.config import AugmentConfig, Crop, DataConfig

Normalisation = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of R, G, B in [0, 1] pixels."""

VAL_SPLITS = ("validation", "val", "valid", "test")
"""Names that libraries give the held-out split, best first."""

IMAGENET: Normalisation = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Data:
    """Images of one data set. Items of `train` and `val` are (float32 (3, S, S) in [0, 1], int label)."""

    name: str
    train: LabelledImages
    """With augmentation; `train.plain()` is without. Empty where there is only something to evaluate on."""
    val: LabelledImages
    classes: list[str]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    img_size: int
    """Side of the training images in pixels."""
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    """What is done to the training images, with nothing left open."""
    bad_images: tuple[str, ...] = ()
    """Images of an archive that could not be decoded and were left out (`bad_image: skip`)."""

    @property
    def test_size(self) -> int:
        """Side of the validation images in pixels."""
        return self.val.img_size


@dataclass(frozen=True)
class Found:
    """What a source gives: both parts without augmentation, each at its own size, and the data set's own defaults."""

    name: str
    train: LabelledImages
    val: LabelledImages
    classes: list[str]
    norm: Normalisation = IMAGENET
    crop: Crop | None = None
    """None: by size."""
    flip: bool = True
    chosen: bool = False
    """The subsets that the config asks for are taken already."""
    bad_images: tuple[str, ...] = ()


def check_config(config: DataConfig) -> None:
    """Raise RecastError for numbers that no data set can be prepared with."""
    for name in ("img_size", "test_size"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise RecastError(f"{name} must be at least 1, got {value}")
    if config.crop_pct is not None and not 0 < config.crop_pct <= 1:
        raise RecastError(f"crop_pct must be above 0 and at most 1, got {config.crop_pct}")
    for name, values in (("mean", config.mean), ("std", config.std)):
        if values is not None and (len(values) != 3 or not all(math.isfinite(value) for value in values)):
            raise RecastError(f"{name} must be three numbers (R, G, B in [0, 1] pixels), got {values}")
    if config.std is not None and min(config.std) <= 0:
        raise RecastError(f"std must be positive, got {config.std}")
    if config.num_train is not None and config.data_fraction is not None:
        raise RecastError("num_train and data_fraction both choose training images: give one of them")
    if not 0 < config.val_fraction < 1:
        raise RecastError(f"val_fraction must be between 0 and 1, got {config.val_fraction}")


def sizes(config: DataConfig, own: int) -> tuple[int, int]:
    """Sides of training and validation images, where `own` is the data set's."""
    img_size = config.img_size or own
    return img_size, config.test_size or img_size


def data_dir(config: DataConfig) -> Path:
    """data_dir, or $RECAST_DATA/NAME (torch/mnist: mnist); raises RecastError for neither, or when it is not there."""
    name = config.name.partition("/")[2] or config.name
    if config.data_dir is not None:
        path = Path(config.data_dir).expanduser()
    elif os.environ.get("RECAST_DATA"):
        path = Path(os.environ["RECAST_DATA"]).expanduser() / name
    else:
        raise RecastError(
            f"where is {config.name}? Give data_dir (--data-dir DIR), or set the environment variable RECAST_DATA to "
            f"the folder that holds {name}/"
        )
    if not path.exists():
        raise RecastError(f"no such data folder: {path}")
    return path


def chosen_train(config: DataConfig, labels: Tensor) -> Tensor:
    """Indices of the training images that num_train or data_fraction leaves."""
    if config.data_fraction is not None:
        return choose_fraction(labels, config.data_fraction)
    return _chosen(labels, config.num_train, "num_train")


def chosen_val(config: DataConfig, labels: Tensor) -> Tensor:
    """Indices of the validation images that num_val leaves."""
    return _chosen(labels, config.num_val, "num_val")


def _chosen(labels: Tensor, count: int | None, option: str) -> Tensor:
    return torch.arange(len(labels)) if count is None else choose_balanced(labels, count, option)


def assemble(config: DataConfig, augment: AugmentConfig | None, found: Found) -> Data:
    """`Data` with what the config leaves open filled in; raises RecastError naming an image with a wrong label."""
    train, val = found.train, found.val
    for part, images in (("training", train), ("validation", val)):
        if not isinstance(images, ImageStream):  # checks each label as it comes
            _check_labels(images, found.classes, part)
    if not found.chosen:
        if config.num_train is not None or config.data_fraction is not None:
            train = train.subset(chosen_train(config, train.labels))
        if config.num_val is not None:
            val = val.subset(chosen_val(config, val.labels))
    resolved = resolve(augment, train.img_size, crop=found.crop, flip=found.flip)
    mean, std = tuple(config.mean or found.norm[0]), tuple(config.std or found.norm[1])
    return Data(
        found.name, train.augmented(resolved), val, found.classes, mean, std, train.img_size, resolved, found.bad_images
    )


def _check_labels(images: LabelledImages, classes: list[str], part: str) -> None:
    wrong = ((images.labels < 0) | (images.labels >= len(classes))).nonzero().flatten()
    if len(wrong):
        index = int(wrong[0])
        raise RecastError(
            f"labels must be 0 to {len(classes) - 1} ({len(classes)} classes), but {len(wrong)} {part} images have "
            f"others: {images.image_name(index)} has {int(images.labels[index])}"
        )
