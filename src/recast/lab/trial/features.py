"""Features of images on disk, in half precision: computed once, the same for every arm, mapped into memory."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from recast.errors import RecastError, first_line
from recast.files import replaced
from recast.lab.data import Data, Loader
from recast.lab.data.datasets import LabelledImages
from recast.lab.data.seeding import epoch_order
from recast.lab.pages.formats import memory
from recast.lab.trial.split import Split

PART = 32
"""Images of one pass through the trunk."""
CHUNK = 2**26
"""Bytes of features that are checked at once."""
HALF = 1e4
"""Features with larger magnitudes are stored in single precision: half precision ends at 65,504."""


@dataclass(frozen=True)
class Bank:
    """Features of images, and their labels.

    views: an array (N, …) for each augmented view. labels: (N,). images: positions of the images that count.
    """

    views: tuple[np.ndarray, ...]
    labels: Tensor
    images: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def subset(self, places: Tensor) -> Bank:
        """Return some of the images."""
        return replace(self, images=self.images[places])

    def training(self, size: int, updates: int, seed: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches (features (B, …), labels (B,)), which follow from seed and number of the update alone."""
        size = min(size, len(self))
        for update in range(updates):
            epoch, at = divmod(update, len(self) // size)
            chosen = self.images[epoch_order(len(self), seed, epoch)[at * size : (at + 1) * size]]
            # an image goes through all of its views before one comes again
            yield self._batch(chosen, (chosen + epoch) % len(self.views), device)

    def spread(self, count: int) -> Bank:
        """Return at most `count` images, evenly spread: files come class by class."""
        return self.subset(torch.arange(0, len(self), math.ceil(len(self) / count)))

    def whole(self) -> Bank:
        """Return all images of the arrays."""
        return replace(self, images=torch.arange(len(self.labels)))

    def plain(self, size: int, device: torch.device, view: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all images in order, in one view."""
        for chosen in self.images.split(size):
            yield self._batch(chosen, torch.full_like(chosen, view), device)

    def _batch(self, images: Tensor, views: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        rows = [self.views[view][image] for view, image in zip(views.tolist(), images.tolist(), strict=True)]
        return torch.from_numpy(np.stack(rows)).float().to(device), self.labels[images].to(device)


def dtype_of(features: Tensor) -> Literal["float16", "float32"]:
    """Return the type in which such features are stored."""
    return "float16" if float(features.abs().max()) < HALF else "float32"


def check_space(folder: Path, needed: int) -> None:
    """Raise RecastError where features do not fit on the disk of a folder."""
    place = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.is_dir())
    if needed > 0.9 * (free := shutil.disk_usage(place).free):
        raise RecastError(
            f"the features take {memory(needed)}, the disk of {place} has {memory(free)} left: choose "
            "another disk with --out, or fewer images with --num-train"
        )


def store(
    split: Split, data: Data, images: LabelledImages, views: int, dtype: str, image_bytes: int, folder: Path, name: str,
    device: torch.device, advance: Callable[[int], None], say: Callable[[str], object],
) -> Bank:  # fmt: skip
    """Compute the features of images, or read those on disk; a view is one file, FOLDER/NAME-VIEW.npy.

    A damaged file is computed again, with a message. Raises RecastError if the network gives NaN or infinity.
    """
    arrays = []
    for view in range(views):
        path = folder / f"{name}-{view}.npy"
        if path.is_file() and (problem := _problem(path, len(images), dtype, image_bytes)):
            say(f"{path} is damaged ({problem}): its features are computed again")
            path.unlink()
        if not path.is_file():
            parts = (split.features(data.normalised(pixels, device)) for pixels, _ in Loader(images, PART, epoch=view))
            with replaced(path) as temporary:
                _write(parts, images, dtype, temporary, advance)
        arrays.append(np.load(path, mmap_mode="r"))
    return Bank(tuple(arrays), images.labels.clone(), torch.arange(len(images)))


def _problem(path: Path, count: int, dtype: str, image_bytes: int) -> str:
    """Return why a file cannot hold the features of `count` images; empty if it can."""
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError) as error:
        return first_line(error)
    if len(array) != count or array.dtype != dtype or array[:1].nbytes != image_bytes:
        return "of other images"
    step = max(1, CHUNK // image_bytes)
    is_finite = all(np.isfinite(array[first : first + step]).all() for first in range(0, count, step))
    return "" if is_finite else "NaN or infinity"


def _write(
    parts: Iterator[Tensor], images: LabelledImages, dtype: str, path: Path, advance: Callable[[int], None]
) -> None:
    most, place = float(np.finfo(dtype).max), 0
    with path.open("wb") as file:  # writing to a memory map of a full disk would kill the process
        for part in parts:
            if not place:
                shape = (len(images), *part.shape[1:])
                header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
            if len(bad := (~part.flatten(1).isfinite().all(1)).nonzero()):
                image = images.image_name(place + int(bad[0]))
                raise RecastError(f"the network gives NaN or infinity for {image}: check its weights, --mean and --std")
            file.write(part.clamp(-most, most).cpu().numpy().astype(dtype).tobytes())
            place += len(part)
            advance(len(part))
