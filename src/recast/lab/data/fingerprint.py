"""What tells a run's data from other data: names, labels, sizes and contents of its images, in RUN/data.json."""

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
from recast.reading import MIB, open_now

FINGERPRINT = "data.json"
"""In a run folder: `fingerprint_of` its data."""
SIZES, CONTENTS = 100_000, 512
"""Files of a part whose sizes are looked at, and images whose contents are: chosen by name, whatever else is there."""


def fingerprint_of(data: Data, *parts: str) -> dict[str, Any]:
    """Of the parts, `train` and `val` by default: number, names, labels and sizes of all, and of up to CONTENTS images
    name, label and content."""
    return {part: _of_part(getattr(data, part)) for part in parts or ("train", "val")}


def check_classes(run: Path, data: Data) -> None:
    """Raise RecastError unless the classes are those of the run: logits and labels are in their order."""
    names = read_names(run / "classes.json")
    remedy = f"set data.data_dir in {run / 'recipe.yaml'} to the run's own data"
    if len(names) != len(data.classes):
        raise RecastError(f"{run} was trained on {len(names)} classes, {data.name} has {len(data.classes)}: {remedy}")
    for number, (then, now) in enumerate(zip(names, data.classes, strict=True)):
        if then != now:
            raise RecastError(
                f"class {number} was {then!r} when {run} was trained, now it is {now!r}: other classes, or in another "
                f"order; {remedy}"
            )


def check_same(run: Path, data: Data, *, goes_on: bool) -> None:
    """Warn of what changed since the run began: of the validation images, and, where the training `goes_on`, of all.

    Raises RecastError for a training that would go on with other labels or another number of training images.
    """
    if not (run / FINGERPRINT).is_file():  # of an earlier version
        return
    parts = ("train", "val") if goes_on else ("val",)
    before, now = read_json(run / FINGERPRINT, *parts), fingerprint_of(data, *parts)
    try:
        changes = [change for part in parts for change in _changes(part, before[part], now[part])]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise RecastError(f"{run / FINGERPRINT} is damaged: delete it to go on without a look at the data") from None
    if goes_on and (refused := [change for change, is_refused in changes if is_refused]):
        raise RecastError(
            f"{run} cannot go on, its data changed: {'; '.join(refused)}. Restore them, or start a new run with --out"
        )
    if changes:
        text = "; ".join(change for change, _ in changes)
        warnings.warn(f"the data of {run} changed since it began: {text}", stacklevel=2)


def _changes(part: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterable[tuple[str, bool]]:
    """What changed of a part, and whether a training may not go on with it."""
    part = {"train": "training", "val": "validation"}[part]
    if then == now:
        return
    same_names = then["names"] == now["names"]
    before, after = ({name: row for name, *row in side["sample"] if name} for side in (then, now))
    both = before.keys() & after.keys()
    labels, labels_now = (_labels_of_contents(side["sample"]) for side in (then, now))
    moved = sum(before[name][0] != after[name][0] for name in both) or sum(
        labels[content].isdisjoint(labels_now[content]) for content in labels.keys() & labels_now.keys()
    )
    if moved or (same_names and then["labels"] != now["labels"]):
        yield f"labels of {_some(moved)} {part} images", True
    if then["count"] != now["count"]:
        yield f"there were {then['count']} {part} images, now there are {now['count']}", part == "training"
    elif not same_names:
        yield f"names of {part} images", False
    if others := sum(before[name][1] != after[name][1] for name in both):
        yield f"contents of {_some(others)} {part} images", False
    elif same_names and then["sizes"] != now["sizes"]:
        yield f"contents of {_some(0)} {part} images", False


def _some(count: int) -> str:
    """A number of images among those that were looked at, or that there are others."""
    return f"at least {count}" if count else "some"


def _labels_of_contents(sample: Iterable[tuple[str, str, str]]) -> Mapping[str, set[str]]:
    labels = defaultdict[str, set[str]](set)
    for _, label, content in sample:
        labels[content].add(label)
    return labels


def _of_part(images: LabelledImages) -> dict[str, Any]:
    held, count = vars(images), len(images)
    items = held.get("shards", held.get("items", held.get("pixels", range(count))))
    is_files = len(items) > 0 and isinstance(items[0], str)
    ends = [os.path.dirname(end) for end in (min(items), max(items))] if is_files else []
    top = len(os.path.commonpath(ends)) if is_files else 0  # the data may lie elsewhere
    names = [item[top:] for item in items] if is_files else []
    order = list(range(len(items)))
    if is_files:  # the same images whatever is added beside them, and in whichever folder they lie
        order.sort(key=lambda index: (zlib.crc32(os.fsencode(os.path.basename(names[index]))), index))
    targets = images.targets() or [""] * len(items)  # of a stream they are known as the images come
    sample = []
    for index in order[:CONTENTS]:
        source = images.label_source(index)
        label = targets[index] if source is None else digest_of([_content(images, source, index)])
        content = digest_of([_content(images, items[index], index)])
        sample.append([names[index] if is_files else "", label, content])
    sizes = [items.contiguous().numpy()] if isinstance(items, Tensor) else [size_of(items[i]) for i in order[:SIZES]]
    return {
        "count": count, "names": digest_of(names or [str(count)]), "labels": digest_of(targets),
        "sizes": digest_of(sizes), "sample": sample,
    }  # fmt: skip


def _content(images: LabelledImages, item: Any, index: int) -> bytes | np.ndarray:
    """Of a file its beginning; empty for one that cannot be read."""
    try:
        if isinstance(item, Tensor):
            return item.contiguous().numpy()
        if isinstance(item, str):
            with open_now(item) as file:
                return file.read(MIB)
        return images.open(index).tobytes()  # type: ignore[attr-defined]
    except (OSError, RecastError):
        return b""


def size_of(item: Any) -> str:
    """Return the bytes of a file as a text; empty for what is no path."""
    try:
        return str(os.stat(item).st_size) if isinstance(item, str) else ""
    except OSError:
        return "missing"


def digest_of(content: Iterable[str | bytes | np.ndarray]) -> str:
    """Return 16 characters that follow from texts, bytes and arrays."""
    digest = hashlib.sha256()
    for part in content:
        digest.update(os.fsencode(part) if isinstance(part, str) else part)  # type: ignore[arg-type]
        digest.update(b"\0")
    return digest.hexdigest()[:16]
