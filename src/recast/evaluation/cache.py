"""Per-image scores on the disk: what was measured once is not measured again, and an interrupted pass goes on.

One file for each (suite, part, model). It counts only for the weights, images and options it was made with.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recast import __version__
from recast.data.datasets import LabelledImages
from recast.evaluation.context import Context, PixelModel, Score, Source
from recast.run.files import replaced


def model_key(model: PixelModel) -> str:
    """A hash of what decides what the model computes: structure, settings, every tensor of its state, normalisation."""
    digest = hashlib.sha256(f"{__version__}{model}".encode())
    for name, module in model.named_modules():
        told = {key: value for key, value in vars(module).items() if key != "training" and _is_plain(value)}
        digest.update(f"{name} {sorted(told.items())}".encode())
    for name, tensor in model.state_dict().items():
        _add(digest, name, tensor)
    return digest.hexdigest()


def _is_plain(value: object) -> bool:
    """Numbers, texts, and tuples or data classes of them: what a module's `repr` may not show."""
    if is_dataclass(value) and not isinstance(value, type):
        return all(_is_plain(getattr(value, each.name)) for each in fields(value))
    if isinstance(value, tuple):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, bool | int | float | str)


class Cache:
    """The files of a folder that hold scores; of sources made from the same images, these are read once.

    FOLDER/SUITE/PART.MODEL.KEY.npz: other weights, images or options have a file of their own.
    """

    def __init__(self, folder: Path, context: Context) -> None:
        self.folder, self.context = folder, context
        self.models = {name: model_key(model) for name, model in context.models.items()}
        self.known: dict[LabelledImages, str] = {}

    def open(self, suite: str, uses: Iterable[str], source: Source) -> dict[str, Scores]:
        """The scores of every model; uses: the options that they depend on."""
        told = {name: getattr(self.context.options, name) for name in uses}
        key = self._source(self.context.dataset(suite), source)
        found = {}
        for name, weights in self.models.items():
            whole = hashlib.sha256(repr((suite, told, weights, key)).encode()).hexdigest()
            stem = ".".join(filter(None, (source.part.replace("/", "-"), name)))
            found[name] = Scores(len(source.images), self.folder / suite / f"{stem}.{whole[:12]}.npz", whole)
        return found

    def _source(self, dataset: str, source: Source) -> str:
        """A hash of images, labels, columns and what else the scores depend on."""
        hashes = " ".join(self._images(images) for images in (source.images, *source.depends))
        digest = hashlib.sha256(f"{dataset} {source.part} {hashes}".encode())
        if source.columns is not None:
            _add(digest, "columns", source.columns)
        return digest.hexdigest()

    def _images(self, images: LabelledImages) -> str:
        if images in self.known:
            return self.known[images]
        held = vars(images)
        told = sorted((name, value) for name, value in held.items() if _is_plain(value))
        digest = hashlib.sha256(f"{type(images).__name__} {len(images)} {told}".encode())
        for name in ("labels", "pixels"):
            if isinstance(tensor := held.get(name), Tensor):
                _add(digest, name, tensor)
        if isinstance(base := held.get("base"), LabelledImages):
            digest.update(self._images(base).encode())
        digest.update("\n".join(_files(map(str, (*held.get("items", ()), *held.get("shards", ()))))).encode())
        self.known[images] = digest.hexdigest()
        return self.known[images]


def _add(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    # as bytes: bfloat16 has no NumPy type
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def _files(paths: Iterable[str]) -> Iterator[str]:
    """Name, size and date of each."""
    for path in paths:
        try:
            found = os.stat(path)
            yield f"{path} {found.st_size} {found.st_mtime_ns}"
        except OSError:
            yield path


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
            key, done = str(arrays.pop("key")), int(arrays.pop("done"))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return  # measured anew
        if key == self.key and all(array.ndim == 2 and len(array) == self.n for array in arrays.values()):
            self.done, self.arrays = done, arrays

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
