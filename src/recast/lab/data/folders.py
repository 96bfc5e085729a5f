"""Image folders, zips of them, and images listed in an `index.csv`. Nothing is decoded here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path, PurePath
from typing import Annotated, Any

import torch
from annotated_types import Ge, Lt
from timm.data import ImageNetInfo

from recast.config import Int, coerce
from recast.errors import RecastError, listed, printable
from recast.lab.config import DataConfig
from recast.lab.data.datasets import ImageFiles, RawData
from recast.lab.data.images import PHOTO, is_hidden
from recast.lab.data.parts import HELD_OUT, choose_parts, part_word, parts_note
from recast.lab.data.trees import Archive, Disk, Files, check_one_row, composed, find_file, join
from recast.lab.folder.tables import read_table

LEFTOVERS = ("thumbs.db", "desktop.ini", ".pth", ".pt", ".ckpt", ".safetensors", ".h5", ".keras")
"""Ends of the names of files that systems and trainings leave in a data folder, in lower case."""
PICTURES, BESIDE = {"images", "jpegimages"}, {"annotations", "labels", "masks", "segmentationclass", "trimaps"}
"""Names of folders, in lower case, with the images of another task and with what belongs to them."""
ClassIndex = Annotated[Int, Ge(0), Lt(100_000)]
"""Its upper bound catches typos. ImageNet-22k, the largest set in use, has 21,841 classes."""


def data_dir(config: DataConfig) -> Path:
    """Return data_dir, or $RECAST_DATA/NAME (torch/mnist: mnist). Raises RecastError if neither is set or exists."""
    name = config.name.partition("/")[2] or config.name
    root = os.environ.get("RECAST_DATA")
    if config.data_dir is None and not root:
        raise RecastError(
            "data_dir (--data-dir) is missing: the folder with the images; or set RECAST_DATA to the folder that holds "
            f"{name}/"
        )
    path = (Path(root or "") / name if config.data_dir is None else Path(config.data_dir)).expanduser()
    if not path.exists():
        raise RecastError(f"no such data folder: {path}")
    return path


def find_folder(config: DataConfig) -> RawData:
    """Read an image folder: `index.csv`, a training and a held-out part, or class folders alone.

    Raises RecastError if there are no images, a class has none, or the parts have different classes.
    """
    root = data_dir(config)
    if (archive := find_archives(config) if root.is_file() else None) is not None:
        return archive
    if not root.is_dir():
        raise RecastError(f"{root} is neither a folder nor a .zip file: unpack it")
    name = config.name if config.name == "imagenet" else root.resolve().name
    if (root / "index.csv").is_file():
        return RawData(name, None, *_read_index(root), crop="random")
    return _find_in(Disk(root), name, crop="random")


def find_archives(config: DataConfig, **defaults: Any) -> RawData | None:
    """Read a zip of an image folder, or the train.zip and test.zip (or val.zip) of a folder; None without either."""
    path = data_dir(config)
    name = path.resolve().stem if config.name in ("folder", "zip") else config.name
    if path.is_file() and path.suffix.lower() == ".zip":
        return _find_in(Archive(path), name, in_memory=True, **defaults)
    zips = {file.stem: file for file in path.glob("*.[zZ][iI][pP]") if not is_hidden(file.name)}
    chosen = choose_parts(zips, str(path))
    if None in chosen:
        return None
    parts = [(files, _descend(files, "", True)) for files in (Archive(zips[part]) for part in chosen if part)]
    return _assemble(name, parts, parts_note(str(path), *chosen, zips), in_memory=True, **defaults)


def _find_in(files: Files, name: str, **defaults: Any) -> RawData:
    top = _descend(files, "", False)
    train, val = _parts(files, top)
    if train is None and val is None:
        names = [name for name in files.inside(top).folders if name.lower() in HELD_OUT]
        notes = [f"{files.where(top)}: {listed(names, 5)} is read as a class, not as a part"] if names else []
        return _assemble(name, [(files, top), None], notes, **defaults)
    files.skip_beside(top)
    notes = parts_note(files.where(top), train, val, files.inside(top).folders)
    parts = [(files, _descend(files, join(top, part), True)) if part else None for part in (train, val)]
    return _assemble(name, parts, notes, **defaults)


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


def _parts(files: Files, top: str) -> tuple[str | None, str | None]:
    """Return the folders of the training and of the held-out part; None twice if all folders are classes.

    A class may be called train, as in CIFAR-100: a part holds class folders, or all folders have the name of a part.
    Raises RecastError if the held-out part has no class folders, or if folders with other names hold the same ones.
    """
    inner = {name: files.inside(join(top, name)).folders.keys() for name in files.inside(top).folders}
    named = [name for name in inner if part_word(name)]
    if (parted := [name for name in named if inner[name]]) or len(named) < len(inner):
        named = parted
    train, val = choose_parts(named, files.where(top))
    if train is None and val and len(inner) > 1 and val.lower() not in HELD_OUT:
        val = None  # a class such as test_tubes
    if train and inner[train]:
        _check_held_out(files, top, train, val, [name for name in inner if not inner[name]])
    if val is None:
        names = {name.lower(): name for name in inner}
        if (pictures := names.keys() & PICTURES) and (beside := names.keys() & BESIDE):
            raise RecastError(
                f"{names[pictures.pop()]} and {names[beside.pop()]} in {files.where(top)} are not classes: use --data "
                "masks or coco, or a table of labels with --data csv"
            )
        for name, folders in inner.items():
            if len(shared := inner.keys() & folders) > 1:
                raise RecastError(
                    f"{files.where(top)} and {name} inside it both hold {listed(sorted(shared), 3)}: choose one with "
                    "--data-dir"
                )
        for first, second in combinations(sorted(inner, key=lambda name: len(inner[name])), 2):
            if len(inner[first]) > 1 and inner[first] <= inner[second]:
                raise RecastError(
                    f"{first} and {second} in {files.where(top)} hold the same folders "
                    f"({listed(sorted(inner[first]), 3)}): name parts train and val and move other folders away; "
                    "if they are classes, list their images in a table, --data csv"
                )
    return train, val


def _check_held_out(files: Files, top: str, train: str, val: str | None, flat: Sequence[str]) -> None:
    """Raise RecastError if a folder without class folders (`flat`) is preferred to `val` as the held-out part."""
    before = HELD_OUT[: HELD_OUT.index(part_word(val) or "")] if val else HELD_OUT
    for name in (name for word in before for name in flat if part_word(name) == word):
        images = files.inside(join(top, name)).images
        content = f"images without class folders ({PurePath(images[0]).name})" if images else "no images"
        raise RecastError(
            f"{files.where(join(top, name))} has {content}: sort them into CLASS/IMAGE.png as in {train}, or move it "
            "elsewhere to hold out a share of the training images"
        )


def _assemble(name: str, parts: Sequence[tuple[Files, str] | None], notes: Sequence[str], **defaults: Any) -> RawData:
    """Return both parts, one of which may be None. Raises RecastError if their classes differ."""
    for files, place in filter(None, parts):
        if place:
            files.check(place)
    classes = [_classes(*part) if part else {} for part in parts]
    train, val = (_images(*part, names) if part else None for part, names in zip(parts, classes, strict=True))
    present = [(*part, names) for part, names in zip(parts, classes, strict=True) if part]
    if train and val and classes[0].keys() != classes[1].keys():
        only = [
            f"only in {files.where(place)}: {listed(sorted(names.keys() - others.keys()), 5)}"
            for (files, place, names), others in zip(present, classes[::-1], strict=True)
            if names.keys() - others.keys()
        ]
        raise RecastError(f"class folders of training and validation differ: {'; '.join(only)}; make them equal")
    skipped = [note for files in dict.fromkeys(files for files, *_ in present) for note in files.notes()]
    merged = _merged_note(*present[0][:2])
    return RawData(name, train, val, sorted(present[0][2]), notes=[*notes, *merged, *skipped], **defaults)


def _merged_note(files: Files, place: str) -> list[str]:
    """Return a line about the first class that holds several folders, which may be meant as classes; else none."""
    for name in sorted(files.inside(place).folders):
        top = join(place, name)
        inner = [title for title in files.inside(top).folders if files.inside(join(top, title)).images]
        if len(inner) > 1:
            return [f"{files.where(place)}: {name} is one class, with all its folders ({listed(sorted(inner), 3)})"]
    return []


def _classes(files: Files, place: str) -> dict[str, list[str]]:
    """Return the images of every class. Raises RecastError for two folders whose printed names are equal."""
    files.skip_beside(place)
    classes: dict[str, list[str]] = {}
    for name in sorted(files.inside(place).folders):
        if _is_leftover(files, join(place, name)):
            files.skip(place, f"{name}/")
            continue
        title = printable(composed(name))
        if title in classes:
            raise RecastError(f"{files.where(place)} has two class folders {title}, spelled differently; rename one")
        classes[title] = sorted(files.images(join(place, name)))
    return classes


def _is_leftover(files: Files, place: str) -> bool:
    """Return True for a folder that is empty, or holds files of systems and trainings alone."""
    listing = files.inside(place)
    others = [name for name in listing.skipped if not (is_hidden(name) or name.lower().endswith(LEFTOVERS))]
    inner = (_is_leftover(files, join(place, name)) for name in listing.folders)
    return not (listing.images or others) and all(inner)


def _images(files: Files, place: str, classes: Mapping[str, list[str]]) -> ImageFiles:
    """Return the images with labels in the order of the class names. Raises RecastError for a class without images."""
    where, names = files.where(place), sorted(classes)
    if not names:
        flat = files.inside(place).images
        name = PurePath(flat[0]).name if flat else ""
        instead = f"; for images without class folders ({name}) use a table of labels, --data csv" * bool(flat)
        if not flat and (archives := [name for name in files.inside(place).skipped if name.lower().endswith(".zip")]):
            instead = f"; for images in {archives[0]} use --data zip"
        raise RecastError(f"no class folders with images in {where}: expected CLASS/IMAGE.png{instead}")
    if empty := [name for name in names if not classes[name]]:
        reason = "".join(f" ({note})" for note in files.notes())
        raise RecastError(f"class folder without images: {empty[0]} in {where}{reason}; add images or remove it")
    labels = torch.arange(len(names)).repeat_interleave(torch.tensor([len(classes[name]) for name in names]))
    return ImageFiles(labels, PHOTO, [item for name in names for item in classes[name]], files.read, files.prefix)


def _read_index(root: Path) -> tuple[ImageFiles, list[str]]:
    """Read validation images from `index.csv`: columns `file`, `class_index`, and `wnid` or `name` of the class.

    The classes are all 1,000 of ImageNet-1k if the wnids are its own, else those up to the largest index.
    """
    path = root / "index.csv"
    table = read_table(path)
    if missing := {"file", "class_index"}.difference(table.columns):
        raise RecastError(f"{path} must have columns file and class_index, missing: {', '.join(sorted(missing))}")
    imagenet = ImageNetInfo("imagenet-1k")
    files, labels, names, is_imagenet = list[str](), list[int](), dict[int, str](), True
    for line, cells in enumerate(table.rows, start=2):
        row = dict(zip(table.columns, map(str, cells), strict=True))
        where = f"{path} line {line} ({row['file']})"
        label = coerce(ClassIndex, row["class_index"], f"{where}: class_index")
        if (file := find_file(root, row["file"])) is None:
            raise RecastError(f"{where}: the image does not exist: {root / row['file']}")
        files.append(str(file))
        labels.append(label)
        names[label] = composed(row.get("name") or row.get("wnid") or str(label))
        is_imagenet &= label < imagenet.num_classes() and imagenet.index_to_label_name(label) == row.get("wnid")
    if not files:
        raise RecastError(f"{path} lists no images")
    check_one_row(path, files)
    if is_imagenet:
        classes = [names.get(index) or imagenet.index_to_description(index) for index in range(imagenet.num_classes())]
    else:
        classes = [names.get(index, str(index)) for index in range(max(names) + 1)]
    return ImageFiles(torch.tensor(labels), PHOTO, files), classes
