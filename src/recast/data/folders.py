"""Directories of images: an ImageFolder tree, or images listed in an `index.csv`."""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from timm.data import ImageNetInfo
from torch import Tensor

from recast.data.images import is_image_name
from recast.data.splits import hold_out
from recast.errors import RecastError

VAL_NAMES = ("val", "test", "validation")
"""Names of the held-out part, best first."""

MAX_CLASSES = 100_000
"""More is a mistake in `index.csv`: ImageNet-22k, the largest in use, has 21,841."""


@dataclass(frozen=True)
class Listing:
    """Names of images (paths, or members of an archive) with their labels."""

    names: list[str]
    labels: Tensor

    def __getitem__(self, indices: Tensor) -> Listing:
        return Listing([self.names[index] for index in indices.tolist()], self.labels[indices])


@dataclass(frozen=True)
class Tree:
    """The two parts of a data set; train is empty where there is only something to evaluate on."""

    train: Listing
    val: Listing
    classes: list[str]


def list_folder(root: Path, val_fraction: float = 0.1) -> Tree:
    """Read an image directory: `index.csv`, or train/ and val/ (or test/), or class folders.

    Where there is no validation part, `val_fraction` of every class is held out, always the same images.

    Raises RecastError when there is no image, a class has none, or train/ and val/ have different classes.
    """
    if not root.is_dir():
        raise RecastError(f"no such data folder: {root}")
    if (root / "index.csv").is_file():
        return _list_index(root)
    train = root / "train"
    val = next((root / name for name in VAL_NAMES if (root / name).is_dir()), None)
    if not train.is_dir() and val is None:
        return split_tree(*_list_classes(root), val_fraction)
    if val is None:
        return split_tree(*_list_classes(train), val_fraction)
    if not train.is_dir():
        listing, classes = _list_classes(val)
        return Tree(Listing([], torch.empty(0, dtype=torch.long)), listing, classes)
    return join_tree(_list_classes(train), _list_classes(val), str(train), str(val))


def join_tree(train: tuple[Listing, list[str]], val: tuple[Listing, list[str]], train_at: str, val_at: str) -> Tree:
    """The tree of two listings, whose classes must be the same."""
    if train[1] != val[1]:
        only_train, only_val = sorted(set(train[1]) - set(val[1])), sorted(set(val[1]) - set(train[1]))
        found = "; ".join(
            f"only in {where}: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
            for where, names in ((train_at, only_train), (val_at, only_val))
            if names
        )
        raise RecastError(f"training and validation must have the same class folders, but {found}")
    return Tree(train[0], val[0], train[1])


def split_tree(listing: Listing, classes: list[str], val_fraction: float) -> Tree:
    """Hold out `val_fraction` of every class, always the same images."""
    train, val = hold_out(listing.labels, val_fraction)
    return Tree(listing[train], listing[val], classes)


def label_by_class(members: dict[str, list[str]], where: str) -> tuple[Listing, list[str]]:
    """Labels in the order of the sorted class folders; raises RecastError on a class without an image, naming it."""
    classes = sorted(members)
    if not classes:
        raise RecastError(f"no class folders with images in {where}: expected CLASS/IMAGE.png and so on")
    for name in classes:
        if not members[name]:
            raise RecastError(f"class folder without an image: {name} in {where}. Add images or remove the folder")
    names = [name for label in classes for name in sorted(members[label])]
    counts = torch.tensor([len(members[label]) for label in classes])
    return Listing(names, torch.arange(len(classes)).repeat_interleave(counts)), classes


def _list_classes(root: Path) -> tuple[Listing, list[str]]:
    members = {}
    for entry in os.scandir(root):
        if entry.is_dir() and not entry.name.startswith("."):
            members[entry.name] = [
                os.path.join(folder, name)
                for folder, _, names in os.walk(entry.path, followlinks=True)
                for name in names
                if is_image_name(name)
            ]
    return label_by_class(members, str(root))


def _list_index(root: Path) -> Tree:
    """All images are validation; the columns `file` and `class_index` give path and label, `wnid` and `name` names."""
    path = root / "index.csv"
    names, labels, class_names, wnids = [], [], {}, {}
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        missing = {"file", "class_index"} - set(reader.fieldnames or ())
        if missing:
            raise RecastError(f"{path} must have columns file and class_index, missing: {', '.join(sorted(missing))}")
        for row in reader:
            index = row["class_index"] or ""
            if not index.isdecimal():
                raise RecastError(f"{path} line {reader.line_num}: class_index must be 0, 1, 2 ..., got {index!r}")
            if int(index) >= MAX_CLASSES:
                where = f"{path} line {reader.line_num} ({row['file']})"
                raise RecastError(f"{where}: class_index must be below {MAX_CLASSES}, got {index}")
            names.append(str(root / row["file"]))
            labels.append(int(index))
            class_names[int(index)] = row.get("name") or row.get("wnid") or index
            wnids[int(index)] = row.get("wnid")
    if not names:
        raise RecastError(f"{path} lists no image")
    for name in names:
        if not Path(name).is_file():
            raise RecastError(f"{path} lists an image that does not exist: {name}")
    empty = Listing([], torch.empty(0, dtype=torch.long))
    return Tree(empty, Listing(names, torch.tensor(labels)), _class_names(class_names, wnids))


def _class_names(known: dict[int, str], wnids: dict[int, str | None]) -> list[str]:
    """A name for every class index: for a part of ImageNet-1k (told by its wnids) all 1,000, else up to the largest."""
    imagenet = ImageNetInfo("imagenet-1k")
    size = imagenet.num_classes()
    if all(index < size and imagenet.index_to_label_name(index) == wnid for index, wnid in wnids.items()):
        return [known.get(index) or imagenet.index_to_description(index) for index in range(size)]
    return [known.get(index, str(index)) for index in range(max(known) + 1)]
