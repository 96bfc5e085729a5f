"""Per-image scores on the disk: what was measured once is not measured again, and an interrupted pass goes on.

One file for each (suite, part, model). It counts only for the weights, images, options and code it was made with.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recast import __version__
from recast.errors import first_line
from recast.files import replaced
from recast.lab.data.datasets import LabelledImages
from recast.lab.evaluation.context import Context, PixelModel, Score, Source
from recast.surgery.proof import checksum


def model_key(model: PixelModel) -> str:
    """A hash of what decides what the model computes: structure, settings, every tensor of its state, normalisation."""
    digest = hashlib.sha256(f"{__version__}{model}".encode())
    for name, module in model.named_modules():
        told = {key: value for key, value in vars(module).items() if key != "training" and _is_plain(value)}
        digest.update(f"{name} {sorted(told.items())}".encode())
    digest.update(checksum(model.state_dict()).encode())
    return digest.hexdigest()


def _is_plain(value: object) -> bool:
    """Numbers, texts, and tuples or data classes of them: what a module's `repr` may not show."""
    if is_dataclass(value) and not isinstance(value, type):
        return all(_is_plain(getattr(value, each.name)) for each in fields(value))
    if isinstance(value, tuple):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, bool | int | float | str)


def code_of(function: Callable[..., Any]) -> str:
    """The text of its module: what a score holds may change between two versions; empty where it is not there."""
    with suppress(OSError):
        return inspect.getsource(sys.modules[function.__module__])
    return ""


class Cache:
    """Where the scores of models are kept; of sources made from the same images, these are read once.

    FOLDER/SUITE/PART.MODEL.KEY.npz: other weights, images or options have a file of their own. Without a folder, in
    memory.
    """

    def __init__(self, folder: Path | None, context: Context) -> None:
        self.folder, self.context = folder, context
        self.weights = {} if folder is None else {name: model_key(model) for name, model in context.models.items()}
        self.known: dict[LabelledImages, str] = {}

    def open(self, suite: str, score: Callable[..., Any], uses: Iterable[str], source: Source) -> dict[str, Scores]:
        """The scores of every model by `score`; uses: the options that they depend on."""
        n = len(source.images)
        if self.folder is None:
            return {name: Scores(n) for name in self.context.models}
        options = {name: getattr(self.context.options, name) for name in uses}
        columns = None if source.columns is None else source.columns.tolist()
        images = [self._images(images) for images in (source.images, *source.depends)]
        told = [suite, code_of(score), options, self.context.dataset(suite), source.part, columns, images]
        if (coarse := self.context.data.coarse) is not None:
            told += [coarse.of.tolist(), coarse.names]
        found = {}
        for name, weights in self.weights.items():
            key = hashlib.sha256(repr((*told, weights)).encode()).hexdigest()
            stem = ".".join(filter(None, (source.part.replace("/", "-"), name)))
            found[name] = Scores(n, self.folder / suite / f"{stem}.{key[:12]}.npz", key)
        return found

    def _images(self, images: LabelledImages) -> str:
        """A hash of images and labels; of files, name, size and date."""
        if images in self.known:
            return self.known[images]
        held = vars(images)
        told = sorted((name, value) for name, value in held.items() if _is_plain(value))
        digest = hashlib.sha256(f"{type(images).__name__} {len(images)} {told}".encode())
        tensors = {name: value for name, value in held.items() if isinstance(value, Tensor)}
        digest.update(checksum(tensors).encode())
        if isinstance(base := held.get("base"), LabelledImages):
            digest.update(self._images(base).encode())
        lists = (value for value in held.values() if isinstance(value, Sequence) and not _is_plain(value))
        for path in map(str, chain.from_iterable(lists)):
            digest.update(b"\n" + os.fsencode(path))
            with suppress(OSError):  # another library's number
                found = os.stat(path)
                digest.update(f" {found.st_size} {found.st_mtime_ns}".encode())
        self.known[images] = digest.hexdigest()
        return self.known[images]


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
            key, done, told = str(arrays.pop("key")), int(arrays.pop("done")), str(arrays.pop("checksum"))
            if told != self._checksum(done, arrays):  # zip's own do not cover the list of what is in it
                raise ValueError("its checksum is of other scores")
        except Exception as error:  # a damaged file, whose checksums are looked at, can break the reader in any way
            return warnings.warn(f"{path} is damaged ({first_line(error)}): measured anew", stacklevel=2)
        whole = all(array.ndim == 2 and len(array) == self.n for array in arrays.values())
        if key == self.key and whole and 0 <= done <= self.n:
            self.done, self.arrays = done, arrays

    @staticmethod
    def _checksum(done: int, arrays: Mapping[str, np.ndarray]) -> str:
        return checksum(str(done), {name: torch.from_numpy(array) for name, array in arrays.items()})

    def put(self, first: int, score: Score) -> None:
        """Keep the scores of images `first`, `first` + 1, ...; a batch with more numbers an image (more detections)
        widens all by zeros."""
        values = score.values.detach().float().cpu().numpy()
        values = values.reshape(len(values), -1)
        known = self.arrays.get(score.metric, np.zeros((self.n, 0), dtype=np.float32))
        if more := max(values.shape[1] - known.shape[1], 0):
            known = np.pad(known, ((0, 0), (0, more)))
        self.arrays[score.metric] = known
        known[first : first + len(values), : values.shape[1]] = values

    def save(self) -> None:
        if self.path is None or not self.done:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        told = {"key": self.key, "done": self.done, "checksum": self._checksum(self.done, self.arrays)}
        with replaced(self.path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, **{name: np.asarray(value) for name, value in told.items()}, **self.arrays)  # type: ignore[arg-type]
