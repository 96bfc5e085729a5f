"""torch/NAME and hfds/NAME: data sets of torchvision, and of Hugging Face (the hub, its cache, a local folder).

Items of timm's readers and of torchvision's classes start with an image or an open file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timm.data.dataset_factory import create_dataset
from torch import Tensor
from torch.utils.data import ConcatDataset
from torchvision import datasets as vision

from recast.errors import RecastError, first_line, suggest
from recast.lab.config import DataConfig
from recast.lab.data.bands import bands_of, open_bands
from recast.lab.data.columns import IMAGES, LABELS, described, usual
from recast.lab.data.datasets import ImageFiles, RawData
from recast.lab.data.folders import data_dir
from recast.lab.data.images import PHOTO, decode_errors, open_image, to_rgb
from recast.lab.data.parts import choose_parts, parts_note
from recast.lab.plugins import optional_package
from recast.models.register import IMAGENET

NORMS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "mnist": ((0.1307,) * 3, (0.3081,) * 3),
    "fashion_mnist": ((0.2860,) * 3, (0.3530,) * 3),
}
CHARACTERS = ("mnist", "kmnist", "qmnist")
"""Data sets that are not flipped: a mirrored character is another one, or none."""

TIMM = ("cifar10", "cifar100", "mnist", "kmnist", "fashion_mnist", "qmnist", "places365", "inaturalist")
"""Data sets whose splits timm's `create_dataset` maps to torchvision's arguments."""
SPLITS = {
    "Flowers102": (("train", "val"), "test"),  # the papers train on both: 2,040 images
    "StanfordCars": (("train",), "test"),
    "Food101": (("train",), "test"),
    "OxfordIIITPet": (("trainval",), "test"),
    "FGVCAircraft": (("trainval",), "test"),
    "DTD": (("train", "val"), "test"),
}
"""Training and validation splits of other data sets of torchvision."""


@dataclass(frozen=True)
class Items:
    """Reads the images of a data set by their index, as `open_image` and `open_bands` read files."""

    dataset: Any
    where: str

    def __call__(self, index: int, in_chans: int | None = None) -> Any:
        name = f"{self.where} {index}"
        with decode_errors(name):
            image = self.dataset[index][0]
            if isinstance(image, Image.Image):
                return to_rgb(image) if in_chans is None else bands_of(image, in_chans, name)
        with image:
            return open_image(image, name) if in_chans is None else open_bands(image, in_chans, name)

    def bands(self, index: int, in_chans: int, kinds: object = None) -> Tensor:
        """Read an image of `in_chans` bands. All are pictures, of one kind of number."""
        bands: Tensor = self(index, in_chans)
        return bands


def _images(dataset: Any, labels: Tensor, where: str) -> ImageFiles:
    return ImageFiles(labels, PHOTO, range(len(labels)), Items(dataset, where), where)


def find_in_torchvision(config: DataConfig) -> RawData:
    """Read torch/NAME from data_dir. Raises RecastError for an unknown name or missing files; downloads nothing."""
    name = config.name.partition("/")[2]
    names = {_plain(name): name for name in (*TIMM, *SPLITS)}
    if _plain(name) not in names:
        expected = f"expected one of {', '.join(names.values())}.{suggest(name, names.values())}"
        raise RecastError(f"unknown data set torch/{name}: {expected}")
    return read_vision(names[_plain(name)], data_dir(config))


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


def read_vision(name: str, root: Path) -> RawData:
    """Read torchvision's files at `root`; sets that torchvision holds in memory are decoded once."""
    train_splits, val_split = SPLITS.get(name, (("train",), "validation"))
    train, train_labels = zip(*(_open_split(name, root, split) for split in train_splits), strict=True)
    val, val_labels = _open_split(name, root, val_split)
    names = getattr(val, "classes", None) or getattr(val, "all_categories", None)
    in_memory = hasattr(val, "data")
    return RawData(
        name,
        _images(ConcatDataset(train), torch.cat(train_labels), f"torch/{name} train"),
        _images(val, val_labels, f"torch/{name} validation"),
        list(map(str, names)) if names else None,
        NORMS.get(name, IMAGENET),
        crop=None if in_memory else "random",
        flip=name not in CHARACTERS,
        in_memory=in_memory,
    )


def _open_split(name: str, root: Path, split: str) -> tuple[Any, Tensor]:
    """Return a split and its labels."""
    title = next(title for title in vision.__all__ if title.lower() == _plain(name))
    try:
        if name in TIMM:
            dataset = create_dataset(f"torch/{name}", root=str(root), split=split, download=False)
        else:
            dataset = getattr(vision, title)(root, split=split)
        labels = _labels(dataset)
        if len(labels) != len(dataset):
            raise ValueError(f"{len(dataset)} images, but {len(labels)} labels")
        return dataset, labels
    except Exception as error:  # torchvision's readers raise errors of any kind on damaged files
        option = "" if name in TIMM else f", split={split!r}"
        download = f"from torchvision.datasets import {title}; {title}({str(root)!r}{option}, download=True)"
        archives = " or train.zip and test.zip" if name.startswith("cifar") else ""
        raise RecastError(
            f"{name} is not in {root}: expected the files of torchvision{archives} ({first_line(error).rstrip('.')}). "
            f'To download it: python -c "{download}"'
        ) from None


def _labels(dataset: Any) -> Tensor:
    """Return the labels without decoding an image, from the attributes of torchvision's classes."""
    for name in ("targets", "_labels"):
        if hasattr(dataset, name):
            labels = torch.as_tensor(getattr(dataset, name), dtype=torch.long)
            return labels if labels.dim() == 1 else labels[:, 0]  # QMNIST: the class, then the writer and so on
    pairs = dataset.index if hasattr(dataset, "index") else [(label, path) for path, label in dataset._samples]
    return torch.tensor([label for label, _ in pairs], dtype=torch.long)


def find_on_hub(config: DataConfig) -> RawData:
    """Read hfds/NAME: a data set of the Hub (cached ones offline too) or a local folder; data_dir is the cache.

    Of several image columns and columns of named classes, or integers called `label` or `cls` (WebDataset), those with
    a usual name are taken, else the first, with a note; `label_column` names others. Raises RecastError if the data set
    cannot be loaded or has no such columns, no labels, or no train or validation split.
    """
    datasets = optional_package("datasets", "datasets", "hfds/NAME requires Hugging Face datasets")
    from timm.data.readers.reader_hfds import ReaderHfds

    name = config.name.partition("/")[2]
    cache = None if config.data_dir is None else str(Path(config.data_dir).expanduser())
    try:
        splits = datasets.load_dataset(name, cache_dir=cache)
    except (ValueError, OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise RecastError(f"cannot load {config.name}: {first_line(error).rstrip('.')}") from None
    train, val = choose_parts(splits, config.name)
    if train is None and val is None:
        raise RecastError(f"{config.name} has the splits {', '.join(splits)}: expected train, validation or test")
    features = next(iter(splits.values())).features
    pictures = [key for key, feature in features.items() if isinstance(feature, datasets.Image)]
    named = [key for key, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    whole = [key for key, feature in features.items() if "int" in str(getattr(feature, "dtype", ""))]
    usual_labels = [*LABELS, "cls"]
    labels = [*named, *(key for key in whole if key in ("label", "cls") and key not in named)]
    if (asked := config.label_column) is not None:
        labels, usual_labels = [key for key in whole if key == asked], [asked]
    if not (pictures and labels):
        raise RecastError(
            f"{config.name} has the columns {', '.join(features)}: expected a column of images and one of labels "
            f"({asked or 'named classes, or integers called label'})"
        )
    image, label = (
        next((key for key in keys if usual(key) in names), keys[0])
        for keys, names in ((pictures, IMAGES), (labels, usual_labels))
    )
    notes = parts_note(config.name, train, val, splits)
    if len(pictures) > 1 or (len(labels) > 1 and asked is None):
        notes.append(
            f"{config.name}: {described({image: 'image', label: 'label'}, features)}; --label-column takes others"
        )

    def images(split: str | None) -> ImageFiles | None:
        if split is None:
            return None
        reader = ReaderHfds(name, root=cache, split=split, input_key=image, target_key=label)
        labels, where = reader.dataset[label][:], f"{config.name} {split}"
        if None in labels:
            raise RecastError(f"{where} {labels.index(None)} has no label")
        return _images(reader, torch.tensor(labels, dtype=torch.long), where)

    classes = list(features[label].names) if label in named else None
    return RawData(name, images(train), images(val), classes, notes=notes)
