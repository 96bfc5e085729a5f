"""Which data sets there are: a name -> training and validation images, class names, normalisation, own size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

from recast.data import archives, folders
from recast.data.datasets import ImageFiles, ImageTensors
from recast.data.folders import Listing
from recast.data.hub import find_on_hub
from recast.data.parts import (
    IMAGENET,
    Data,
    Found,
    Normalisation,
    assemble,
    check_config,
    chosen_train,
    chosen_val,
    data_dir,
    sizes,
)
from recast.data.shards import find_shards
from recast.data.splits import choose_balanced
from recast.data.vision import NORMS, find_in_torchvision, read_vision
from recast.errors import RecastError, suggest
from recast.run.config import AugmentConfig, DataConfig

DIGITS: Normalisation = (0.313,) * 3, (0.356,) * 3  # of the 1,297 training images at 32 x 32


def load_data(config: DataConfig, augment: AugmentConfig | None = None) -> Data:
    """The data set that `config` names, with the training images augmented (None: the data set's own defaults).

    Subsets (num_train, num_val, data_fraction) and splits are class-balanced and always the same. Raises RecastError
    for an unknown name, a folder that is not there, a class without images, a label out of range, an archive or
    (decoded here) image that cannot be read, an unknown crop or policy.
    """
    prefix, slash, rest = config.name.partition("/")
    source = _LIBRARIES.get(prefix) if slash and rest else _SOURCES.get(config.name)
    if source is None:
        known = ", ".join([*_SOURCES, *(f"{library}/NAME" for library in _LIBRARIES)])
        raise RecastError(f"unknown data set {config.name!r}: expected one of {known}.{suggest(config.name, _SOURCES)}")
    check_config(config)
    return assemble(config, augment, source(config))


def _digits(config: DataConfig) -> Found:
    """scikit-learn's 1,797 digits, 8 x 8 grey levels 0..16, enlarged (bicubic); 500 stratified ones are held out."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise RecastError('the digits come with scikit-learn: pip install "recast-vision[quickstart]"') from None
    digits = load_digits()
    labels = torch.tensor(digits.target, dtype=torch.long)
    grey = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    is_val = torch.zeros(len(labels), dtype=torch.bool)
    is_val[choose_balanced(labels, 500, "the validation part")] = True

    def enlarged(which: torch.Tensor, img_size: int) -> ImageTensors:
        side = int(img_size / (config.crop_pct or 1))
        pixels = F.interpolate(grey[which], size=(side, side), mode="bicubic").clamp(0, 1)
        edge = (side - img_size) // 2
        pixels = pixels[:, :, edge : edge + img_size, edge : edge + img_size]
        return ImageTensors((pixels * 255).round().to(torch.uint8).repeat(1, 3, 1, 1), labels[which])

    train_size, test_size = sizes(config, 32)
    train, val = enlarged(~is_val, train_size), enlarged(is_val, test_size)
    return Found("digits", train, val, [str(digit) for digit in range(10)], DIGITS, crop="pad", flip=False)


def _folder(config: DataConfig) -> Found:
    root = data_dir(config)
    tree = folders.list_folder(root, config.val_fraction)
    train, val = (
        ImageFiles(part.labels, size, paths=part.names, crop_pct=config.crop_pct)
        for part, size in zip((tree.train, tree.val), sizes(config, 224), strict=True)
    )
    name = config.name if config.name == "imagenet" else root.resolve().name
    return Found(name, train, val, tree.classes, crop="random")


def _zip(config: DataConfig) -> Found:
    path = data_dir(config)
    found = archives.find_archives(path)
    if found is None:
        raise RecastError(f"name=zip needs a .zip file, or a folder with train.zip and test.zip or val.zip, got {path}")
    return _archives(config, path.resolve().stem, *found, IMAGENET)


def _archives(config: DataConfig, name: str, train_zip: Path, val_zip: Path, norm: Normalisation) -> Found:
    tree = archives.list_archives(train_zip, val_zip, config.val_fraction)
    skip = config.bad_image == "skip"
    train_size, test_size = sizes(config, config.img_size or archives.own_size(val_zip, tree.val, skip))

    def decode(path: Path, listing: Listing, chosen: torch.Tensor, size: int) -> tuple[ImageTensors, list[str]]:
        return archives.decode(path, listing[chosen], size, config.crop_pct, skip)  # what is not used is not decoded

    train, bad = decode(train_zip, tree.train, chosen_train(config, tree.train.labels), train_size)
    val, more_bad = decode(val_zip, tree.val, chosen_val(config, tree.val.labels), test_size)
    return Found(name, train, val, tree.classes, norm, chosen=True, bad_images=(*bad, *more_bad))


def _cifar(config: DataConfig) -> Found:
    """train.zip and test.zip of PNG files if the folder has them, else the files of torchvision; nothing is fetched."""
    root = data_dir(config)
    found = archives.find_archives(root)
    if found is not None:
        return _archives(config, config.name, *found, NORMS[config.name])
    return read_vision(config, config.name, root)


_SOURCES: dict[str, Callable[[DataConfig], Found]] = {
    "digits": _digits,
    "folder": _folder,
    "zip": _zip,
    "cifar10": _cifar,
    "cifar100": _cifar,
    "imagenet": _folder,
}

_LIBRARIES: dict[str, Callable[[DataConfig], Found]] = {
    "torch": find_in_torchvision,
    "hfds": find_on_hub,
    "wds": find_shards,
}
