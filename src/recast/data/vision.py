"""torch/NAME: data sets of torchvision, those that timm maps and others that papers fine-tune on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data.dataset_factory import create_dataset
from torch import Tensor
from torch.utils.data import ConcatDataset
from torchvision import datasets

from recast.data.datasets import ImageTensors, IndexedImages
from recast.data.images import decode_errors, stack_images, to_rgb
from recast.data.parts import IMAGENET, Found, Normalisation, chosen_train, chosen_val, data_dir, sizes
from recast.errors import RecastError, suggest
from recast.run.config import DataConfig

NORMS: dict[str, Normalisation] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "mnist": ((0.1307,) * 3, (0.3081,) * 3),
    "fashion_mnist": ((0.2860,) * 3, (0.3530,) * 3),
}
CHARACTERS = ("mnist", "kmnist", "qmnist")
"""Mirrored, they are other characters or none."""

_TIMM = {
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "mnist": "MNIST",
    "kmnist": "KMNIST",
    "fashion_mnist": "FashionMNIST",
    "qmnist": "QMNIST",
    "places365": "Places365",
    "inaturalist": "INaturalist",
}
"""Names of timm's `create_dataset` and torchvision's classes."""

_SPLITS: dict[str, tuple[tuple[str, ...], str]] = {
    "Flowers102": (("train", "val"), "test"),  # the papers train on both: 2,040 images
    "StanfordCars": (("train",), "test"),
    "Food101": (("train",), "test"),
    "OxfordIIITPet": (("trainval",), "test"),
    "FGVCAircraft": (("trainval",), "test"),
    "DTD": (("train", "val"), "test"),
}
"""torchvision's others: what is trained on, and what is validated on."""


def find_in_torchvision(config: DataConfig) -> Found:
    """torch/NAME in data_dir, laid out as torchvision does. Raises RecastError for an unknown name or missing files."""
    return read_vision(config, _known(config.name.partition("/")[2]), data_dir(config))


def read_vision(config: DataConfig, name: str, root: Path) -> Found:
    """The data set at `root`; nothing is fetched. What torchvision holds in memory is packed, the rest is decoded."""
    train_splits, val_split = _SPLITS.get(name, (("train",), "validation"))
    train = [_opened(name, root, split) for split in train_splits]
    val = _opened(name, root, val_split)
    labels = torch.cat([_labels(part) for part in train]), _labels(val)
    classes = _classes(val, labels[0])
    norm, flip = NORMS.get(name, IMAGENET), name not in CHARACTERS
    if hasattr(val, "data"):
        train_size, test_size = sizes(config, int(val.data.shape[1]))
        packed_train = _packed(train[0], labels[0], chosen_train(config, labels[0]), train_size, config)
        packed_val = _packed(val, labels[1], chosen_val(config, labels[1]), test_size, config)
        return Found(name, packed_train, packed_val, classes, norm, flip=flip, chosen=True)
    train_size, test_size = sizes(config, 224)

    def indexed(part: Any, part_labels: Tensor, img_size: int, where: str) -> IndexedImages:
        read, rows = _Reader(part, where), torch.arange(len(part_labels))
        return IndexedImages(part_labels, img_size, crop_pct=config.crop_pct, read=read, rows=rows, where=where)

    train_images = indexed(ConcatDataset(train), labels[0], train_size, f"torch/{name} train")
    val_images = indexed(val, labels[1], test_size, f"torch/{name} validation")
    return Found(name, train_images, val_images, classes, norm, crop="random", flip=flip)


def _known(name: str) -> str:
    """The name in our tables, whatever its case and underscores."""
    spellings = {known.lower().replace("_", ""): known for known in (*_TIMM, *_SPLITS)}
    found = spellings.get(name.lower().replace("_", ""))
    if found is None:
        known = ", ".join(spellings.values())
        raise RecastError(f"unknown data set torch/{name}: expected one of {known}.{suggest(name, spellings.values())}")
    return found


def _opened(name: str, root: Path, split: str) -> Any:
    vision_class = _TIMM.get(name, name)
    try:
        if name in _TIMM:
            return create_dataset(f"torch/{name}", root=str(root), split=split, download=False)
        return getattr(datasets, vision_class)(root, split=split)
    except (RuntimeError, OSError, EOFError, ImportError) as error:
        option = "" if name in _TIMM else f", split={split!r}"
        get = f"from torchvision.datasets import {vision_class}; {vision_class}({str(root)!r}{option}, download=True)"
        reason = str(error).splitlines()[0].rstrip(".")
        archives = " or train.zip and test.zip" if name.startswith("cifar") else ""
        raise RecastError(
            f"{name} is not in {root}: expected the files of torchvision{archives} ({reason}). "
            f'To download it: python -c "{get}"'
        ) from None


def _labels(part: Any) -> Tensor:
    """Labels without decoding an image: torchvision keeps them under one of these names."""
    for name in ("targets", "_labels"):
        if hasattr(part, name):
            labels = torch.as_tensor(getattr(part, name), dtype=torch.long)
            return labels if labels.dim() == 1 else labels[:, 0]  # QMNIST: the class, then the writer and so on
    pairs = part.index if hasattr(part, "index") else [(label, path) for path, label in part._samples]
    return torch.tensor([label for label, _ in pairs], dtype=torch.long)


def _classes(part: Any, labels: Tensor) -> list[str]:
    names = getattr(part, "classes", None) or getattr(part, "all_categories", None)
    return [str(name) for name in names] if names else [str(label) for label in range(int(labels.max()) + 1)]


def _packed(part: Any, labels: Tensor, chosen: Tensor, img_size: int, config: DataConfig) -> ImageTensors:
    images = (to_rgb(Image.fromarray(np.asarray(part.data[index]))) for index in chosen.tolist())
    pixels = stack_images(images, len(chosen), img_size, config.name, config.crop_pct)
    return ImageTensors(pixels, labels[chosen])


@dataclass(frozen=True)
class _Reader:
    dataset: Any
    where: str

    def __call__(self, index: int) -> Image.Image:
        with decode_errors(f"{self.where} {index}"):
            return to_rgb(self.dataset[index][0])
