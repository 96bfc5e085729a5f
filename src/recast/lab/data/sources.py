"""Which data sets there are: a name → training and validation images, class names, normalisation, own size."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import torch
from torch import Tensor
from torchvision.transforms.v2.functional import normalize

from recast.errors import RecastError, suggest
from recast.fields import check_fields
from recast.lab.config import AugmentConfig, DataConfig
from recast.lab.data import digits
from recast.lab.data.augment import resolve
from recast.lab.data.coarse import Coarse, coarse_classes
from recast.lab.data.datasets import Found, ImageFiles, LabelledImages
from recast.lab.data.folders import data_dir, find_archives, find_folder
from recast.lab.data.libraries import NORMS, find_in_torchvision, find_on_hub, read_vision
from recast.lab.data.loading import Loader
from recast.lab.data.seeding import choose_balanced, choose_fraction, hold_out
from recast.lab.data.shards import ImageStream, find_shards
from recast.lab.tasks import TASKS, Task

MEASURED = 2048
"""Images that a mean of the data is taken of."""


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
    coarse: Coarse | None = None
    """The coarse classes above `classes`, where they are known; None where the labels are those."""
    bad_images: tuple[str, ...] = ()
    """Images of an archive that could not be decoded and were left out (`bad_image: skip`)."""
    kinds: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Kinds of classes that are measured by themselves too."""

    @property
    def task(self) -> Task:
        """What the labels are for."""
        return TASKS[self.val.task]

    @property
    def test_size(self) -> int:
        """Side of the validation images in pixels."""
        return self.val.img_size

    def normalised(self, pixels: Tensor, device: torch.device) -> Tensor:
        """Pixels (B, 3, H, W) as the network takes them, on its device."""
        return normalize(pixels.to(device), list(self.mean), list(self.std))


def labelled_images(
    data: Data, count: int, seed: int, bad_image: Literal["stop", "skip"], device: torch.device
) -> tuple[Tensor, Tensor]:
    """At most `count` training images in the order of a seed, without augmentation, normalised; and their labels."""
    # a batch of 1 where there is no image: the loader then says that, instead of that 0 is no batch size
    source = Loader(data.train.plain(), max(1, min(count, len(data.train))), shuffle_seed=seed, bad_image=bad_image)
    images, labels = next(iter(source))
    return data.normalised(images, device), labels.to(device)


def class_images(
    data: Data, count: int, seed: int, bad_image: Literal["stop", "skip"], device: torch.device
) -> tuple[Tensor, Tensor]:
    """`labelled_images` with one class each. Raises RecastError for data of another task."""
    if not data.task.counts_images:
        raise RecastError(f"layers are ranked on images with one class each, {data.name} is for {data.task.title}")
    return labelled_images(data, count, seed, bad_image, device)


def load_data(config: DataConfig, augment: AugmentConfig | None = None) -> Data:
    """The data set that `config` names, with the training images augmented (None: the data set's own defaults).

    Subsets (num_train, num_val, data_fraction) and splits are class-balanced and always the same. Raises RecastError
    for an unknown name, a folder that is not there, a class without images, a label out of range, an archive or
    (decoded here) image that cannot be read, an unknown crop or policy.
    """
    prefix, slash, rest = config.name.partition("/")
    sources = _SOURCES | {name: task.find for task in TASKS.values() for name in task.data_sets}
    source = _LIBRARIES.get(prefix) if slash and rest else sources.get(config.name)
    if source is None:
        known = ", ".join([*sources, *(f"{library}/NAME" for library in _LIBRARIES)])
        raise RecastError(f"unknown data set {config.name!r}: expected one of {known}.{suggest(config.name, sources)}")
    check_fields(config)  # again: it may have been changed since it was made
    for name, values in (("mean", config.mean), ("std", config.std)):
        if values not in (None, "data") and len(values) != 3:
            raise RecastError(f"data.{name} must be three numbers (R, G, B in [0, 1] pixels), got {values}")
    if config.num_train is not None and config.data_fraction is not None:
        raise RecastError("num_train and data_fraction both choose training images: give one of them")
    found = source(config)
    for note in found.notes:
        warnings.warn(note, stacklevel=2)
    return assemble(config, augment, found)


def assemble(config: DataConfig, augment: AugmentConfig | None, found: Found) -> Data:
    """`Data` of what a source found: held-out images, subsets, sizes, augmentation, and what the config leaves open.

    Raises RecastError naming an image with a wrong label.
    """
    train, val = found.train, found.val
    if val is None:
        assert train is not None
        kept, held_out = hold_out(train.labels, config.val_fraction)
        train, val = train.subset(kept), train.subset(held_out)
    elif train is None:
        train = val.subset(torch.empty(0, dtype=torch.long))
    classes = found.classes or [str(n) for n in range(int(torch.cat([train.labels, val.labels]).max()) + 1)]
    coarse = coarse_classes(config, classes)
    if config.labels == "coarse" and isinstance(val, ImageStream):
        raise RecastError("WebDataset shards are a stream, whose labels are as they are: data.labels must be fine")
    for part, images in (("training", train), ("validation", val)):
        if not isinstance(images, ImageStream):  # checks each label as it comes
            _check_labels(images, classes, part)
    skip, img_size = config.bad_image == "skip", config.img_size or val.img_size
    if found.in_memory and config.img_size is None and isinstance(val, ImageFiles):
        img_size = val.own_size(skip)
    if config.num_train is not None:
        train = train.subset(choose_balanced(train.labels, config.num_train, "num_train"))
    if config.data_fraction is not None:
        train = train.subset(choose_fraction(train.labels, config.data_fraction))
    if config.num_val is not None:
        val = val.subset(choose_balanced(val.labels, config.num_val, "num_val"))
    bad: list[str] = []
    parts: list[LabelledImages] = []
    for images, side in ((train, img_size), (val, config.test_size or img_size)):
        images = images.resized(side, config.crop_pct)
        if found.in_memory and isinstance(images, ImageFiles):
            images, names = images.decoded(skip)
            bad += names
        parts.append(images)
    train, val = parts
    train = train.augmented(resolve(augment, train.img_size, crop=found.crop, flip=found.flip))
    measured = measured_norm(train, config.bad_image) if "data" in (config.mean, config.std) else found.norm
    mean, std = (
        tuple(ours if given == "data" else given or theirs)
        for given, ours, theirs in zip((config.mean, config.std), measured, found.norm, strict=True)
    )
    if config.labels == "coarse" and coarse is not None:  # parts were chosen by fine labels: both see the same images
        train, val = (part.relabelled(coarse.of[part.labels]) for part in (train, val))
        classes, coarse = coarse.names, None
    return Data(found.name, train, val, classes, mean, std, train.img_size, coarse, tuple(bad), found.kinds)


def measured_norm(
    images: LabelledImages, bad_image: Literal["stop", "skip"]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, over the pixels of MEASURED images as validation sees them."""
    sums, count = torch.zeros(2, 3, dtype=torch.float64), 0
    for pixels, _ in islice(Loader(images.plain(), 64, shuffle_seed=0, bad_image=bad_image), MEASURED // 64):
        sums += torch.stack([(pixels.double() ** power).sum((0, 2, 3)) for power in (1, 2)])
        count += pixels[:, 0].numel()
    mean, square = sums / count
    std = (square - mean**2).clamp(min=1 / 255**2).sqrt()  # of one grey all over: a step of 8 bits
    return tuple(round(x, 4) for x in mean.tolist()), tuple(round(x, 4) for x in std.tolist())


def _check_labels(images: LabelledImages, classes: list[str], part: str) -> None:
    wrong = ((images.labels < 0) | (images.labels >= len(classes))).nonzero().flatten()
    if len(wrong):
        index = int(wrong[0])
        raise RecastError(
            f"labels must be 0 to {len(classes) - 1} ({len(classes)} classes), but {len(wrong)} {part} images have "
            f"others: {images.image_name(index)} has {int(images.labels[index])}"
        )


def _zip(config: DataConfig) -> Found:
    found = find_archives(config)
    if found is None:
        raise RecastError(
            f"name=zip needs a .zip file, or a folder with train.zip and test.zip or val.zip, got {data_dir(config)}"
        )
    return found


def _cifar(config: DataConfig) -> Found:
    """train.zip and test.zip of PNG files if the folder has them, else the files of torchvision; nothing is fetched."""
    return find_archives(config, norm=NORMS[config.name]) or read_vision(config.name, data_dir(config))


_SOURCES: dict[str, Callable[[DataConfig], Found]] = {
    **digits.SOURCES,
    "folder": find_folder,
    "zip": _zip,
    "cifar10": _cifar,
    "cifar100": _cifar,
    "imagenet": find_folder,
}

_LIBRARIES: dict[str, Callable[[DataConfig], Found]] = {
    "torch": find_in_torchvision,
    "hfds": find_on_hub,
    "wds": find_shards,
}
