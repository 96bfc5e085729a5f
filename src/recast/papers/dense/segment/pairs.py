"""Images with a class for every pixel: `ImagePairs`, what training sees of them, and folders of such pairs.

Shapes: B images (B, 3, S, S) in [0, 1], masks (B, S, S) int64.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn.functional import pad

from recast.errors import RecastError, listed, shown
from recast.lab.config import Augmentation, DataConfig
from recast.lab.data.datasets import RawData
from recast.lab.data.fingerprint import digest_of, size_of
from recast.lab.data.folders import data_dir
from recast.lab.data.images import BICUBIC, NEAREST, PADDING, PHOTO, middle, opened, resize_to, to_bytes
from recast.lab.data.parts import choose_parts, part_word, parts_note
from recast.lab.data.seeding import seeded
from recast.lab.data.trees import Disk, composed
from recast.papers.dense.images import DenseImages, coloured, mirrored
from recast.reading import decode, read_bytes

IGNORE = 255
"""Value of unknown pixels in a mask: they count neither in the loss nor in a metric."""
OUTSIDE = 256
"""Value in the masks of a batch that fills an image up to the size of the largest."""
WHITE = (255, 65535)
"""White of 8 and of 16 bits: beside 0 alone, it is the object of a black and white mask."""
MAX_IGNORED = 0.05
"""Largest share of unknown pixels that needs no option: with more, 255 is likely to be a class."""
LOOKED_AT = 1000
"""Number of masks whose numbers are counted before a run, evenly spread, where names say what the classes are."""
ADE = "ADEChallengeData2016"
LOSSY = ("JPEG", "MPO", "JPEG2000")
"""Formats of one channel that change the numbers of a mask."""


@dataclass(eq=False)
class ImagePairs(DenseImages):
    """Images and masks: tensors (N, 3, H, W) and (N, H, W) uint8, or paths that are read at each access."""

    masks: Sequence[str] | Tensor
    img_size: int
    _: KW_ONLY
    ids: tuple[int, ...] | None = None
    """Numbers in the masks of classes 0, 1, ...; None: 0, 1, ... themselves."""
    blank: int = IGNORE
    """Number in a file, beside `IGNORE`, of unknown pixels."""
    num_classes: int = IGNORE
    is_whole: bool = False
    """Without augmentation: return the whole image, its short side S, instead of the middle square."""
    task = "segment"
    have = "masks"

    def open_mask(self, index: int) -> Image.Image:
        """Return the classes of the pixels, in 8 bits. Raises RecastError for an unreadable mask or unknown class."""
        mask = self.masks[index]
        if isinstance(mask, Tensor):
            return Image.fromarray(mask.numpy())
        values = read_mask(mask)
        if len(unknown := self.unknown(values)):
            raise RecastError(self.refusal(mask, unknown[0]))
        known = np.isin(values, self.numbers)
        return Image.fromarray(np.where(known, np.searchsorted(self.numbers, values), IGNORE).astype(np.uint8))

    @property
    def numbers(self) -> np.ndarray:
        """Return the numbers of the classes in the masks."""
        return np.arange(self.num_classes) if self.ids is None else np.array(self.ids)

    def unknown(self, values: np.ndarray) -> np.ndarray:
        """Return those of the values of a mask that are neither a class nor unknown pixels."""
        return values[~np.isin(values, [*self.numbers, IGNORE, self.blank])]

    def refusal(self, mask: str, number: int, found: str = "") -> str:
        """Return the error about a number in a mask that is no class; `found`: what the masks hold."""
        ids, blank = self.numbers, f", or {self.blank} for unknown pixels"
        expected = f"{ids[0]} to {ids[-1]}" if ids[-1] - ids[0] == len(ids) - 1 else listed(list(map(str, ids)), 5)
        expected += "" if self.blank in ids else blank
        return f"mask {mask} has class {number}, expected {expected}{found}: name all classes in classes.txt"

    def targets(self) -> list[str]:
        return [digest_of([mask.numpy()]) if isinstance(mask, Tensor) else size_of(mask) for mask in self.masks]

    def label_source(self, index: int) -> str | Tensor:
        return self.masks[index]

    def load(self, indices: Sequence[int], seeds: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        if not (pairs := self.drawn(indices, seeds)):
            return torch.empty(0, 3, self.img_size, self.img_size), torch.empty(0, *[self.img_size] * 2).long()
        most = [max(mask.shape[axis] for _, mask in pairs) for axis in (0, 1)]
        images, masks = [], []
        for image, mask in pairs:
            edge = (0, most[1] - mask.shape[1], 0, most[0] - mask.shape[0])
            images.append(pad(image, edge))
            masks.append(pad(mask.long(), edge, value=OUTSIDE))
        return torch.stack(images), torch.stack(masks)

    def draw(self, index: int, seed: int) -> tuple[Tensor, Tensor]:
        image, mask = self.open(index), self.open_mask(index)
        if image.size != mask.size:
            sizes = "{1}x{0} and {3}x{2}".format(*image.size, *mask.size)
            raise RecastError(f"{self.image_name(index)} and its mask have different sizes, {sizes}; make them equal")
        if self.augment is None:
            image, mask = self._whole(image, mask)
        else:
            with seeded(seed):
                image, mask = self._augmented(image, mask, self.augment)
        return to_bytes(image), torch.from_numpy(np.array(mask))

    def _whole(self, *pair: Image.Image) -> list[Image.Image]:
        """Return image and mask as validation sees them."""
        size, share = (self.img_size, self.img_size), self.crop_pct or 1.0
        if self.is_whole:
            width, height = middle(pair[0]).size
            short, share = min(width, height), 1.0
            size = round(height * self.img_size / short), round(width * self.img_size / short)
        return [resize_to(each, size, share, how) for each, how in zip(pair, (BICUBIC, NEAREST), strict=True)]

    def _augmented(self, image: Image.Image, mask: Image.Image, augment: Augmentation) -> tuple[Image.Image, ...]:
        """Return both scaled by a factor of `augment.resize` (1: the short side to S), cut, mirrored and coloured."""
        size = self.img_size
        if augment.crop == "none":
            image, mask = self._whole(image, mask)
        else:
            _, sides, (left, top) = self.cut(image.size, size / min(image.size), augment)
            short = [max(0, size - side) for side in sides]
            border = (short[0] // 2, short[1] // 2, short[0] - short[0] // 2, short[1] - short[1] // 2)
            image, mask = (
                ImageOps.expand(each.resize(sides, how), border, fill).crop((left, top, left + size, top + size))
                for each, how, fill in ((image, BICUBIC, PADDING), (mask, NEAREST, IGNORE))
            )
        if mirrored(augment):
            image, mask = (each.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for each in (image, mask))
        return coloured(image, augment), mask


def read_mask(path: str) -> np.ndarray:
    """Return the numbers in a mask of one channel: grey of 8 or 16 bits, or the indices of a palette."""
    with opened(path, path) as mask:
        if mask.format in LOSSY or mask.info.get("compression") == "jpeg":  # of TIFF
            raise RecastError("JPEG changes the numbers of a mask; write masks as PNG, from what they were made of")
        values = np.array(mask)
        if values.ndim != 2 or values.dtype.kind == "f":
            raise RecastError(f"it has pixels of mode {mask.mode}, a mask the number of a class: grey, or a palette")
        if values.size and values.min() < 0:
            raise RecastError(f"it has the class {values.min()}, expected 0 or more")
    return values.astype(np.int64)


def find_masks(config: DataConfig) -> RawData:
    """Read images/ and masks/, files with equal stems; in train/ and val/ (or test/), or a share is held out.

    classes.txt names the classes 0, 1, ..., a line each; without it the numbers in the masks are the classes, with any
    gaps. Masks of black and white alone have two classes. ADEChallengeData2016, or the folder that holds it, is read as
    it is.
    """
    root = data_dir(config)
    root = root / ADE if (root / ADE).is_dir() else root
    names, blank, files, notes = _lines(root / "classes.txt"), IGNORE, Disk(root), list[str]()
    if (root / "annotations" / "training").is_dir():
        pairs = [_pairs(files, f"images/{part}", f"annotations/{part}") for part in ("training", "validation")]
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
        pairs = [_pairs(files, *(form.format(place).strip("/") for form in forms)) for place in places]
    ids = None if names is None or blank == IGNORE else tuple(range(1, len(names) + 1))
    counted = [_counted(part.masks, config, 1 if names is None else -(-len(part.masks) // LOOKED_AT)) for part in pairs]
    ids, names = _classes(counted, ids, names, blank)
    if not 1 < len(names) <= IGNORE:
        raise RecastError(f"{root} has {len(names)} classes, expected 2 to {IGNORE}: name them in classes.txt")
    parts = [replace(part, ids=ids, blank=blank, num_classes=len(names)) for part in pairs]
    # ADE's unknown pixels are known to be, a tenth of all: no number is guessed
    limit = config.max_ignored if config.max_ignored is not None else MAX_IGNORED if blank == IGNORE else 1.0
    notes += [_sanity(str(root), parts, counted, names, config, limit), *files.notes()]
    return RawData(root.resolve().name, parts[0], parts[1] if parts[1:] else None, names, crop="random", notes=notes)


Counted = dict[str, dict[int, int]]
"""Mask → number in it → pixels."""


def _classes(
    counted: Sequence[Counted], ids: tuple[int, ...] | None, names: list[str] | None, blank: int
) -> tuple[tuple[int, ...] | None, list[str]]:
    """Return the numbers (None: 0, 1, ...) and the names of the classes: as given, else those that the masks hold.

    0 and white alone are two classes, also where two names are given.
    """
    present = sorted({number for part in counted for mask in part.values() for number in mask})
    is_white = blank == IGNORE and len(present) == 2 and present[0] == 0 and present[1] in WHITE
    if names is None or (is_white and len(names) == 2):
        ids = tuple(number for number in present if is_white or number not in (IGNORE, blank))
    return ids, [str(number) for number in ids or ()] if names is None else names


def _counted(masks: Sequence[str] | Tensor, config: DataConfig, step: int) -> Counted:
    """Return the pixels of every number in every `step`-th mask, without unreadable ones if they are skipped."""
    counted: Counted = {}
    for mask in map(str, masks[::step]):
        try:
            values = read_mask(mask)
        except RecastError:
            if config.bad_image == "stop":
                raise
            continue  # which the loader names
        # counting is many times as fast as sorting, where no number is too large for it
        counts = np.bincount(values.ravel()) if values.max(initial=0) < 2**16 else None
        numbers = np.unique(values) if counts is None else counts.nonzero()[0]
        counted[mask] = {int(n): int((values == n).sum() if counts is None else counts[n]) for n in numbers}
    return counted


def _sanity(
    where: str,
    parts: Sequence[ImagePairs],
    counted: Sequence[Counted],
    names: Sequence[str],
    config: DataConfig,
    limit: float,
) -> str:
    """Return the line with classes and ignored pixels. Raises RecastError for masks that are read wrongly or in vain.

    That is: numbers that are no class, fewer than two classes, and more ignored pixels than `limit`.
    """
    masks, numbers = {mask: each for part in counted for mask, each in part.items()}, parts[0].numbers.tolist()
    wrong = {mask: no_class for mask, each in masks.items() if len(no_class := parts[0].unknown(np.array([*each])))}
    if wrong and (config.bad_image == "stop" or len(wrong) == len(masks)):
        values = listed([str(number) for number in sorted({number for mask in wrong for number in masks[mask]})], 8)
        mask, no_class = next(iter(wrong.items()))
        found = f" (values {values} in {len(wrong)} of {len(masks)} masks)"
        raise RecastError(parts[0].refusal(mask, no_class[0], found))
    shares = list[str]()
    for part, title in zip(counted, ("training", "validation") if counted[1:] else ("all",), strict=True):
        pixels = sum((Counter(each) for mask, each in part.items() if mask not in wrong), Counter[int]())
        if not (count := pixels.total()):
            continue
        ignored = 1 - sum(pixels[number] for number in numbers) / count
        if ignored > limit:
            raise RecastError(
                f"{where}: {100 * ignored:.3g} % of the pixels of {title} masks are {parts[0].blank}, which is unknown "
                "and ignored: if it is a class, write the class's number instead; if not, allow it with --max-ignored "
                f"{math.ceil(100 * ignored) / 100}"
            )
        absent = [name for name, number in zip(names, numbers, strict=True) if not pixels[number]]
        if len(names) - len(absent) < 2 and title != "validation":
            raise RecastError(f"{where}: {title} masks have no pixel of {listed(absent, 3)}: nothing can be learned")
        shares.append(f"{100 * ignored:.3g} % of {title}" + (f" (no pixel of {listed(absent, 3)})" if absent else ""))
    of = f" of {total:,}" if len(masks) < (total := sum(map(len, parts))) else ""
    text = f"masks: {len(masks):,}{of}, classes: {len(names)} ({listed(list(names), 5)})"
    is_white = numbers[1] in WHITE and names[1] != str(numbers[1])
    text += f", which are 0 and {numbers[1]} in them" if is_white else ""
    text += f"; skipped {len(wrong)} with numbers that are no class" if wrong else ""
    return f"{where}: {text}; ignored pixels: {', '.join(shares)}"


def _lines(path: Path) -> list[str] | None:
    """Return the names in a file, one a line; None if there is no file."""
    if not path.is_file():
        return None
    names = [composed(line.strip()) for line in decode(read_bytes(path), path).splitlines() if line.strip()]
    if twice := [name for name in names if names.count(name) > 1]:
        raise RecastError(f"{path} names {shown(twice[0])} twice: expected a name a line, each once")
    return names


def _pairs(files: Disk, *places: str) -> ImagePairs:
    """Return the images of a folder with their masks."""
    by_stem = list[dict[str, str]]()
    for place in places:
        if not (files.top / place).is_dir():
            both = f"{places[0]}/ and {places[1]}/"
            raise RecastError(f"{files.top} has no folder {place}: expected {both}, files with the same names")
        listing = files.inside(place)
        files.skip(place, *listing.skipped, *(f"{name}/" for name in listing.folders))
        paths = dict[str, str]()
        for path in sorted(listing.images):
            if (stem := composed(Path(path).stem)) in paths:
                raise RecastError(f"{files.where(place)} has two files {stem}, {Path(path).name} is one: keep one")
            paths[stem] = path
        by_stem.append(paths)
    images, masks = by_stem
    if not images:
        raise RecastError(f"{files.where(places[0])} has no images")
    if missing := sorted(images.keys() - masks.keys()):
        raise RecastError(
            f"{len(missing)} of {len(images)} images in {files.where(places[0])} have no mask: the first is "
            f"{missing[0]}, expected {places[1]}/{missing[0]}.png"
        )
    alone = sorted(masks.keys() - images.keys())
    files.skip(places[1], *(f"{Path(masks[stem]).name} (has no image)" for stem in alone))
    return ImagePairs(list(images.values()), [masks[stem] for stem in images], PHOTO)
