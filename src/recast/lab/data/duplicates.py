"""Validation images that are also training images: identical files, and the same picture re-encoded.

Pictures are compared by the correlation of their `SIDE` x `SIDE` grey thumbnails. A perceptual hash (imagehash) gives
no degree of similarity: pictures of empty places share one, and a single bit of noise changes it.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from recast.errors import RecastError, listed
from recast.lab.data.datasets import ImageTensors, LabelledImages
from recast.lab.data.images import check_regular, opened, to_rgb
from recast.lab.data.sources import Data
from recast.lab.folder.tables import write_rows

MOST_FILES = 100_000
"""Largest number of images whose files are compared."""
MOST_PICTURES, MOST_BYTES = 20_000, 500 * 2**20
"""Largest number, and size on disk, of images that are decoded to compare them: about ten seconds."""
BEGINNING = 2**16
"""Bytes of a file that are compared first."""
SIDE = 16
"""Side of a thumbnail in pixels."""
ALIKE = 0.998
"""Smallest correlation of two thumbnails of one picture."""


def find_duplicates(train: LabelledImages, val: LabelledImages) -> tuple[dict[int, int], str]:
    """Compare all validation with all training images. Unreadable ones have no duplicates.

    Returns {index of a validation image: that of a training image}, and which images were not compared, and why; empty
    if all were.
    """
    count, files = len(train) + len(val), [getattr(part, "items", [None]) for part in (train, val)]
    pairs: dict[int, int] = {}
    if not isinstance(train, ImageTensors):
        on_disk = all(isinstance(items[0], str) and os.path.isfile(items[0]) for items in files)
        if count > (MOST_FILES if on_disk else MOST_PICTURES):
            return {}, f"{count:,} images are too many to compare"
        pairs = _equal_files(*files) if on_disk else {}
        pairs = {index: pairs[index] for index in pairs if val.is_readable(index)}
        if count > MOST_PICTURES or (on_disk and sum(map(_size, files[0] + files[1])) > MOST_BYTES):
            return pairs, "only files were compared: re-encoded copies of a picture are not detected"
    alike = _equal_pictures(_thumbnails(train.plain()), _thumbnails(val))
    return dict(sorted((alike | pairs).items())), ""


def report_duplicates(data: Data, path: Path) -> str:
    """Return a line about duplicates and write them to the CSV file `path`; empty if there are none."""
    pairs, unchecked = find_duplicates(data.train, data.val)
    if not pairs:
        return f"duplicates: none found; {unchecked}" if unchecked else ""
    names = [(data.val.image_name(first), data.train.image_name(second)) for first, second in pairs.items()]
    write_rows(path, ("validation", "training"), names)
    share = 100 * len(pairs) / len(data.val)
    examples = listed([f"{first} = {second}" for first, second in names], 2)
    return (
        f"duplicates: {len(pairs)} of {len(data.val)} validation images ({share:.3g} %) are training images too, which "
        f"raises the accuracy: {examples}; all pairs: {path}" + f"; {unchecked}" * bool(unchecked)
    )


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def _digest(path: str, most: int = -1) -> bytes:
    try:
        check_regular(path)
        with open(path, "rb") as file:
            return hashlib.sha256(file.read(most)).digest()
    except OSError:
        return os.fsencode(path)


def _equal_files(train: Sequence[str], val: Sequence[str]) -> dict[int, int]:
    """Compare the sizes of files, then the beginnings of those of one size, then all bytes."""
    groups = [(list(range(len(train))), list(range(len(val))))]
    for key in (_size, partial(_digest, most=BEGINNING), _digest):
        split = []
        for first, second in groups:
            of_key = defaultdict[object, tuple[list[int], list[int]]](lambda: ([], []))
            for side, (files, indices) in enumerate(((train, first), (val, second))):
                for index in indices:
                    of_key[key(files[index])][side].append(index)
            split += [group for group in of_key.values() if all(group)]
        groups = split
    return {index: first[0] for first, second in groups for index in second}


def _thumbnails(images: LabelledImages) -> Tensor:
    """Return (N, SIDE²) pixels of mean 0 and norm 1; zeros for flat images and those that cannot be read."""
    if isinstance(images, ImageTensors):
        parts = images.pixels.split(1024)
        rows = torch.cat([F.adaptive_avg_pool2d(part.float().mean(1), SIDE).flatten(1) for part in parts])
    else:
        pixels = np.zeros((len(images), SIDE**2), np.float32)
        for index, row in enumerate(pixels):
            with suppress(RecastError):
                row[:] = _thumbnail(images, index).reshape(-1)
        rows = torch.from_numpy(pixels)
    rows = rows - rows.mean(1, keepdim=True)
    norm = rows.norm(dim=1, keepdim=True)
    return (rows / norm).where(norm > 1e-3, 0)


def _thumbnail(images: LabelledImages, index: int) -> np.ndarray:
    item = getattr(images, "items", {index: None})[index]
    if images.in_chans is not None or not isinstance(item, str) or not os.path.isfile(item):
        return F.adaptive_avg_pool2d(images.batch([index])[0].mean(1), SIDE).numpy()
    with opened(item, item) as image:
        image.draft("L", (4 * SIDE, 4 * SIDE))  # of a JPEG its brightness, and an eighth of each side, is computed
        grey = image if image.mode == "L" else to_rgb(image).convert("L")
        return np.asarray(grey.resize((SIDE, SIDE), Image.Resampling.BOX), np.float32) / 255


def _equal_pictures(train: Tensor, val: Tensor) -> dict[int, int]:
    """Return the most similar training image of every validation image that is ALIKE."""
    pairs: dict[int, int] = {}
    for start in range(0, len(val), 512):
        alike, column = (val[start : start + 512] @ train.T).max(1)
        pairs |= {start + row: int(column[row]) for row in (alike >= ALIKE).nonzero().flatten().tolist()}
    return pairs
