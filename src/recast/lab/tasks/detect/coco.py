"""COCO's JSON of images, categories and annotations, read and checked; its masks drawn; folders with it.

{"images": [{"id", "file_name", "width", "height"}], "categories": [{"id", "name"}],
 "annotations": [{"image_id", "category_id", "bbox": [left, top, width, height], "area", "iscrowd",
                  "segmentation"}]}
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recast.errors import RecastError, first_line, optional_package, shown
from recast.files import require
from recast.lab.data.trees import composed
from recast.reading import decode, parse_json, read_bytes

LARGEST = 2**30
"""Bytes of a JSON: COCO's largest has 450 MB."""
FARTHEST = 1e6
"""Pixels: nothing in an image is farther from its corner."""


@dataclass(frozen=True)
class Annotations:
    """The objects of an image, in its own pixels."""

    boxes: np.ndarray
    """(n, 4) float64."""
    classes: np.ndarray
    """(n,) from 0."""
    crowd: np.ndarray
    """(n,) bool: many objects in one, which is neither taught nor counted."""
    area: np.ndarray
    """(n,) in pixels, of the mask where there is one: what makes an object small or large."""
    masks: tuple[Any, ...] | None = None
    """COCO's segmentation of each: run lengths or polygons."""
    size: tuple[int, int] | None = None
    """Width and height of the image as the JSON has them."""

    def __str__(self) -> str:
        """A hash of them all."""
        arrays = b"".join(one.tobytes() for one in (self.boxes, self.classes, self.crowd, self.area))
        return hashlib.sha256(arrays + repr(self.masks).encode()).hexdigest()


def read_coco(path: Path) -> tuple[list[str], list[Annotations], list[str]]:
    """The names of the images, what is on them, and the names of the categories in the order of their ids."""
    text = decode(read_bytes(path, LARGEST), path)
    found = require(str(path), parse_json(text, path), ("images", "annotations", "categories"))
    objects = parsed(found, str(path))
    return [one["file_name"] for one in found["images"]], objects, [_name(one) for one in _categories(found)]


def _categories(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return sorted(found["categories"], key=lambda one: int(one["id"]))


def _name(category: Mapping[str, Any]) -> str:
    return composed(str(category["name"]))


def _side(image: Mapping[str, Any], key: str) -> int | None:
    """A side of an image; None where the JSON has none."""
    return int(image[key]) if image.get(key) else None


def parsed(found: Mapping[str, Any], where: str) -> list[Annotations]:
    """The objects of every image of a COCO dictionary, in its order. Raises RecastError for ids that name nothing or
    two things, and for annotations whose box, area or mask is none: `where` names the file."""
    try:
        images = {one["id"]: (_side(one, "height"), _side(one, "width")) for one in found["images"]}
        classes = {one["id"]: index for index, one in enumerate(_categories(found))}
        if not images or not classes:
            raise RecastError(f"{where} has {len(images)} images and {len(classes)} categories: expected some of both")
        for what in ("images", "categories"):
            if twice := [number for number, count in Counter(one["id"] for one in found[what]).items() if count > 1]:
                raise RecastError(f"{where} has two {what} with the id {shown(twice[0])}")
        for one in found["images"]:
            if not isinstance(one["file_name"], str) or not one["file_name"]:
                raise RecastError(
                    f"{where}: image {shown(one['id'])} has the file_name {shown(one['file_name'])}: name its file"
                )
        if alike := [name for name, count in Counter(map(_name, found["categories"])).items() if count > 1]:
            raise RecastError(f"{where} has two categories {shown(alike[0])}: rename one, or give both one id")
        of = defaultdict[Any, list[Mapping[str, Any]]](list)
        for one in found["annotations"]:
            wrong = _wrong(one, images, classes)
            if wrong is not None:
                raise RecastError(f"{where}: annotation {shown(one.get('id'))} {wrong}; mend or remove it")
            of[one["image_id"]].append(one)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, RecastError):
            raise
        raise RecastError(f"{where} is no COCO JSON of objects ({type(error).__name__}: {first_line(error)})") from None
    has_masks = all(one.get("segmentation") for one in found["annotations"])
    return [_annotations(of[number], classes, has_masks, sides) for number, sides in images.items()]


def _wrong(one: Mapping[str, Any], images: Mapping[Any, tuple[Any, Any]], classes: Mapping[Any, int]) -> str | None:
    """What is wrong with an annotation; None: nothing."""
    for key, known in (("image_id", images), ("category_id", classes)):
        if one[key] not in known:
            return f"has {key} {shown(one[key])}, which names nothing there"
    height, width = images[one["image_id"]]
    box = np.array(one["bbox"], dtype=np.float64)
    if box.shape != (4,) or not (np.abs(box) < FARTHEST).all() or (box[2:] < 0).any():
        expected = "expected [left, top, width, height] with sides of 0 or more"
        return f"has the box {shown(one['bbox'])}: {expected}"
    if width is not None and height is not None:
        if box[0] >= width or box[1] >= height or (box[:2] + box[2:] <= 0).any():
            return f"has the box {shown(one['bbox'])}, outside of its image of {width}x{height}"
    if not 0 <= float(one.get("area", 0)) < math.inf:
        return f"has the area {shown(one['area'])}: expected a number of pixels"
    if one.get("iscrowd", 0) not in (0, 1):
        return f"has iscrowd {shown(one['iscrowd'])}: expected 0 or 1"
    return _wrong_mask(one["segmentation"], height, width) if one.get("segmentation") else None


def _wrong_mask(mask: Any, height: Any, width: Any) -> str | None:
    """What is wrong with a mask: polygons [[x, y, x, y, ...], ...], or runs {"size": [height, width], "counts": ...}"""
    if isinstance(mask, Mapping):
        tall, wide = mask["size"]
        if not all(type(side) is int and 0 < side < FARTHEST for side in (tall, wide)):
            return f"has a mask of the size {shown(mask['size'])}: expected [height, width]"
        if height is not None and width is not None and [tall, wide] != [height, width]:
            return f"has a mask of {shown([tall, wide])} (height, width), its image has {[height, width]}"
        runs = run_lengths(mask["counts"])
        if any(not isinstance(run, int) or run < 0 for run in runs) or sum(runs) != tall * wide:
            return f"has a mask whose runs are not those of {tall} x {wide} pixels"
        return None
    for polygon in mask:
        numbers = np.array(polygon, dtype=np.float64)
        if None not in (height, width) and numbers.ndim == 1 and (far := _too_far(numbers, height, width)):
            return f"has the polygon {shown(polygon)}, {far}"
        if numbers.ndim != 1 or len(numbers) < 6 or len(numbers) % 2 or not (np.abs(numbers) < FARTHEST).all():
            return f"has the polygon {shown(polygon)}: expected [x, y, x, y, x, y, ...] in pixels"
    return None


def run_lengths(counts: Any) -> list[int]:
    """The lengths of the columns' runs of zeros and ones in turn. COCO's text has them in characters of 6 bits from
    "0": five of a number, the lowest first, and whether more follow; from the fourth on less the one two before."""
    if not isinstance(counts, str):
        return list(counts)
    found: list[int] = []
    value = shift = 0
    for character in counts:
        bits = ord(character) - ord("0")
        if not 0 <= bits < 64 or shift > 60:
            raise ValueError("a mask's text is no run lengths")
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            value -= (bits & 16) << shift - 4  # the sign
            found.append(value + (found[-2] if len(found) > 2 else 0))
            value = shift = 0
    return found


def _too_far(corners: np.ndarray, height: int, width: int) -> str:
    """Say that corners lie more than a side outside, whose drawing could fill the memory; empty where none does."""
    sides = np.resize((width, height), corners.shape)
    inside = (corners >= -sides).all() and (corners <= 2 * sides).all()
    return "" if inside else f"far outside of its image of {width}x{height}"


def drawn_masks(masks: tuple[Any, ...], height: int, width: int, name: str) -> Iterator[np.ndarray]:
    """Each mask of an image, (height, width) uint8; polygons are drawn by COCO's own code."""
    for mask in masks:
        if isinstance(mask, Mapping):
            if list(mask["size"]) != [height, width]:
                size = f"{name} has {height} x {width} pixels (height x width)"
                raise RecastError(f"{size}, a mask of it {shown(mask['size'])}: they must be one")
            runs = run_lengths(mask["counts"])
            flat = np.repeat((np.arange(len(runs)) % 2).astype(np.uint8), runs)
            yield flat.reshape(width, height).T
            continue
        for polygon in mask:
            if far := _too_far(np.array(polygon), height, width):
                raise RecastError(f"{name} has a polygon {far}: mend or remove it")
        coco = optional_package("pycocotools.mask", "pycocotools", f"{name} has masks as polygons")
        yield np.ascontiguousarray(coco.decode(coco.merge(coco.frPyObjects(mask, height, width))))


def _annotations(
    own: Sequence[Mapping[str, Any]], classes: Mapping[Any, int], has_masks: bool, sides: tuple[int | None, int | None]
) -> Annotations:
    boxes = np.array([one["bbox"] for one in own], dtype=np.float64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    area = [float(one.get("area", of_box)) for one, of_box in zip(own, areas, strict=True)]
    height, width = sides
    return Annotations(
        boxes, np.array([classes[one["category_id"]] for one in own], dtype=np.int64),
        np.array([bool(one.get("iscrowd", 0)) for one in own], dtype=bool), np.array(area, dtype=np.float64),
        tuple(one["segmentation"] for one in own) if has_masks else None,
        (width, height) if width and height else None,
    )  # fmt: skip
