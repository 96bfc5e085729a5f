"""Fingerprint of a run's data in RUN/data.json: names, labels, sizes and contents of its images."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from recast.errors import RecastError
from recast.lab.data.datasets import LabelledImages
from recast.lab.data.images import check_regular
from recast.lab.data.sources import Data
from recast.lab.folder.files import read_json, read_names
from recast.lab.folder.names import CLASSES, FINGERPRINT
from recast.reading import MIB

SIZES, CONTENTS = 100_000, 512
"""Largest numbers of files whose sizes, and of images whose contents are read."""


def fingerprint_of(data: Data, *parts: str) -> dict[str, dict[str, Any]]:
    """Return the fingerprint of parts (default: `train` and `val`).

    It holds the number of images, digests of names, labels and sizes, and [label, content] of up to CONTENTS images.
    """
    return {part: _of_part(getattr(data, part)) for part in parts or ("train", "val")}


def check_classes(run: Path, data: Data) -> None:
    """Raise RecastError unless the classes are those of the run, in the same order."""
    names = read_names(run / CLASSES)
    remedy = "give the folder of the run's images with --data-dir"
    if len(names) != len(data.classes):
        raise RecastError(f"{run} was trained on {len(names)} classes, {data.name} has {len(data.classes)}: {remedy}")
    for number, (before, now) in enumerate(zip(names, data.classes, strict=True)):
        if before != now:
            raise RecastError(f"class {number} was {before!r} when {run} was trained, now it is {now!r}: {remedy}")


def check_same(run: Path, data: Data, *, goes_on: bool) -> None:
    """Warn if the validation images changed since the run began, or any images if training `goes_on`.

    Raises RecastError if training would continue with other names, labels or numbers of images. Changed contents only
    warn: damaged images may have been replaced.
    """
    path = run / FINGERPRINT
    if not path.is_file():
        return
    parts = {"train": "training", "val": "validation"} if goes_on else {"val": "validation"}
    before, now = read_json(path, *parts), fingerprint_of(data, *parts)
    changes, is_refused = [], False
    try:
        for part, title in parts.items():
            names = [name for name, value in now[part].items() if before[part][name] != value]
            old, new = (_labels_by_content(side[part]["contents"]) for side in (before, now))
            if any(old[content].isdisjoint(new[content]) for content in old.keys() & new.keys()):
                names = [*dict.fromkeys((*names, "labels"))]
            changes += [f"{name} of the {title} images" for name in names]
            is_refused |= not {"sizes", "contents"}.issuperset(names)
    except (KeyError, TypeError, ValueError):
        raise RecastError(f"{path} is damaged: delete it to continue without this check") from None
    text = ", ".join(changes)
    if goes_on and is_refused:
        raise RecastError(
            f"cannot resume {run}: its data changed since it began ({text}). Restore the images, or start a new run "
            "with --out"
        )
    if changes:
        warnings.warn(f"the data of {run} changed since it began: {text}", stacklevel=2)


def _labels_by_content(rows: Iterable[tuple[str, str]]) -> Mapping[str, set[str]]:
    """Return the labels of each content: equal images may have several."""
    labels = defaultdict[str, set[str]](set)
    for label, content in rows:
        labels[content].add(label)
    return labels


def _of_part(images: LabelledImages) -> dict[str, Any]:
    fields, count, labels = vars(images), len(images), images.targets()
    items = fields.get("items", fields.get("pixels", range(count)))
    names = []
    if count and isinstance(items[0], str):  # the same for the same images in another folder
        top = len(os.path.commonpath([os.path.dirname(path) for path in (min(items), max(items))]))
        names = [path[top:] for path in items]
    contents = []
    for index in range(0, count, count // CONTENTS + 1):
        source = images.label_source(index)
        label = labels[index] if source is None else digest_of([_content(images, source, index)])
        contents.append([label, digest_of([_content(images, items[index], index)])])
    is_tensor = isinstance(items, Tensor)
    sizes = [items.contiguous().numpy()] if is_tensor else map(size_of, items[:: count // SIZES + 1])
    return {
        "number": count, "names": digest_of(names), "labels": digest_of(labels), "sizes": digest_of(sizes),
        "contents": contents,
    }  # fmt: skip


def _content(images: LabelledImages, item: Any, index: int) -> bytes | np.ndarray:
    """Return the bytes of an image, or of its label, of a file its beginning; empty if it cannot be read."""
    try:
        if isinstance(item, Tensor):
            return item.contiguous().numpy()
        if isinstance(item, str):
            check_regular(item)
            with open(item, "rb") as file:
                return file.read(MIB)
        image = images.open(index)  # type: ignore[attr-defined]
        return image.numpy() if isinstance(image, Tensor) else image.tobytes()
    except (OSError, RecastError):
        return b""


def size_of(item: Any) -> str:
    """Return the size of a file in bytes as text; empty for other items."""
    try:
        return str(os.stat(item).st_size) if isinstance(item, str) else ""
    except OSError:
        return "missing"


def digest_of(content: Iterable[str | bytes | np.ndarray]) -> str:
    """Return a digest of 16 characters of texts, bytes and arrays."""
    digest = hashlib.sha256()
    for part in content:
        digest.update(os.fsencode(part) if isinstance(part, str) else part)  # type: ignore[arg-type]
        digest.update(b"\0")
    return digest.hexdigest()[:16]
