"""Where data lie: image folders, zips of them, and images that an `index.csv` lists. Nothing is decoded here."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, NamedTuple

import torch
from PIL import Image
from timm.data import ImageNetInfo

from recast.data.datasets import Found, ImageFiles
from recast.data.images import PHOTO, is_image_name, open_image
from recast.errors import RecastError, first_line, printable, shown
from recast.run.config import DataConfig
from recast.run.reading import LARGEST
from recast.run.tables import read_table

VAL_NAMES = ("val", "valid", "validation", "test")
"""Names of the held-out part, best first."""

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


class Tree(NamedTuple):
    """One part of an ImageFolder tree: the images of every class folder."""

    where: str
    classes: dict[str, list[str]]
    """Class → names of images that `read` takes."""
    read: Callable[[Any], Image.Image] = open_image
    prefix: str = ""
    """How an error names what holds the images."""


def _images(tree: Tree) -> ImageFiles:
    """Labels follow the sorted class folders. Raises RecastError on a class without an image, naming it, and where
    there is one class, all of whose images lie in folders of their own."""
    classes = sorted(tree.classes)
    if not classes:
        raise RecastError(f"no class folders with images in {tree.where}: expected CLASS/IMAGE.png and so on")
    if empty := [name for name in classes if not tree.classes[name]]:
        raise RecastError(f"class folder without an image: {empty[0]} in {tree.where}. Add images or remove the folder")
    names = [name for label in classes for name in sorted(tree.classes[label])]
    parents = {f"/{PurePath(name).parent.as_posix()}" for name in names}
    if len(classes) == 1 and not any(parent.endswith(f"/{classes[0]}") for parent in parents):
        where = f"{tree.where}/{classes[0]}"
        raise RecastError(f"{tree.where} has one class, whose images lie in folders of their own: give {where}")
    counts = torch.tensor([len(tree.classes[label]) for label in classes])
    labels = torch.arange(len(classes)).repeat_interleave(counts)
    return ImageFiles(labels, PHOTO, names, tree.read, tree.prefix)


def _found(name: str, train: Tree | None, val: Tree | None, **defaults: Any) -> Found:
    """Both parts, whose classes must be the same; either may be missing."""
    parts = [part for part in (train, val) if part is not None]
    train_images, val_images = (None if part is None else _images(part) for part in (train, val))
    if len(parts) == 2 and parts[0].classes.keys() != parts[1].classes.keys():
        only = [sorted(a.classes.keys() - b.classes.keys()) for a, b in (parts, parts[::-1])]
        found = "; ".join(
            f"only in {part.where}: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
            for part, names in zip(parts, only, strict=True)
            if names
        )
        raise RecastError(f"training and validation must have the same class folders, but {found}")
    return Found(name, train_images, val_images, sorted(parts[0].classes), **defaults)


def find_folder(config: DataConfig) -> Found:
    """An image folder: `index.csv`, or train/ and val/ (or test/), or class folders; with `rank=folder` these lie in
    folders of their coarse classes.

    Raises RecastError when there is no image, a class has none, or train/ and val/ have different classes.
    """
    root = data_dir(config)
    if not root.is_dir():
        raise RecastError(f"no such data folder: {root}")
    name = config.name if config.name == "imagenet" else root.resolve().name
    if (root / "index.csv").is_file():
        return Found(name, None, *_read_index(root), crop="random")
    train, val = root / "train", next((root / part for part in VAL_NAMES if (root / part).is_dir()), None)
    outer = {path.name for path in _folders_in(root)}
    parts = [part for part in (train, val) if part is not None and part.is_dir()]
    if not parts or _is_class(parts[0].name, outer, _folders_in(parts[0])):
        train, val = root, None
    two_levels, links = config.rank == "folder", _Links(root)
    trees = (_in_folder(part, links, two_levels) if part and part.is_dir() else None for part in (train, val))
    return _found(name, *trees, crop="random")


def _is_class(name: str, outer: set[str], inside: object) -> bool:
    """Whether a folder beside others is a class that is called so (CIFAR-100 has trains) and not a part: it has no
    folders inside, and the others are no parts."""
    return name in outer and not inside and not outer <= {"train", *VAL_NAMES}


def _in_folder(part: Path, links: _Links, two_levels: bool) -> Tree:
    if part != links.top:
        links.check(part)
    folders = {path.name: path for path in _folders_in(part)}
    if two_levels:
        folders = {f"{name}/{path.name}": path for name, outer in folders.items() for path in _folders_in(outer)}
    return Tree(str(part), {printable(name): list(links.images(path)) for name, path in folders.items()})


def _folders_in(root: Path) -> list[Path]:
    return [path for path in sorted(root.iterdir()) if path.is_dir() and not path.name.startswith(".")]


class _Links:
    """The links of a data folder. RecastError for one through which images would count twice, perhaps under a wrong
    label, or in both parts."""

    def __init__(self, top: Path) -> None:
        self.top, self.real, self.seen = top, top.resolve(), set[Path]()

    def check(self, path: Path) -> None:
        """Refuse what was seen before, and a link into the folder or to what holds it."""
        target = Path(os.path.realpath(path))
        around = self.real.is_relative_to(target) or target.is_relative_to(self.real)
        if target in self.seen or (around and path.is_symlink()):
            raise RecastError(f"{path} is a link to {target}, whose images would count twice: remove it")
        self.seen.add(target)

    def images(self, folder: Path) -> Iterator[str]:
        """The images in a folder and below it."""
        self.check(folder)
        with os.scandir(folder) as entries:
            for entry in entries:
                is_link = entry.is_symlink()  # known without asking the disk, unlike where a link leads
                if os.path.isdir(entry.path) if is_link else entry.is_dir():
                    yield from self.images(Path(entry.path))
                elif is_image_name(entry.name):
                    if is_link:
                        self.check(Path(entry.path))
                    yield entry.path


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
        index, name = row["class_index"], str(root / row["file"])
        if not index.isdecimal() or len(index) > 9 or int(index) >= MAX_CLASSES:
            expected = f"class_index must be 0, 1, 2 ..., below {MAX_CLASSES}"
            raise RecastError(f"{path} line {line} ({row['file']}): {expected}, got {shown(index)}")
        if name in labels:
            raise RecastError(f"{path} line {line}: {row['file']} is listed twice")
        if not Path(name).is_file():
            raise RecastError(f"{path} lists an image that does not exist: {name}")
        label = labels[name] = int(index)
        class_names[label] = row.get("name") or row.get("wnid") or index
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
        archive = Archive(path)
        tops = {member.parts[0] for member in archive.members}
        val = next((part for part in VAL_NAMES if part in tops), None)
        inside = any(member.parts[0] == "train" and len(member.parts) > 2 for member in archive.members)
        if "train" not in tops or _is_class("train", tops, inside):
            return _found(name, archive.tree(), None, in_memory=True, **defaults)
        held_out = None if val is None else archive.tree(val)
        return _found(name, archive.tree("train"), held_out, in_memory=True, **defaults)
    val_zip = next((path / f"{part}.zip" for part in VAL_NAMES if (path / f"{part}.zip").is_file()), None)
    if val_zip is None or not (path / "train.zip").is_file():
        return None
    return _found(name, *(Archive(one).tree() for one in (path / "train.zip", val_zip)), in_memory=True, **defaults)


class Archive:
    """An open zip of images; called with a member's name, it decodes the image."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.file = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, struct.error) as error:
            raise RecastError(f"cannot read archive {path}: {error}. Is it complete?") from None
        named = {PurePosixPath(name): name for name in self.file.namelist()}
        hidden = (".", "__MACOSX")
        shown = {one: name for one, name in named.items() if not any(part.startswith(hidden) for part in one.parts)}
        images = [one for one in shown if is_image_name(one.name)]
        top: tuple[str, ...] = ()  # cifar/png/train/cat/1.png: folders that all images have in common are no classes
        while any(len(one.parts) >= len(top) + 3 for one in images):
            inside = {one.parts[: len(top) + 1] for one in images if len(one.parts) >= len(top) + 2}
            if len(inside) > 1:
                break
            top = inside.pop()
        self.members = {
            PurePosixPath(*one.parts[len(top) :]): name
            for one, name in shown.items()
            if one.parts[: len(top)] == top != one.parts
        }
        """Path below the common folders of every member (folders too) → name in the archive."""

    def __call__(self, name: str) -> Image.Image:
        where = f"{self.path}: {name}"
        if self.file.getinfo(name).file_size > LARGEST:
            raise RecastError(f"cannot read image {where}: unpacked it is larger than {LARGEST // 2**20} MiB")
        try:
            content = self.file.read(name)
        except Exception as error:  # of whatever compression it is, damage can break its reader in any way
            raise RecastError(f"cannot read image {where}: {first_line(error)}") from None
        return open_image(io.BytesIO(content), where)

    def tree(self, part: str | None = None) -> Tree:
        """The class folders, of one part (train, val …) if it is named."""
        classes: dict[str, list[str]] = {}
        for member, name in self.members.items():
            parts = member.parts[part is not None :]
            is_folder = name.endswith("/")
            if part in (None, member.parts[0]) and len(parts) > (not is_folder):
                images = classes.setdefault(printable(parts[0]), [])
                if not is_folder and is_image_name(name):
                    images.append(name)
        return Tree(f"{self.path}: {part}" if part else str(self.path), classes, self, f"{self.path}:")
