"""Folders of images, on disk or in a zip: class folders and their files. Nothing is decoded here.

Places are paths below the top with `/` between folders; the top itself is the empty place.
"""

from __future__ import annotations

import io
import os
import struct
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, NamedTuple

from PIL import Image
from torch import Tensor

from recast.errors import RecastError, listed, printable
from recast.lab.data.bands import open_bands
from recast.lab.data.images import ARRAYS, decode_errors, is_hidden, is_image_name, open_image
from recast.reading import check_member


class Listing(NamedTuple):
    """Contents of one folder, without those of its folders."""

    folders: dict[str, None]
    images: list[str]
    """Arguments of `Files.read`."""
    skipped: dict[str, str]
    """Files that are not images, and hidden and tool folders with a trailing `/` → arguments of `Files.read`."""

    def add(self, name: str, item: str, is_folder: bool) -> bool:
        """Add a folder or a file; return False if it is skipped."""
        if is_hidden(name) or not (is_folder or is_image_name(name)):
            self.skipped[name + "/" * is_folder] = item
            return False
        if is_folder:
            self.folders[name] = None
        else:
            self.images.append(item)
        return True

    def take_arrays(self) -> None:
        """Count NumPy arrays as images where there are no pictures."""
        if not self.images:
            arrays = [name for name in self.skipped if name.lower().endswith(ARRAYS) and not is_hidden(name)]
            self.images.extend(map(self.skipped.pop, arrays))


class Files:
    """The images below a folder; `read` decodes one."""

    prefix = ""
    """Name of the whole for messages, before an image."""
    read: Callable[[Any], Image.Image]

    def __init__(self, top: Path) -> None:
        self.top = top
        self.listings: dict[str, Listing] = {}
        self.skipped: list[str] = []
        """Places skipped so far."""

    def inside(self, place: str) -> Listing:
        """Return the contents of a folder."""
        return self.listings.setdefault(place, Listing({}, [], {}))

    def where(self, place: str) -> str:
        """Return the name of a folder for messages."""
        return str(self.top / place)

    def check(self, place: str) -> None:
        """Raise RecastError if images of a folder would count twice."""

    def images(self, place: str) -> Iterator[str]:
        """Yield the images in a folder and below it."""
        self.check(place)
        listing = self.inside(place)
        self.skip(place, *listing.skipped)
        yield from listing.images
        for name in sorted(listing.folders):
            yield from self.images(join(place, name))

    def skip(self, place: str, *names: str) -> None:
        """Record what is skipped in a folder."""
        self.skipped += (join(place, name) for name in names)

    def skip_beside(self, place: str) -> None:
        """Record the hidden folders and images beside class folders, but not other files such as a README."""
        listing = self.inside(place)
        hidden = (name for name in listing.skipped if name.endswith("/"))
        self.skip(place, *hidden, *(PurePath(item).name for item in listing.images))

    def notes(self) -> list[str]:
        """Return a line with number and names of what was skipped; none if nothing was."""
        names = sorted(map(printable, self.skipped))
        text = f"skipped {len(names)} that are hidden, not images or outside class folders: {listed(names, 5)}"
        return [f"{self.top}: {text}"] if names else []


def join(place: str, name: str) -> str:
    return f"{place}/{name}" if place else name


class Disk(Files):
    """A folder on disk. Raises RecastError for links that would count images twice."""

    read = staticmethod(open_image)

    def __init__(self, top: Path) -> None:
        super().__init__(top)
        self.targets, self.links = set[Path](), set[str]()

    def inside(self, place: str) -> Listing:
        if place not in self.listings:
            listing = super().inside(place)
            with os.scandir(self.top / place) as entries:
                for entry in entries:
                    is_link = entry.is_symlink()
                    listing.add(entry.name, entry.path, os.path.isdir(entry.path) if is_link else entry.is_dir())
                    if is_link:
                        self.links.add(entry.path)
            listing.take_arrays()
        return self.listings[place]

    def check(self, place: str) -> None:
        top = self.top.resolve()
        links = (Path(path) for path in self.inside(place).images if path in self.links)
        for path in (self.top / place, *links):
            target = path.resolve()
            is_around = top.is_relative_to(target) or target.is_relative_to(top)
            if target in self.targets or (is_around and path.is_symlink()):
                raise RecastError(f"{path} is a link to {target}, whose images would count twice; remove the link")
            self.targets.add(target)


class Archive(Files):
    """An open zip of images."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.prefix = f"{path}:"
        self.read = self
        try:
            self.file = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, struct.error) as error:
            raise RecastError(f"cannot read archive {path}: {error}; is it complete?") from None
        files = set[str]()
        for name in self.file.namelist():
            parts, place = PurePosixPath(name.replace("\\", "/").lstrip("/")).parts, ""
            for number, part in enumerate(parts, start=1):
                is_folder = number < len(parts) or name.endswith(("/", "\\"))
                if not self.inside(place).add(part, name, is_folder):
                    break
                place = join(place, part)
                if not is_folder and place in files:
                    raise RecastError(f"{path} holds {place} twice; pack every image once")
            files.add(place)
        for listing in self.listings.values():
            listing.take_arrays()

    def __call__(self, name: str) -> Image.Image:
        return open_image(*self.content(name))

    def bands(self, name: str, in_chans: int, kinds: dict[bool, str] | None = None) -> Tensor:
        """Read an image of `in_chans` bands, as `open_bands` does."""
        content, where = self.content(name)
        return open_bands(content, in_chans, where, kinds)

    def content(self, name: str) -> tuple[io.BytesIO, str]:
        """Return the content of a file and its name for messages."""
        where = f"{self.top}: {name}"
        with decode_errors(where):
            check_member(self.file, self.file.getinfo(name))
            return io.BytesIO(self.file.read(name)), where


def composed(name: str) -> str:
    """Return a name in Unicode's composed form (NFC), in which class names are compared; macOS decomposes them."""
    return unicodedata.normalize("NFC", name)


def check_one_row(source: Path | str, files: Iterable[str]) -> None:
    """Raise RecastError if several rows of `source` name the same file, also through links."""
    if twice := [file for file, count in Counter(map(os.path.realpath, files)).items() if count > 1]:
        raise RecastError(f"{source} has several rows for an image ({len(twice)}: {listed(twice, 3)}); keep one each")


def find_file(folder: Path, name: str) -> Path | None:
    """Return the file with this name in either Unicode form; None if there is none. Raises RecastError for a device."""
    for form in dict.fromkeys((name, composed(name), unicodedata.normalize("NFD", name))):
        path = folder / form
        if os.path.isfile(path):
            return path
        if os.path.exists(path) and not os.path.isdir(path):
            raise RecastError(f"{path} is a device, a pipe or a socket: expected an image file")
    return None
