"""Images with a class for every pixel: `ImagePairs`, what training sees of them, and folders of such pairs.

Shapes: B images (B, 3, S, S) in [0, 1], masks (B, S, S) int64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn.functional import pad
from torchvision import transforms

from recast.errors import RecastError, shown
from recast.lab.config import Augmentation, DataConfig
from recast.lab.data.datasets import Found
from recast.lab.data.fingerprint import digest_of, size_of
from recast.lab.data.folders import data_dir
from recast.lab.data.images import BICUBIC, NEAREST, PADDING, PHOTO, middle, opened, resize_to, to_pixels
from recast.lab.data.parts import choose_parts, part_word, parts_note
from recast.lab.data.seeding import drawing
from recast.lab.data.trees import Disk, composed
from recast.lab.tasks.dense import DenseImages, chosen
from recast.reading import decode, read_bytes

IGNORE = 255
"""In a mask: nobody knows the class of this pixel; it counts neither in the loss nor in a metric."""
OUTSIDE = 256
"""In the masks of a batch: what fills an image up to the size of the largest."""
ADE = "ADEChallengeData2016"
VOC = (
    "background aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person "
    "pottedplant sheep sofa train tvmonitor"
).split()
LOSSY = ("JPEG", "MPO", "JPEG2000")
"""Formats of one channel that do not keep the numbers they are given."""


@dataclass(eq=False)
class ImagePairs(DenseImages):
    """Images and masks: tensors (N, 3, H, W) and (N, H, W) uint8, or paths that are read each time."""

    masks: Sequence[str] | Tensor
    img_size: int
    _: KW_ONLY
    ids: tuple[int, ...] | None = None
    """The numbers in the masks that are classes 0, 1, ...; None: 0, 1, ... themselves."""
    blank: int = IGNORE
    """In a file, beside `IGNORE`: nobody knows."""
    num_classes: int = IGNORE
    is_whole: bool = False
    """Where nothing is augmented: all of an image, its short side S, instead of the middle square."""
    task = "segment"
    have = "masks"

    def open_mask(self, index: int) -> Image.Image:
        """The classes of its pixels, in 8 bits. Raises RecastError for what is none, and for an unknown class."""
        mask = self.masks[index]
        if isinstance(mask, Tensor):
            return Image.fromarray(mask.numpy())
        values = read_mask(mask)
        classes = values if self.ids is None else np.searchsorted(self.ids, values)
        known = (values < self.num_classes) if self.ids is None else np.isin(values, self.ids)
        unknown = values[~known & (values != IGNORE) & (values != self.blank)]
        if len(unknown):
            first, last = (0, self.num_classes - 1) if self.ids is None else (self.ids[0], self.ids[-1])
            raise RecastError(
                f"mask {mask} has class {unknown[0]}, expected {first} to {last}, or {self.blank} where nobody knows: "
                "name all classes in classes.txt"
            )
        return Image.fromarray(np.where(known, classes, IGNORE).astype(np.uint8))

    def targets(self) -> list[str]:
        return [digest_of([mask.numpy()]) if isinstance(mask, Tensor) else size_of(mask) for mask in self.masks]

    def label_source(self, index: int) -> str | Tensor:
        return self.masks[index]

    def batch(self, indices: Sequence[int], seeds: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        if not (found := self.drawn(indices, seeds)):
            return torch.empty(0, 3, self.img_size, self.img_size), torch.empty(0, *[self.img_size] * 2).long()
        most = [max(mask.shape[axis] for _, mask in found) for axis in (0, 1)]
        images, masks = [], []
        for image, mask in found:
            edge = (0, most[1] - mask.shape[1], 0, most[0] - mask.shape[0])
            images.append(pad(image, edge))
            masks.append(pad(mask.long(), edge, value=OUTSIDE))
        return torch.stack(images), torch.stack(masks)

    def draw(self, index: int, seed: int) -> tuple[Tensor, Tensor]:
        image, mask = self.open(index), self.open_mask(index)
        if image.size != mask.size:
            sizes = "{1}x{0} and {3}x{2}".format(*image.size, *mask.size)
            raise RecastError(f"{self.image_name(index)} and its mask have different sizes, {sizes}: they must be one")
        if self.augment is not None:
            with drawing(seed):
                image, mask = self._augmented(image, mask, self.augment)
        else:
            image, mask = self._whole(image, mask)
        return to_pixels(image), torch.from_numpy(np.array(mask))

    def _whole(self, *pair: Image.Image) -> list[Image.Image]:
        """As validation sees them."""
        size, share = (self.img_size, self.img_size), self.crop_pct or 1.0
        if self.is_whole:
            width, height = middle(pair[0]).size
            short, share = min(width, height), 1.0
            size = round(height * self.img_size / short), round(width * self.img_size / short)
        return [resize_to(one, size, share, how) for one, how in zip(pair, (BICUBIC, NEAREST), strict=True)]

    def _augmented(self, image: Image.Image, mask: Image.Image, augment: Augmentation) -> tuple[Image.Image, ...]:
        """Scaled by a factor of `augment.resize` (1: the short side to S), cut to S x S, mirrored, coloured."""
        size = self.img_size
        if augment.crop == "none":
            image, mask = self._whole(image, mask)
        else:
            smallest, largest = augment.resize
            factor = smallest + (largest - smallest) * float(torch.rand(()))
            factor *= size / min(image.size)
            scaled = [max(1, round(side * factor)) for side in image.size]
            short = [max(0, size - side) for side in scaled]
            left, top = (int(torch.randint(max(side - size, 0) + 1, ())) for side in scaled)
            border = (short[0] // 2, short[1] // 2, short[0] - short[0] // 2, short[1] - short[1] // 2)
            box = (left, top, left + size, top + size)
            image = ImageOps.expand(image.resize(scaled, BICUBIC), border, PADDING).crop(box)
            mask = ImageOps.expand(mask.resize(scaled, NEAREST), border, IGNORE).crop(box)
        if augment.flip and torch.rand(()) < 0.5:
            image, mask = (one.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for one in (image, mask))
        if jitter := augment.color_jitter:
            image = transforms.ColorJitter(jitter, jitter, jitter)(image)
        return image, mask

    def subset(self, indices: Tensor) -> Self:
        return replace(self, items=chosen(self.items, indices), masks=chosen(self.masks, indices))


def read_mask(path: str) -> np.ndarray:
    """The numbers in a mask of one channel: grey of 8 or 16 bits, or a palette's places."""
    with opened(path, path) as mask:
        if mask.format in LOSSY or mask.info.get("compression") == "jpeg":  # of TIFF
            raise RecastError("JPEG changes the numbers of a mask; write masks as PNG, from what they were made of")
        values = np.array(mask)
        if values.ndim != 2 or values.dtype.kind == "f":
            raise RecastError(f"it has pixels of mode {mask.mode}, a mask the number of a class: grey, or a palette")
        if values.size and values.min() < 0:
            raise RecastError(f"it has the class {values.min()}, expected 0 or more")
    return values.astype(np.int64)


def find_masks(config: DataConfig) -> Found:
    """images/ and masks/, files of the same names but for their endings; in train/ and val/ (or test/), or a share of
    the images is held out. classes.txt names the classes 0, 1, ..., a line each; without it the numbers in the masks
    are the classes, gaps and all.

    VOC2012 and ADEChallengeData2016, or the folder that holds them, are read as they are."""
    root = data_dir(config)
    root = next((root / name for name in ("VOCdevkit/VOC2012", "VOC2012", ADE) if (root / name).is_dir()), root)
    names, blank, files, notes = _lines(root / "classes.txt"), IGNORE, Disk(root), list[str]()
    if (root / "SegmentationClass").is_dir():
        lists = [root / "ImageSets" / "Segmentation" / f"{part}.txt" for part in ("train", "val")]
        found = [_pairs(files, "JPEGImages", "SegmentationClass", only=path) for path in lists]
        names = names or VOC
    elif (root / "annotations" / "training").is_dir():
        found = [_pairs(files, f"images/{part}", f"annotations/{part}") for part in ("training", "validation")]
        lines, blank = _lines(root / "objectInfo150.txt") or [], 0
        names = names or [line.split("\t")[-1] for line in lines[1:]] or None
    else:
        base, forms = "", ("{}/images", "{}/masks")
        if "images" in files.inside("").folders and not any(map(part_word, files.inside("").folders)):
            base, forms = "images", ("images/{}", "masks/{}")
        folders = files.inside(base).folders
        train, val = choose_parts(folders, files.where(base))
        notes = parts_note(str(root), train, val, folders) if train or val else []
        places = [train or "", *([val] if val else [])]
        found = [_pairs(files, *(form.format(place).strip("/") for form in forms)) for place in places]
    ids = None if names is None or blank == IGNORE else tuple(range(1, len(names) + 1))
    if names is None:
        present = {int(value) for part in found for path in part.masks for value in np.unique(read_mask(str(path)))}
        ids = tuple(sorted(present - {IGNORE, blank}))
        names = [str(number) for number in ids]
    if not 1 < len(names) <= IGNORE:
        raise RecastError(f"{root} has {len(names)} classes, expected 2 to {IGNORE}: name them in classes.txt")
    parts = [replace(part, ids=ids, blank=blank, num_classes=len(names)) for part in found]
    notes += files.notes()
    return Found(root.resolve().name, parts[0], parts[1] if parts[1:] else None, names, crop="random", notes=notes)


def _lines(path: Path) -> list[str] | None:
    """Names, a line each; None where the file is not there."""
    if not path.is_file():
        return None
    names = [composed(line.strip()) for line in decode(read_bytes(path), path).splitlines() if line.strip()]
    if twice := [name for name in names if names.count(name) > 1]:
        raise RecastError(f"{path} names {shown(twice[0])} twice: expected a name a line, each once")
    return names


def _pairs(files: Disk, *places: str, only: Path | None = None) -> ImagePairs:
    """The images of a folder with their masks; of `only`, a file with names without endings, those alone."""
    by_stem = list[Mapping[str, str]]()
    wanted = None if only is None else _lines(only)
    if only is not None and wanted is None:
        raise RecastError(f"no such file: {only}, expected the names of images, a line each")
    for place in places:
        if not (files.top / place).is_dir():
            both = f"{places[0]}/ and {places[1]}/"
            raise RecastError(f"{files.top} has no folder {place}: expected {both}, files with the same names")
        listing = files.inside(place)
        files.skip(place, *listing.skipped, *(f"{name}/" for name in listing.folders))
        stems = [(composed(Path(path).stem), path) for path in sorted(listing.images)]
        stems = [(stem, path) for stem, path in stems if wanted is None or stem in wanted]
        by_stem.append(dict(stems))
        if len(by_stem[-1]) < len(stems):
            stem, path = next(b for a, b in pairwise(sorted(stems)) if a[0] == b[0])
            raise RecastError(f"{files.where(place)} has two files {stem}, {Path(path).name} is one: keep one")
    images, masks = by_stem
    if absent := sorted(set(wanted or ()) - images.keys()):
        where = files.where(places[0])
        raise RecastError(f"{only} names {len(absent)} images that are not in {where}: the first is {absent[0]}")
    if not images:
        raise RecastError(f"{files.where(places[0])} has no images")
    if missing := sorted(images.keys() - masks.keys()):
        raise RecastError(
            f"{len(missing)} of {len(images)} images in {files.where(places[0])} have no mask: the first is "
            f"{missing[0]}, expected {places[1]}/{missing[0]}.png"
        )
    return ImagePairs(list(images.values()), [masks[stem] for stem in images], PHOTO)
