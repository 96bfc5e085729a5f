"""Zip archives of an ImageFolder tree, decoded once into memory."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from PIL import Image

from recast.data.datasets import ImageTensors
from recast.data.folders import VAL_NAMES, Listing, Tree, join_tree, label_by_class, split_tree
from recast.data.images import is_image_name, open_image, stack_images
from recast.errors import RecastError


def find_archives(path: Path) -> tuple[Path, Path] | None:
    """The archives at `path`: one zip (twice), or the train.zip and test.zip (or val.zip) of a folder; None if none."""
    if path.is_file() and path.suffix.lower() == ".zip":
        return path, path
    val = next((path / f"{name}.zip" for name in VAL_NAMES if (path / f"{name}.zip").is_file()), None)
    if (path / "train.zip").is_file() and val is not None:
        return path / "train.zip", val
    return None


def list_archives(train_zip: Path, val_zip: Path, val_fraction: float = 0.1) -> Tree:
    """What the archives (one zip twice, or two) hold; nothing is decoded. Raises RecastError as `list_folder` does."""
    if train_zip == val_zip:
        return _list_one(train_zip, val_fraction)
    train, val = (label_by_class(_classes(_members(path)), str(path)) for path in (train_zip, val_zip))
    return join_tree(train, val, str(train_zip), str(val_zip))


def _list_one(path: Path, val_fraction: float) -> Tree:
    members = _members(path)
    tops = {member.parts[0] for member in members}
    val = next((name for name in VAL_NAMES if name in tops), None)
    if "train" not in tops or val is None:
        return split_tree(*label_by_class(_classes(members), str(path)), val_fraction)
    parts: list[tuple[Listing, list[str]]] = []
    for part in ("train", val):
        below = {member.relative_to(part): name for member, name in members.items() if member.parts[0] == part}
        parts.append(label_by_class(_classes(below), f"{path}: {part}"))
    return join_tree(parts[0], parts[1], f"{path}: train", f"{path}: {val}")


def _members(path: Path) -> dict[PurePosixPath, str]:
    """Path in the tree of every member (folders too) -> name in the archive; one common top folder is cut off."""
    with _opened(path) as archive:
        members = {
            PurePosixPath(name): name
            for name in archive.namelist()
            if not any(part.startswith((".", "__MACOSX")) for part in PurePosixPath(name).parts)
        }
    tops = {member.parts[0] for member in members if member.parts}
    nested = any(is_image_name(member.name) and len(member.parts) >= 3 for member in members)
    if len(tops) == 1 and nested:  # cifar/train/cat/1.png
        top = tops.pop()
        return {member.relative_to(top): name for member, name in members.items() if len(member.parts) > 1}
    return {member: name for member, name in members.items() if member.parts}


def _classes(members: dict[PurePosixPath, str]) -> dict[str, list[str]]:
    classes: dict[str, list[str]] = {}
    for member, name in members.items():
        is_folder = name.endswith("/")
        if len(member.parts) > 1 or (is_folder and member.parts):
            images = classes.setdefault(member.parts[0], [])
            if not is_folder and is_image_name(name):
                images.append(name)
    return classes


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except FileNotFoundError:
        raise RecastError(f"no such archive: {path}") from None
    except (zipfile.BadZipFile, EOFError) as error:
        raise RecastError(f"cannot read archive {path}: {error}. Is it complete?") from None


def own_size(path: Path, listing: Listing, skip: bool = False, largest: int = 224) -> int:
    """Side of the first image (`skip`: of the first that can be read), at most `largest`."""
    with _opened(path) as archive:
        for name in listing.names[:-1] if skip else ():
            with suppress(RecastError):
                return min(*_decode(archive, name, path).size, largest)
        return min(*_decode(archive, listing.names[-1 if skip else 0], path).size, largest)


def decode(
    path: Path, listing: Listing, img_size: int, crop_pct: float | None = None, skip: bool = False
) -> tuple[ImageTensors, list[str]]:
    """All listed images in memory, and the names of those that cannot be decoded.

    Raises RecastError naming the first of these; with `skip` they are left out instead, unless none is left.
    """
    kept: list[int] = []
    bad: list[str] = []

    def images(archive: zipfile.ZipFile) -> Iterator[Image.Image]:
        for position, name in enumerate(listing.names):
            try:
                image = _decode(archive, name, path)
            except RecastError:
                if not skip:
                    raise
                bad.append(f"{path}: {name}")
                continue
            kept.append(position)
            yield image

    with _opened(path) as archive:
        pixels = stack_images(images(archive), len(listing.names), img_size, str(path), crop_pct)
    if bad and not kept:
        raise RecastError(f"not one image could be read; the first is {bad[0]}")
    return ImageTensors(pixels[: len(kept)], listing.labels[kept]), bad


def _decode(archive: zipfile.ZipFile, name: str, path: Path) -> Image.Image:
    where = f"{path}: {name}"
    try:
        content = archive.read(name)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise RecastError(f"cannot read image {where}: {error}") from None
    return open_image(io.BytesIO(content), where)
