"""Fingerprint of a run's data in RUN/data.json: names, labels, sizes and contents of its images."""

from __future__ import annotations

import hashlib
import os
import warnings
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from recast.errors import RecastError
from recast.files import read_json, read_names
from recast.lab.data.datasets import LabelledImages
from recast.lab.data.sources import Data
from recast.reading import MIB

FINGERPRINT = "data.json"
"""File of `fingerprint_of` the data in a run folder."""
SIZES, CONTENTS = 100_000, 512
"""Largest numbers of files whose sizes, and of images whose contents are read; chosen by name."""


def fingerprint_of(data: Data, *parts: str) -> dict[str, Any]:
    """Return the fingerprint of parts (default: `train` and `val`).

    It holds the number of images, digests of names, labels and sizes, and name, label and content of up to CONTENTS
    images.
    """
    return {part: _of_part(getattr(data, part)) for part in parts or ("train", "val")}


def check_classes(run: Path, data: Data) -> None:
    """Raise RecastError unless the classes are those of the run, in the same order."""
    names = read_names(run / "classes.json")
    remedy = f"set data.data_dir in {run / 'recipe.yaml'} to the run's data"
    if len(names) != len(data.classes):
        raise RecastError(f"{run} was trained on {len(names)} classes, {data.name} has {len(data.classes)}: {remedy}")
    for number, (before, now) in enumerate(zip(names, data.classes, strict=True)):
        if before != now:
            raise RecastError(f"class {number} was {before!r} when {run} was trained, now it is {now!r}: {remedy}")


def check_same(run: Path, data: Data, *, goes_on: bool) -> None:
    """Warn of changes since the run began: of the validation images, and, if training `goes_on`, of all images.

    Raises RecastError if training would go on with other labels or another number of training images.
    """
    if not (run / FINGERPRINT).is_file():  # of an earlier version
        return
    parts = ("train", "val") if goes_on else ("val",)
    before, now = read_json(run / FINGERPRINT, *parts), fingerprint_of(data, *parts)
    try:
        changes = [change for part in parts for change in _changes(part, before[part], now[part])]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise RecastError(f"{run / FINGERPRINT} is damaged: delete it to continue without this check") from None
    if goes_on and (refused := [change for change, is_refused in changes if is_refused]):
        raise RecastError(
            f"cannot resume {run}, its data changed: {'; '.join(refused)}. Restore them, or start a new run with --out"
        )
    if changes:
        text = "; ".join(change for change, _ in changes)
        warnings.warn(f"the data of {run} changed since it began: {text}", stacklevel=2)


def _changes(part: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterable[tuple[str, bool]]:
    """Yield the changes of a part, each with True if training must not go on."""
    part = {"train": "training", "val": "validation"}[part]
    if before == now:
        return
    same_names = before["names"] == now["names"]
    old, new = ({name: row for name, *row in side["sample"] if name} for side in (before, now))
    both = old.keys() & new.keys()
    old_labels, new_labels = (_labels_of_contents(side["sample"]) for side in (before, now))
    moved = sum(old[name][0] != new[name][0] for name in both) or sum(
        old_labels[content].isdisjoint(new_labels[content]) for content in old_labels.keys() & new_labels.keys()
    )
    if moved or (same_names and before["labels"] != now["labels"]):
        yield f"labels of {_some(moved)} {part} images", True
    if before["count"] != now["count"]:
        yield f"there were {before['count']} {part} images, now there are {now['count']}", part == "training"
    elif not same_names:
        yield f"names of {part} images", False
    others = sum(old[name][1] != new[name][1] for name in both)
    if others or (same_names and before["sizes"] != now["sizes"]):
        yield f"contents of {_some(others)} {part} images", False


def _some(count: int) -> str:
    return f"at least {count}" if count else "some"


def _labels_of_contents(sample: Iterable[tuple[str, str, str]]) -> Mapping[str, set[str]]:
    labels = defaultdict[str, set[str]](set)
    for _, label, content in sample:
        labels[content].add(label)
    return labels


def _of_part(images: LabelledImages) -> dict[str, Any]:
    fields, count = vars(images), len(images)
    items = fields.get("shards", fields.get("items", fields.get("pixels", range(count))))
    is_files = len(items) > 0 and isinstance(items[0], str)
    names, order = [""] * len(items), list(range(len(items)))
    if is_files:  # the same for the same images in another folder, and beside other files
        top = len(os.path.commonpath([os.path.dirname(path) for path in (min(items), max(items))]))
        names = [path[top:] for path in items]
        order.sort(key=lambda index: (zlib.crc32(os.fsencode(os.path.basename(names[index]))), index))
    targets = images.targets() or [""] * len(items)  # labels of a stream are not known beforehand
    sample = []
    for index in order[:CONTENTS]:
        source = images.label_source(index)
        label = targets[index] if source is None else digest_of([_content(images, source, index)])
        sample.append([names[index], label, digest_of([_content(images, items[index], index)])])
    sizes = [items.contiguous().numpy()] if isinstance(items, Tensor) else [size_of(items[i]) for i in order[:SIZES]]
    return {
        "count": count, "names": digest_of(names if is_files else [str(count)]), "labels": digest_of(targets),
        "sizes": digest_of(sizes), "sample": sample,
    }  # fmt: skip


def _content(images: LabelledImages, item: Any, index: int) -> bytes | np.ndarray:
    """Return the bytes of an image, of a file its beginning; empty if it cannot be read."""
    try:
        if isinstance(item, Tensor):
            return item.contiguous().numpy()
        if isinstance(item, str):
            with open(item, "rb") as file:
                return file.read(MIB)
        return images.open(index).tobytes()  # type: ignore[attr-defined]
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
