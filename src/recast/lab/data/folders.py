"""Where data lie: image folders, zips of them, and images that an `index.csv` lists. Nothing is decoded here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path, PurePath
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

SYSTEM = (("proc",), ("sys",), ("dev",))
"""Folders whose files have no end."""

MAX_CLASSES = 100_000
"""More is a mistake in `index.csv`: ImageNet-22k, the largest in use, has 21,841."""


def data_dir(config: DataConfig) -> Path:
    """data_dir, or $RECAST_DATA/NAME (torch/mnist: mnist); raises RecastError for neither, or when it is not there."""
    name = config.name.partition("/")[2] or config.name
    if config.data_dir is not None:
        path = Path(config.data_dir).expanduser()
    elif os.environ.get("RECAST_DATA"):
        path = Path(os.environ["RECAST_DATA"]).expanduser() / name
    else:
        raise RecastError(
            f"where are the images of {config.name}? Give data_dir (--data-dir DIR), or set the environment "
            "variable RECAST_DATA to "
            f"the folder that holds {name}/"
        )
    if not path.exists():
        raise RecastError(f"no such data folder: {path}")
    if path.resolve().parts[1:2] in SYSTEM and path.resolve().parts[:3] != ("/", "dev", "shm"):
        raise RecastError(f"{path} is the system's own: give a folder of images")
    return path


def _images(files: Files, place: str, classes: Mapping[str, list[str]]) -> ImageFiles:
    """Labels follow the sorted class folders. Raises RecastError on a class without an image, naming it, and where
    there is one class, all of whose images lie in folders of their own."""
    where, names = files.where(place), sorted(classes)
    if not names:
        raise RecastError(f"no class folders with images in {where}: expected CLASS/IMAGE.png and so on")
    if empty := [name for name in names if not classes[name]]:
        reason = "".join(f" ({note})" for note in files.notes())
        raise RecastError(
            f"class folder without an image: {empty[0]} in {where}{reason}. Add images or remove the folder"
        )
    items = [item for name in names for item in sorted(classes[name])]
    parents = {f"/{PurePath(item).parent.as_posix()}" for item in items}
    if len(names) == 1 and not any(composed(parent).endswith(f"/{names[0]}") for parent in parents):
        inner = files.where(join(place, names[0]))
        raise RecastError(f"{where} has one class, whose images lie in folders of their own: give {inner}")
    counts = torch.tensor([len(classes[name]) for name in names])
    labels = torch.arange(len(names)).repeat_interleave(counts)
    return ImageFiles(labels, PHOTO, items, files.read, files.prefix)


def _classes(files: Files, place: str, two_levels: bool) -> dict[str, list[str]]:
    """Class → its images. Raises RecastError for two folders whose names are the same when printed."""
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
            raise RecastError(f"{files.where(place)} has two class folders {title}, spelled differently: rename one")
        classes[title] = list(files.images(join(place, name)))
    return classes


def _found(name: str, parts: Sequence[tuple[Files, str] | None], two_levels: bool, **defaults: Any) -> Found:
    """Both parts, whose classes must be the same; either may be missing."""
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
        raise RecastError(f"training and validation must have the same class folders, but {'; '.join(only)}")
    notes = [note for files in dict.fromkeys(tree[0] for tree in present) for note in files.notes()]
    return Found(name, train, val, sorted(present[0][2]), notes=[*defaults.pop("notes", ()), *notes], **defaults)


def find_folder(config: DataConfig, two_levels: bool = False) -> Found:
    """An image folder: `index.csv`, or a training and a held-out part, or class folders; with `two_levels` these lie
    in folders of their coarse classes.

    Raises RecastError when there is no image, a class has none, or the parts have different classes.
    """
    root = data_dir(config)
    if not root.is_dir():
        raise RecastError(f"no such data folder: {root}")
    name = config.name if config.name == "imagenet" else root.resolve().name
    if (root / "index.csv").is_file():
        return Found(name, None, *_read_index(root), crop="random")
    return _find_in(Disk(root), name, two_levels, crop="random")


def _find_in(files: Files, name: str, two_levels: bool, **defaults: Any) -> Found:
    top = _unwrapped(files, "", False)
    train, val = _parts(files, top, two_levels)
    if train is None and val is None:
        return _found(name, [(files, top), None], two_levels, **defaults)
    files.skip_beside(top)
    notes = parts_note(files.where(top), train, val, files.inside(top).folders)
    parts = [(files, _unwrapped(files, join(top, part), not two_levels)) if part else None for part in (train, val)]
    return _found(name, parts, two_levels, notes=notes, **defaults)


def _unwrapped(files: Files, place: str, is_part: bool) -> str:
    """The place below the folders that all images have in common, which are no classes: pets/images/CLASS/1.png. A
    part is left where images lie beside its folder, and no part is taken for such a folder."""
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
    """The folders of the training and of the held-out part; neither: all folders are classes.

    A class may be called train, as one of CIFAR-100's is: a part holds class folders, or all folders have a part's
    name. Raises RecastError where folders without such names hold the same class folders.
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
                same = f"{first} and {second} in {files.where(top)} hold the same folders"
                names = listed(sorted(inner[first]), 3)
                raise RecastError(
                    f"{same} ({names}): call the parts train and val and move what is neither elsewhere; if they are "
                    "classes, give data.rank=folder and data.labels=coarse"
                )
    return train, val


def _read_index(root: Path) -> tuple[ImageFiles, list[str]]:
    """All images are validation; the columns `file` and `class_index` give path and label, `wnid` and `name` names."""
    path = root / "index.csv"
    table = read_table(path)
    if missing := {"file", "class_index"}.difference(table.columns):
        raise RecastError(f"{path} must have columns file and class_index, missing: {', '.join(sorted(missing))}")
    labels: dict[str, int] = {}
    class_names, wnids = {}, {}
    for line, cells in enumerate(table.rows, start=2):
        row = dict(zip(table.columns, map(str, cells), strict=True))
        index, path_of = row["class_index"], find_file(root, row["file"])
        name = str(path_of or root / row["file"])
        if not index.isdecimal() or len(index) > 9 or int(index) >= MAX_CLASSES:
            expected = f"class_index must be 0, 1, 2 ..., below {MAX_CLASSES}"
            raise RecastError(f"{path} line {line} ({row['file']}): {expected}, got {shown(index)}")
        if name in labels:
            raise RecastError(f"{path} line {line}: {row['file']} is listed twice")
        if path_of is None:
            raise RecastError(f"{path} lists an image that does not exist: {name}")
        label = labels[name] = int(index)
        class_names[label] = composed(row.get("name") or row.get("wnid") or index)
        wnids[label] = row.get("wnid")
    if not labels:
        raise RecastError(f"{path} lists no image")
    return ImageFiles(torch.tensor(list(labels.values())), PHOTO, list(labels)), _class_names(class_names, wnids)


def _class_names(known: dict[int, str], wnids: dict[int, str | None]) -> list[str]:
    """A name for every class index: for a part of ImageNet-1k (told by its wnids) all 1,000, else up to the largest."""
    imagenet = ImageNetInfo("imagenet-1k")
    size = imagenet.num_classes()
    if all(index < size and imagenet.index_to_label_name(index) == wnid for index, wnid in wnids.items()):
        return [known.get(index) or imagenet.index_to_description(index) for index in range(size)]
    return [known.get(index, str(index)) for index in range(max(known) + 1)]


def find_archives(config: DataConfig, **defaults: Any) -> Found | None:
    """A zip of an image folder, or the train.zip and test.zip (or val.zip) of a folder; None where there is neither."""
    path = data_dir(config)
    name = config.name if config.name != "zip" else path.resolve().stem
    if path.is_file() and path.suffix.lower() == ".zip":
        return _find_in(Archive(path), name, False, in_memory=True, **defaults)
    there = {file.stem: file for file in path.glob("*.[zZ][iI][pP]") if not is_hidden(file.name)}
    chosen = choose_parts(there, str(path))
    if None in chosen:
        return None
    archives = [Archive(there[part]) for part in chosen if part]
    parts = [(files, _unwrapped(files, "", True)) for files in archives]
    notes = parts_note(str(path), *chosen, there)
    return _found(name, parts, False, in_memory=True, notes=notes, **defaults)
