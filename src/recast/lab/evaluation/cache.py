"""Per-image scores on disk: a finished measurement is read, an interrupted one continues.

Each (suite, part, model) has one file. It is valid for the model (weights, other tensors, code), images and
options it was computed with.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from recast.errors import first_line
from recast.files import replaced
from recast.lab.data.datasets import LabelledImages
from recast.lab.evaluation.context import Context, Score, Source
from recast.lab.evaluation.model_key import model_key
from recast.models.checksum import checksum
from recast.reading import check_archive

SCORES_VERSION = 2
"""Part of every key. Raise it with every change of suites, data or layers that changes a score."""


def _settings(owner: object) -> list[tuple[str, Any]]:
    """Return attributes that are numbers, texts, or tuples or data classes of them, which a `repr` may not show."""
    return sorted((name, value) for name, value in vars(owner).items() if name != "training" and _is_plain(value))


def _is_plain(value: object) -> bool:
    if is_dataclass(value) and not isinstance(value, type):
        return all(_is_plain(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


class Cache:
    """Scores of models in FOLDER/SUITE/PART.MODEL.KEY.npz, or in memory without a folder.

    Other models, images or options have other files. The images of sources are hashed once.
    """

    def __init__(self, folder: Path | None, context: Context) -> None:
        self.folder, self.context = folder, context
        self.weights = {} if folder is None else {name: model_key(model) for name, model in context.models.items()}
        self.hashes: dict[LabelledImages, str] = {}

    def open(self, suite: str, uses: Iterable[str], source: Source) -> dict[str, Scores]:
        """Return the scores of every model. uses: names of the options that they depend on."""
        n = len(source.images)
        if self.folder is None:
            return {name: Scores(n) for name in self.context.models}
        options = {name: getattr(self.context.options, name) for name in uses}
        columns = None if source.columns is None else source.columns.tolist()
        images = [self._images(images) for images in (source.images, *source.depends)]
        content = [SCORES_VERSION, suite, options, self.context.dataset(suite), source.part, columns, images]
        if (groups := self.context.data.groups) is not None:
            content += [groups.of.tolist(), groups.names]
        scores = {}
        for name, weights in self.weights.items():
            key = hashlib.sha256(repr((*content, weights)).encode()).hexdigest()
            stem = ".".join(filter(None, (source.part.replace("/", "-"), name)))
            scores[name] = Scores(n, self.folder / suite / f"{stem}.{key[:12]}.npz", key)
        return scores

    def _images(self, images: LabelledImages) -> str:
        """Return a hash of images and labels; of files, of name, size and date."""
        if images in self.hashes:
            return self.hashes[images]
        values = vars(images)
        digest = hashlib.sha256(f"{type(images).__name__} {len(images)} {_settings(images)}".encode())
        digest.update(checksum({name: value for name, value in values.items() if isinstance(value, Tensor)}).encode())
        if isinstance(base := values.get("base"), LabelledImages):
            digest.update(self._images(base).encode())
        lists = (value for value in values.values() if isinstance(value, Sequence) and not _is_plain(value))
        for path in map(str, chain.from_iterable(lists)):
            digest.update(b"\n" + os.fsencode(path))
            with suppress(OSError):  # an index of another library
                status = os.stat(path)
                digest.update(f" {status.st_size} {status.st_mtime_ns}".encode())
        self.hashes[images] = digest.hexdigest()
        return self.hashes[images]


class Scores:
    """Scores of one model on one source, {metric: (n, k)}; those of the first `done` images are known."""

    def __init__(self, n: int, path: Path | None = None, key: str = "") -> None:
        self.n, self.path, self.key = n, path, key
        self.done = 0
        self.arrays: dict[str, np.ndarray] = {}
        if path is not None and path.is_file():
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                check_archive(stored.zip)
                arrays = {name: stored[name] for name in stored.files}
            key, done, metrics = str(arrays.pop("key")), int(arrays.pop("done")), arrays.pop("metrics").tolist()
            if metrics != list(arrays):  # zip's checksums do not cover its list of entries
                raise ValueError("a metric is missing")
        except Exception as error:  # a damaged file can raise anything
            return warnings.warn(f"{path} is damaged ({first_line(error)}): measuring again", stacklevel=2)
        is_whole = all(array.ndim == 2 and len(array) == self.n for array in arrays.values())
        if key == self.key and is_whole and 0 <= done <= self.n:
            self.done, self.arrays = done, arrays

    def put(self, first: int, score: Score) -> None:
        """Store the scores of images `first`, `first` + 1, ...; a batch with more numbers per image widens all."""
        values = score.values.numpy()
        values = values.reshape(len(values), -1)
        array = self.arrays.get(score.metric, np.zeros((self.n, 0), dtype=np.float32))
        if more := max(values.shape[1] - array.shape[1], 0):
            array = np.pad(array, ((0, 0), (0, more)))
        self.arrays[score.metric] = array
        array[first : first + len(values), : values.shape[1]] = values

    def save(self) -> None:
        """Write the file, if there is something to write."""
        if self.path is None or not self.done:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(self.path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, key=self.key, done=self.done, metrics=list(self.arrays), **self.arrays)  # type: ignore[arg-type]
