"""Which data sets there are: a name -> training and validation images, class names, normalisation, own size."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torchvision import datasets

from recast.config import DataConfig
from recast.data import archives, folders
from recast.data.datasets import Augment, ImageFiles, ImageTensors, LabelledImages
from recast.data.folders import Listing
from recast.data.images import SMALL, stack_images
from recast.data.splits import choose_balanced
from recast.errors import RecastError, suggest

Normalisation = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of R, G, B in [0, 1] pixels."""

IMAGENET: Normalisation = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CIFAR: dict[str, Normalisation] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
}
DIGITS: Normalisation = (0.313,) * 3, (0.356,) * 3  # of the 1,297 training images at 32 x 32


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
    augment: Augment


def load_data(config: DataConfig) -> Data:
    """The data set that `config` names.

    Subsets (num_train, num_val) and splits are class-balanced and always the same. Raises RecastError for an unknown
    name, a folder that is not there, a class without images, an archive or (decoded here) image that cannot be read.
    """
    if config.name not in _SOURCES:
        known = ", ".join(_SOURCES)
        raise RecastError(f"unknown data set {config.name!r}: expected one of {known}.{suggest(config.name, _SOURCES)}")
    if config.img_size is not None and config.img_size < 1:
        raise RecastError(f"img_size must be at least 1, got {config.img_size}")
    for field, values in (("mean", config.mean), ("std", config.std)):
        if values is not None and (len(values) != 3 or not all(math.isfinite(value) for value in values)):
            raise RecastError(f"{field} must be three numbers (R, G, B in [0, 1] pixels), got {values}")
    if config.std is not None and min(config.std) <= 0:
        raise RecastError(f"std must be positive, got {config.std}")
    return _SOURCES[config.name](config)


def _digits(config: DataConfig) -> Data:
    """scikit-learn's 1,797 digits, 8 x 8 grey levels 0..16, enlarged (bicubic); 500 stratified ones are held out."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise RecastError('the digits come with scikit-learn: pip install "recast-vision[quickstart]"') from None
    digits = load_digits()
    img_size = config.img_size or 32
    grey = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    grey = F.interpolate(grey, size=(img_size, img_size), mode="bicubic").clamp(0, 1)
    pixels = (grey * 255).round().to(torch.uint8).expand(-1, 3, -1, -1).contiguous()
    labels = torch.tensor(digits.target, dtype=torch.long)
    is_val = torch.zeros(len(labels), dtype=torch.bool)
    is_val[choose_balanced(labels, 500, "the validation part")] = True
    train, val = ImageTensors(pixels[~is_val], labels[~is_val]), ImageTensors(pixels[is_val], labels[is_val])
    return _data(config, "digits", train, val, [str(digit) for digit in range(10)], DIGITS, img_size, "crop")


def _folder(config: DataConfig) -> Data:
    root = _data_dir(config)
    tree = folders.list_folder(root)
    img_size = config.img_size or 224
    train, val = (ImageFiles(part.names, part.labels, img_size) for part in (tree.train, tree.val))
    name = config.name if config.name == "imagenet" else root.resolve().name
    return _data(config, name, train, val, tree.classes, IMAGENET, img_size, "imagenet")


def _zip(config: DataConfig) -> Data:
    path = _data_dir(config)
    found = archives.find_archives(path)
    if found is None:
        raise RecastError(f"name=zip needs a .zip file, or a folder with train.zip and test.zip or val.zip, got {path}")
    return _archives(config, path.resolve().stem, *found, IMAGENET)


def _archives(config: DataConfig, name: str, train_zip: Path, val_zip: Path, norm: Normalisation) -> Data:
    tree = archives.list_archives(train_zip, val_zip)
    img_size = config.img_size or archives.own_size(val_zip, tree.val)

    def decode(path: Path, listing: Listing, count: int | None, option: str) -> ImageTensors:
        listing = listing[_chosen(listing.labels, count, option)]  # what is not used is not decoded
        return ImageTensors(archives.decode(path, listing, img_size), listing.labels)

    train = decode(train_zip, tree.train, config.num_train, "num_train")
    val = decode(val_zip, tree.val, config.num_val, "num_val")
    augment: Augment = "crop_flip" if img_size < SMALL else "imagenet"
    return _data(config, name, train, val, tree.classes, norm, img_size, augment)


def _cifar(config: DataConfig) -> Data:
    """train.zip and test.zip of PNG files if the folder has them, else the files of torchvision; nothing is fetched."""
    root = _data_dir(config)
    norm = CIFAR[config.name]
    found = archives.find_archives(root)
    if found is not None:
        return _archives(config, config.name, *found, norm)
    source = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[config.name]
    try:
        parts = [source(root, train=train, download=False) for train in (True, False)]
    except (RuntimeError, OSError, EOFError):
        get = f"from torchvision.datasets import {source.__name__}; {source.__name__}({str(root)!r}, download=True)"
        raise RecastError(
            f"{config.name} is not in {root}: expected train.zip and test.zip, or torchvision's {source.base_folder}. "
            f'To download it: python -c "{get}"'
        ) from None
    img_size = config.img_size or 32

    def pack(part: datasets.CIFAR10, count: int | None, option: str) -> ImageTensors:
        labels = torch.tensor(part.targets, dtype=torch.long)
        chosen = _chosen(labels, count, option)
        images = (Image.fromarray(part.data[index]) for index in chosen.tolist())
        return ImageTensors(stack_images(images, len(chosen), img_size, str(root)), labels[chosen])

    train = pack(parts[0], config.num_train, "num_train")
    val = pack(parts[1], config.num_val, "num_val")
    return _data(config, config.name, train, val, list(parts[0].classes), norm, img_size, "crop_flip")


def _data(
    config: DataConfig,
    name: str,
    train: LabelledImages,
    val: LabelledImages,
    classes: list[str],
    norm: Normalisation,
    img_size: int,
    augment: Augment,
) -> Data:
    """`Data` with what the config leaves open filled in; the subsets are taken here where they were not yet."""
    augment = config.augment or augment
    if config.num_train not in (None, len(train)):
        train = train.subset(_chosen(train.labels, config.num_train, "num_train"))
    if config.num_val not in (None, len(val)):
        val = val.subset(_chosen(val.labels, config.num_val, "num_val"))
    mean, std = tuple(config.mean or norm[0]), tuple(config.std or norm[1])
    return Data(name, train.augmented(augment), val, classes, mean, std, img_size, augment)


def _chosen(labels: Tensor, count: int | None, option: str) -> Tensor:
    return torch.arange(len(labels)) if count is None else choose_balanced(labels, count, option)


def _data_dir(config: DataConfig) -> Path:
    """data_dir, or $RECAST_DATA/NAME; raises RecastError when neither is given or it does not exist."""
    if config.data_dir is not None:
        path = Path(config.data_dir).expanduser()
    elif os.environ.get("RECAST_DATA"):
        path = Path(os.environ["RECAST_DATA"]).expanduser() / config.name
    else:
        raise RecastError(
            f"where is {config.name}? Give data_dir (--data-dir DIR), or set the environment variable RECAST_DATA to "
            f"the folder that holds {config.name}/"
        )
    if not path.exists():
        raise RecastError(f"no such data folder: {path}")
    return path


_SOURCES: dict[str, Callable[[DataConfig], Data]] = {
    "digits": _digits,
    "folder": _folder,
    "zip": _zip,
    "cifar10": _cifar,
    "cifar100": _cifar,
    "imagenet": _folder,
}
