"""Per-image scores on the disk: what was measured once is not measured again, and an interrupted pass goes on.

One file for each (suite, part, model). It counts only for the weights, images and options it was made with.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recast import __version__
from recast.data.datasets import LabelledImages
from recast.evaluation.bench import Options, PixelModel, Score, Source
from recast.files import replaced


def model_key(model: PixelModel) -> str:
    """A hash of what the model computes: structure, every tensor of its state, normalisation."""
    digest = hashlib.sha256(f"{__version__}{model}".encode())
    for name, tensor in (*model.state_dict().items(), ("mean", model.mean), ("std", model.std)):
        _add(digest, name, tensor)
    return digest.hexdigest()


def source_key(source: Source) -> str:
    """A hash of the images and labels of a source: the pixels of small images, name, size and date of files."""
    images = source.images
    digest = hashlib.sha256(f"{type(images).__name__} {len(images)} {images.img_size} {source.dataset}".encode())
    for name in ("crop_pct", "size", "answers"):
        digest.update(repr(getattr(images, name, None)).encode())
    for name, tensor in (("labels", getattr(images, "labels", None)), ("columns", source.columns)):
        if tensor is not None:
            _add(digest, name, tensor)
    if isinstance(pixels := getattr(images, "pixels", None), Tensor):
        _add(digest, "pixels", pixels)
    elif isinstance(images, LabelledImages):
        digest.update("\n".join(_files(images)).encode())
    return digest.hexdigest()


def _add(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    # as bytes: bfloat16 has no NumPy type
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def _files(images: LabelledImages) -> Iterable[str]:
    for index in range(len(images)):
        name = images.image_name(index)
        try:
            found = os.stat(name)
            yield f"{name} {found.st_size} {found.st_mtime_ns}"
        except OSError:  # of an archive or another library's data set
            yield name


class Scores:
    """The scores of one model on one source: {metric: (n, k)}, of which the first `done` images are known."""

    def __init__(self, n: int, path: Path | None = None, key: str = "") -> None:
        self.n, self.path, self.key = n, path, key
        self.done = 0
        self.arrays: dict[str, np.ndarray] = {}
        if path is not None and path.is_file():
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
            if str(arrays.pop("key")) != self.key:
                return
            done = int(arrays.pop("done"))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return  # measured anew
        if all(array.ndim == 2 and len(array) == self.n for array in arrays.values()):
            self.done, self.arrays = done, arrays

    @property
    def is_complete(self) -> bool:
        return self.done >= self.n

    def put(self, first: int, score: Score) -> None:
        """Keep the scores of images `first`, `first` + 1, ..."""
        values = score.values.detach().float().cpu().numpy()
        values = values.reshape(len(values), -1)
        if score.metric not in self.arrays:
            self.arrays[score.metric] = np.zeros((self.n, values.shape[1]), dtype=np.float32)
        self.arrays[score.metric][first : first + len(values)] = values

    def save(self) -> None:
        if self.path is None or not self.done:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(self.path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, key=np.asarray(self.key), done=np.asarray(self.done), **self.arrays)  # type: ignore[arg-type]


def score_file(folder: Path, suite: str, part: str, model: str) -> Path:
    """FOLDER/SUITE/PART.MODEL.npz."""
    stem = f"{part.replace('/', '-')}.{model}" if part else model
    return folder / suite / f"{stem}.npz"


def scores_key(suite: str, uses: Iterable[str], options: Options, model: str, source: str) -> str:
    """One hash of everything that the scores depend on."""
    told = {name: getattr(options, name) for name in uses}
    return hashlib.sha256(repr((suite, told, model, source)).encode()).hexdigest()
