"""Fingerprint of a run's data in RUN/data.json: names, labels, sizes and contents of its images."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

from recast.errors import RecastError
from recast.lab.data.datasets import LabelledImages
from recast.lab.data.images import check_regular
from recast.lab.data.sources import Data
from recast.reading import MIB

SIZES, CONTENTS = 100_000, 512
"""Largest numbers of files whose sizes, and of images whose contents are read."""


def fingerprint_of(data: Data, *parts: str) -> dict[str, dict[str, Any]]:
    """Return the fingerprint of parts (default: `train` and `val`).

    It holds the number of images, digests of names, labels and sizes, and [label, content] of up to CONTENTS images.
    """
    return {part: _of_part(getattr(data, part)) for part in parts or ("train", "val")}


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
        "number": count,
        "names": digest_of(names),
        "labels": digest_of(labels),
        "sizes": digest_of(sizes),
        "contents": contents,
    }


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
