"""torch/NAME and hfds/NAME: data sets of torchvision, and of Hugging Face (the hub, its cache, a local folder).

timm's readers and torchvision's classes alike give an item by its number, which begins with an image or an open file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timm.data.dataset_factory import create_dataset
from torch import Tensor
from torch.utils.data import ConcatDataset
from torchvision import datasets as vision

from recast.errors import RecastError, first_line, optional_package, suggest
from recast.lab.config import DataConfig
from recast.lab.data.datasets import IMAGENET, Found, ImageFiles
from recast.lab.data.folders import data_dir
from recast.lab.data.images import PHOTO, decode_errors, open_image, to_rgb
from recast.lab.data.parts import choose_parts, parts_note

NORMS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "mnist": ((0.1307,) * 3, (0.3081,) * 3),
    "fashion_mnist": ((0.2860,) * 3, (0.3530,) * 3),
}
CHARACTERS = ("mnist", "kmnist", "qmnist")
"""Mirrored, they are other characters or none."""

TIMM = ("cifar10", "cifar100", "mnist", "kmnist", "fashion_mnist", "qmnist", "places365", "inaturalist")
"""timm's `create_dataset` maps train and validation to the arguments of these."""
SPLITS = {
    "Flowers102": (("train", "val"), "test"),  # the papers train on both: 2,040 images
    "StanfordCars": (("train",), "test"),
    "Food101": (("train",), "test"),
    "OxfordIIITPet": (("trainval",), "test"),
    "FGVCAircraft": (("trainval",), "test"),
    "DTD": (("train", "val"), "test"),
}
"""torchvision's others: what is trained on, and what is validated on."""


def _image(dataset: Any, where: str, index: int) -> Image.Image:
    name = f"{where} {index}"
    with decode_errors(name):
        found = dataset[index][0]
        if isinstance(found, Image.Image):
            return to_rgb(found)
    with found:
        return open_image(found, name)


def _images(dataset: Any, labels: Tensor, where: str) -> ImageFiles:
    return ImageFiles(labels, PHOTO, range(len(labels)), partial(_image, dataset, where), where)


def pick_splits(where: str, splits: Collection[str]) -> tuple[str | None, str | None]:
    """The splits to train and to validate on; either may be missing, not both."""
    train, val = choose_parts(splits, where)
    if train is None and val is None:
        raise RecastError(f"{where} has the splits {', '.join(splits)}: expected train, validation or test")
    return train, val


def find_in_torchvision(config: DataConfig) -> Found:
    """torch/NAME in data_dir, laid out as torchvision does. Raises RecastError for an unknown name or missing files."""
    asked = config.name.partition("/")[2]
    known = {_plain(name): name for name in (*TIMM, *SPLITS)}
    if _plain(asked) not in known:
        expected = f"expected one of {', '.join(known.values())}.{suggest(asked, known.values())}"
        raise RecastError(f"unknown data set torch/{asked}: {expected}")
    return read_vision(known[_plain(asked)], data_dir(config))


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


def read_vision(name: str, root: Path) -> Found:
    """The data set at `root`; nothing is fetched. What torchvision holds in memory is packed, the rest is decoded."""
    train_splits, val_split = SPLITS.get(name, (("train",), "validation"))
    train, train_labels = zip(*(_opened(name, root, split) for split in train_splits), strict=True)
    val, val_labels = _opened(name, root, val_split)
    names = getattr(val, "classes", None) or getattr(val, "all_categories", None)
    in_memory = hasattr(val, "data")
    return Found(
        name,
        _images(ConcatDataset(train), torch.cat(train_labels), f"torch/{name} train"),
        _images(val, val_labels, f"torch/{name} validation"),
        [str(one) for one in names] if names else None,
        NORMS.get(name, IMAGENET),
        crop=None if in_memory else "random",
        flip=name not in CHARACTERS,
        in_memory=in_memory,
    )


def _opened(name: str, root: Path, split: str) -> tuple[Any, Tensor]:
    """A split and its labels."""
    vision_class = next(known for known in vision.__all__ if known.lower() == _plain(name))
    try:
        if name in TIMM:
            part = create_dataset(f"torch/{name}", root=str(root), split=split, download=False)
        else:
            part = getattr(vision, vision_class)(root, split=split)
        labels = _labels(part)
        if len(labels) != len(part):
            raise ValueError(f"{len(part)} images, but {len(labels)} labels")
        return part, labels
    except Exception as error:  # of damaged files torchvision's readers raise whatever they stumble over
        option = "" if name in TIMM else f", split={split!r}"
        get = f"from torchvision.datasets import {vision_class}; {vision_class}({str(root)!r}{option}, download=True)"
        reason = first_line(error).rstrip(".")
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


def find_on_hub(config: DataConfig) -> Found:
    """hfds/NAME: NAME on the hub (what is cached works offline), or a local folder; data_dir is the cache.

    The image column is the first that holds images, the label column the first with named classes, else `label`. Raises
    RecastError for a data set that cannot be loaded and for one without images, labels or a train or validation split.
    """
    name = config.name.partition("/")[2]
    cache = None if config.data_dir is None else str(Path(config.data_dir).expanduser())
    splits = _hub_splits(config.name, name, cache)
    train, val = pick_splits(config.name, splits)
    image_key, label_key, names = _columns(config.name, next(iter(splits.values())).features)

    def images(split: str | None) -> ImageFiles | None:
        from timm.data.readers.reader_hfds import ReaderHfds

        if split is None:
            return None
        reader = ReaderHfds(name, root=cache, split=split, input_key=image_key, target_key=label_key)
        labels, where = reader.dataset[label_key][:], f"{config.name} {split}"
        if None in labels:
            raise RecastError(f"{where} {labels.index(None)} has no label")
        return _images(reader, torch.tensor(labels, dtype=torch.long), where)

    return Found(name, images(train), images(val), names, notes=parts_note(config.name, train, val, splits))


def _hub_splits(full_name: str, name: str, cache: str | None) -> Mapping[str, Any]:
    datasets = optional_package("datasets", "datasets", "hfds/NAME needs another package")
    try:
        return datasets.load_dataset(name, cache_dir=cache)
    except (ValueError, OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise RecastError(f"cannot load {full_name}: {first_line(error).rstrip('.')}") from None


def _columns(full_name: str, features: Mapping[str, Any]) -> tuple[str, str, list[str] | None]:
    """Names of the columns of images and of labels, and the names of the classes where the data set has them."""
    import datasets

    image = next((key for key, feature in features.items() if isinstance(feature, datasets.Image)), None)
    named = next((key for key, feature in features.items() if isinstance(feature, datasets.ClassLabel)), None)
    numbered = str(getattr(features.get("label"), "dtype", "")).startswith(("int", "uint"))
    label = named or ("label" if numbered else None)
    if image is None or label is None:
        raise RecastError(
            f"{full_name} has the columns {', '.join(features)}: expected one of images and one of labels "
            "(named classes, or whole numbers called label)"
        )
    return image, label, list(features[named].names) if named else None
