"""Image folders, zips of them, and images listed in an `index.csv`. Nothing is decoded here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from timm.data import ImageNetInfo

from recast.errors import RecastError, listed, printable, shown
from recast.lab.config import DataConfig
from recast.lab.data.datasets import Found, ImageFiles
from recast.lab.data.images import PHOTO, is_hidden
from recast.lab.data.parts import HELD_OUT, choose_parts, part_word, parts_note
from recast.lab.data.trees import Archive, Disk, Files, composed, find_file, join
from recast.tables import read_table

MAX_CLASSES = 100_000
"""Upper bound of class numbers; catches typos. ImageNet-22k, the largest set in use, has 21,841 classes."""


def data_dir(config: DataConfig) -> Path:
    """Return data_dir, or $RECAST_DATA/NAME (torch/mnist: mnist). Raises RecastError if neither is set or exists."""
    name = config.name.partition("/")[2] or config.name
    root = os.environ.get("RECAST_DATA")
    if config.data_dir is None and not root:
        raise RecastError(
            f"no folder for the images of {config.name}: set data_dir (--data-dir DIR), or the environment variable "
            f"RECAST_DATA to the folder that holds {name}/"
        )
    path = (Path(root or "") / name if config.data_dir is None else Path(config.data_dir)).expanduser()
    if not path.exists():
        raise RecastError(f"no such data folder: {path}")
    return path


def _images(files: Files, place: str, classes: Mapping[str, list[str]]) -> ImageFiles:
    """Return the images with labels in the order of the class names. Raises RecastError for a class without images."""
    where, names = files.where(place), sorted(classes)
    if not names:
        raise RecastError(f"no class folders with images in {where}: expected CLASS/IMAGE.png")
    if empty := [name for name in names if not classes[name]]:
        reason = "".join(f" ({note})" for note in files.notes())
        raise RecastError(f"class folder without an image: {empty[0]} in {where}{reason}; add images or remove it")
    counts = torch.tensor([len(classes[name]) for name in names])
    labels = torch.arange(len(names)).repeat_interleave(counts)
    items = [item for name in names for item in sorted(classes[name])]
    return ImageFiles(labels, PHOTO, items, files.read, files.prefix)


def _classes(files: Files, place: str, two_levels: bool) -> dict[str, list[str]]:
    """Return the images of every class. Raises RecastError for two folders whose printed names are equal."""
    folders = list(files.inside(place).folders)
    files.skip_beside(place)
    if two_levels:
        for name in folders:
            files.skip_beside(join(place, name))
        folders = [join(name, inner) for name in folders for inner in files.inside(join(place, name)).folders]
    classes: dict[str, list[str]] = {}
    for name in sorted(folders):
        title = printable(composed(name))
        if title in classes:
            raise RecastError(f"{files.where(place)} has two class folders {title}, spelled differently; rename one")
        classes[title] = list(files.images(join(place, name)))
    return classes


def _assemble(name: str, parts: Sequence[tuple[Files, str] | None], two_levels: bool, **defaults: Any) -> Found:
    """Return both parts, one of which may be None. Raises RecastError if their classes differ."""
    for files, place in filter(None, parts):
        if place:
            files.check(place)
    trees = [part and (*part, _classes(*part, two_levels)) for part in parts]
    train, val = (tree and _images(*tree) for tree in trees)
    present = [tree for tree in trees if tree]
    if train and val and present[0][2].keys() != present[1][2].keys():
        (first, second), titles = (tree[2].keys() for tree in present), [tree[0].where(tree[1]) for tree in present]
        only = [f"only in {title}: {listed(sorted(names), 5)}"
                for title, names in zip(titles, (first - second, second - first), strict=True) if names]  # fmt: skip
        raise RecastError(f"class folders of training and validation differ: {'; '.join(only)}")
    notes = [note for files in dict.fromkeys(tree[0] for tree in present) for note in files.notes()]
    return Found(name, train, val, sorted(present[0][2]), notes=[*defaults.pop("notes", ()), *notes], **defaults)


def find_folder(config: DataConfig, two_levels: bool = False) -> Found:
    """Read an image folder: `index.csv`, a training and a held-out part, or class folders alone.

    With `two_levels`, class folders lie in folders of their coarse classes. Raises RecastError if there are no images,
    a class has none, or the parts have different classes.
    """
    root = data_dir(config)
    if not root.is_dir():
        raise RecastError(f"{root} is not a folder; use name=zip (--data zip) for an archive")
    name = config.name if config.name == "imagenet" else root.resolve().name
    if (root / "index.csv").is_file():
        return Found(name, None, *_read_index(root), crop="random")
    return _find_in(Disk(root), name, two_levels, crop="random")


def _find_in(files: Files, name: str, two_levels: bool, **defaults: Any) -> Found:
    top = _descend(files, "", False)
    train, val = _parts(files, top, two_levels)
    if train is None and val is None:
        return _assemble(name, [(files, top), None], two_levels, **defaults)
    files.skip_beside(top)
    notes = parts_note(files.where(top), train, val, files.inside(top).folders)
    parts = [(files, _descend(files, join(top, part), not two_levels)) if part else None for part in (train, val)]
    return _assemble(name, parts, two_levels, notes=notes, **defaults)


def _descend(files: Files, place: str, is_part: bool) -> str:
    """Return the place below the folders that all images share, which are not classes: pets/images/CLASS/1.png.

    Inside a part the descent stops where images lie beside the folder, outside of one at a folder named as a part.
    """
    while True:
        here = files.inside(place)
        inner = {name: files.inside(join(place, name)) for name in here.folders}
        filled = [name for name, listing in inner.items() if listing.folders or listing.images]
        if len(filled) != 1 or not inner[filled[0]].folders:
            return place
        if here.images or inner[filled[0]].images if is_part else part_word(filled[0]):
            return place
        files.skip_beside(place)
        place = join(place, filled[0])


def _parts(files: Files, top: str, two_levels: bool) -> tuple[str | None, str | None]:
    """Return the folders of the training and of the held-out part; None twice if all folders are classes.

    A class may be called train, as in CIFAR-100: a part holds class folders, or all folders have the name of a part.
    Raises RecastError if folders with other names hold the same class folders.
    """
    inner = {name: files.inside(join(top, name)).folders.keys() for name in files.inside(top).folders}
    named = [name for name in inner if part_word(name)]
    if (parted := [name for name in named if inner[name]]) or len(named) < len(inner):
        named = parted
    train, val = choose_parts(named, files.where(top))
    if train is None and val and len(inner) > 1 and val.lower() not in HELD_OUT:
        val = None  # a class such as test_tubes
    if val is None and not two_levels:
        several = sorted((name for name in inner if len(inner[name]) > 1), key=lambda name: len(inner[name]))
        for first, second in combinations(several, 2):
            if inner[first] <= inner[second]:
                raise RecastError(
                    f"{first} and {second} in {files.where(top)} hold the same folders "
                    f"({listed(sorted(inner[first]), 3)}): name the parts train and val and move other folders away; "
                    "if they are classes, give --rank folder and --labels coarse"
                )
    return train, val


def _read_index(root: Path) -> tuple[ImageFiles, list[str]]:
    """Read validation images from `index.csv`: columns `file`, `class_index`, and `wnid` or `name` of the class."""
    path = root / "index.csv"
    table = read_table(path)
    if missing := {"file", "class_index"}.difference(table.columns):
        raise RecastError(f"{path} must have columns file and class_index, missing: {', '.join(sorted(missing))}")
    labels: dict[str, int] = {}
    names: dict[int, str] = {}
    wnids: dict[int, str | None] = {}
    for line, cells in enumerate(table.rows, start=2):
        row = dict(zip(table.columns, map(str, cells), strict=True))
        index, file = row["class_index"], find_file(root, row["file"])
        where = f"{path} line {line} ({row['file']})"
        if not index.isdecimal() or len(index) > 9 or int(index) >= MAX_CLASSES:
            raise RecastError(f"{where}: class_index must be 0, 1, 2 ..., below {MAX_CLASSES}, got {shown(index)}")
        if file is None:
            raise RecastError(f"{where}: the image does not exist: {root / row['file']}")
        if str(file) in labels:
            raise RecastError(f"{where}: the image is listed twice")
        label = labels[str(file)] = int(index)
        names[label] = composed(row.get("name") or row.get("wnid") or index)
        wnids[label] = row.get("wnid")
    if not labels:
        raise RecastError(f"{path} lists no image")
    return ImageFiles(torch.tensor(list(labels.values())), PHOTO, list(labels)), _class_names(names, wnids)


def _class_names(names: dict[int, str], wnids: dict[int, str | None]) -> list[str]:
    """Return a name for every class index: all 1,000 if the wnids are those of ImageNet-1k, else up to the largest."""
    imagenet = ImageNetInfo("imagenet-1k")
    size = imagenet.num_classes()
    if all(index < size and imagenet.index_to_label_name(index) == wnid for index, wnid in wnids.items()):
        return [names.get(index) or imagenet.index_to_description(index) for index in range(size)]
    return [names.get(index, str(index)) for index in range(max(names) + 1)]


def find_archives(config: DataConfig, **defaults: Any) -> Found | None:
    """Read a zip of an image folder, or the train.zip and test.zip (or val.zip) of a folder; None without either."""
    path = data_dir(config)
    name = config.name if config.name != "zip" else path.resolve().stem
    if path.is_file() and path.suffix.lower() == ".zip":
        return _find_in(Archive(path), name, False, in_memory=True, **defaults)
    zips = {file.stem: file for file in path.glob("*.[zZ][iI][pP]") if not is_hidden(file.name)}
    chosen = choose_parts(zips, str(path))
    if None in chosen:
        return None
    archives = [Archive(zips[part]) for part in chosen if part]
    parts = [(files, _descend(files, "", True)) for files in archives]
    notes = parts_note(str(path), *chosen, zips)
    return _assemble(name, parts, False, in_memory=True, notes=notes, **defaults)
