"""Folders of images, on disk or in a zip: which of the files count, in which classes. Nothing is decoded here.

Places are paths below the top with `/` between their folders; the top itself is the empty one.
"""

from __future__ import annotations

import io
import os
import struct
import unicodedata
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from PIL import Image

from recast.errors import RecastError, first_line, listed, printable
from recast.lab.data.images import is_hidden, is_image_name, open_image
from recast.reading import LARGEST


class Listing(NamedTuple):
    """What lies in a folder itself."""

    folders: dict[str, None]
    """Their names."""
    images: list[str]
    """As `Files.read` takes them."""
    skipped: dict[str, None]
    """Names of files that are no images, and of hidden and tool folders, with a `/`."""


class Files:
    """The images below a folder; `read` decodes one."""

    prefix = ""
    """How an error names what holds the images."""
    read: Callable[[Any], Image.Image]

    def __init__(self, top: Path) -> None:
        self.top = top
        self.listings: dict[str, Listing] = {}
        self.skipped: list[str] = []
        """Places of what was left out so far."""

    def inside(self, place: str) -> Listing:
        """What lies in a folder itself."""
        return self.listings[place]

    def where(self, place: str) -> str:
        """How a message names a folder."""
        return str(self.top / place)

    def check(self, place: str) -> None:
        """Refuse a folder whose images would count twice."""

    def images(self, place: str) -> Iterator[str]:
        """The images in a folder and below it."""
        self.check(place)
        listing = self.inside(place)
        self.skip(place, *listing.skipped)
        yield from listing.images
        for name in sorted(listing.folders):
            yield from self.images(join(place, name))

    def skip(self, place: str, *names: str) -> None:
        """Remember what is left out, of a folder."""
        self.skipped += (join(place, name) for name in names)

    def skip_beside(self, place: str) -> None:
        """Remember hidden folders and images beside class folders; a README is no loss."""
        listing = self.inside(place)
        names = [name for name in listing.skipped if name.endswith("/")]
        self.skip(place, *names, *(PurePath(item).name for item in listing.images))

    def notes(self) -> list[str]:
        """A line that counts and names what was left out."""
        counts = []
        for title, is_folder in (
            ("file{} without an image's ending, hidden or in no class folder", False),
            ("hidden or tool folder{}", True),
        ):
            names = sorted(printable(name).rstrip("/") for name in self.skipped if name.endswith("/") == is_folder)
            if names:
                counts.append(f"{len(names)} {title.format('s' * (len(names) > 1))} ({listed(names, 5)})")
        return [f"{self.top}: skipped {' and '.join(counts)}"] if counts else []


def join(place: str, name: str) -> str:
    return f"{place}/{name}" if place else name


class Disk(Files):
    """A folder. RecastError for a link through which images would count twice, perhaps under a wrong label, or in both
    parts."""

    read = staticmethod(open_image)

    def __init__(self, top: Path) -> None:
        super().__init__(top)
        self.real = top.resolve()
        self.targets, self.links = set[Path](), set[str]()

    def inside(self, place: str) -> Listing:
        if place not in self.listings:
            listing = self.listings[place] = Listing({}, [], {})
            with os.scandir(self.top / place) as entries:
                for entry in entries:
                    is_link = entry.is_symlink()  # known without asking the disk, unlike where a link leads
                    if os.path.isdir(entry.path) if is_link else entry.is_dir():
                        _add_folder(listing, entry.name)
                    elif not is_image_name(entry.name):
                        listing.skipped[entry.name] = None
                    else:
                        listing.images.append(entry.path)
                        if is_link:
                            self.links.add(entry.path)
        return self.listings[place]

    def check(self, place: str) -> None:
        links = [path for path in self.inside(place).images if path in self.links]
        for path in (self.top / place, *map(Path, links)):
            target = Path(os.path.realpath(path))
            around = self.real.is_relative_to(target) or target.is_relative_to(self.real)
            if target in self.targets or (around and path.is_symlink()):
                raise RecastError(f"{path} is a link to {target}, whose images would count twice: remove it")
            self.targets.add(target)


def _add_folder(listing: Listing, name: str) -> bool:
    """Whether it counts."""
    if is_hidden(name):
        listing.skipped[f"{name}/"] = None
        return False
    listing.folders[name] = None
    return True


class Archive(Files):
    """An open zip of images."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.prefix = f"{path}:"
        self.read = self
        try:
            self.file = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, struct.error) as error:
            raise RecastError(f"cannot read archive {path}: {error}. Is it complete?") from None
        listings = defaultdict[str, Listing](lambda: Listing({}, [], {}))
        places = set[str]()
        for name in self.file.namelist():
            parts = [part for part in name.split("/") if part not in ("", ".")]
            *folders, last = [*parts, ""] if name.endswith("/") else parts or [""]
            place = ""
            for folder in folders:
                if not _add_folder(listings[place], folder):
                    break
                place = join(place, folder)
            else:
                if last and not is_image_name(last):
                    listings[place].skipped[last] = None
                elif last:
                    if join(place, last) in places:
                        raise RecastError(f"{path} holds {join(place, last)} twice: pack it anew, each image once")
                    places.add(join(place, last))
                    listings[place].images.append(name)
                listings[place]
        self.listings = {"": listings[""], **listings}

    def where(self, place: str) -> str:
        return f"{self.top}: {place}" if place else str(self.top)

    def __call__(self, name: str) -> Image.Image:
        where = f"{self.top}: {name}"
        if self.file.getinfo(name).file_size > LARGEST:
            raise RecastError(f"cannot read image {where}: unpacked it is larger than {LARGEST // 2**20} MiB")
        try:
            content = self.file.read(name)
        except Exception as error:  # of whatever compression it is, damage can break its reader in any way
            raise RecastError(f"cannot read image {where}: {first_line(error)}") from None
        return open_image(io.BytesIO(content), where)


def composed(name: str) -> str:
    """A name in the Unicode form that all names of classes are compared in: macOS and its zips keep another (é as e and
    an accent)."""
    return unicodedata.normalize("NFC", name)


def find_file(folder: Path, name: str) -> Path | None:
    """The file of a name, in whichever Unicode form the disk has it."""
    forms = dict.fromkeys((name, composed(name), unicodedata.normalize("NFD", name)))
    return next((folder / form for form in forms if os.path.isfile(folder / form)), None)
