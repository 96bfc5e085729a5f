"""COCO's JSON of images, categories and annotations: read, checked, and its masks drawn."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Le, Lt, MinLen
from pydantic import BeforeValidator

from recast.config import CountOrZero, Float, Int, NotNegative, read
from recast.errors import RecastError, first_line, shown
from recast.json_text import parse_json
from recast.lab.data.trees import composed
from recast.lab.plugins import optional_package
from recast.reading import decode, read_bytes

LARGEST = 2**30
"""Largest size of a JSON file in bytes; COCO's largest has 450 MB."""

FAR, MANY = 0.9, (0.05, 0.5)
"""A box with a smaller share of its area in the image reaches far beyond it; shares of such boxes that are an error:
of those that as left, top, right, bottom lie within, and of any."""
Size = tuple[int, int]

Coordinate = Annotated[Float, Ge(-1e6), Le(1e6)]
Length = Annotated[Coordinate, Ge(0)]
Side = Annotated[Int, Ge(1), Lt(10**6)]


@dataclass(frozen=True)
class CocoImage:
    """An image of the JSON."""

    id: int | str
    file_name: Annotated[str, MinLen(1)]
    width: Side | None = None
    height: Side | None = None


@dataclass(frozen=True)
class Category:
    """A class."""

    id: int
    name: str


@dataclass(frozen=True)
class Runs:
    """A mask as lengths of runs of zeros and ones in turn, column by column, or as COCO's text of them."""

    size: tuple[Side, Side]
    """Height and width."""
    counts: str | list[CountOrZero]


def _polygons(value: Any) -> Any:
    """Refuse lists that are no polygons, in words of polygons: a union's error would speak of runs."""
    if not isinstance(value, list):
        return value
    if any(isinstance(each, int | float) for each in value):
        raise ValueError(f"polygons are lists in a list, [[x, y, x, y, ...]], got a flat list of {len(value)} numbers")
    if len(value) > 2 and all(isinstance(each, list) and len(each) == 2 for each in value):
        value = [value]
    for polygon in value:
        if not isinstance(polygon, list) or any(isinstance(corner, list | dict) for corner in polygon):
            raise ValueError(
                f"a polygon is one list of numbers, [x, y, x, y, ...], got a list of points {shown(polygon)}"
            )
        if len(polygon) < 6:
            raise ValueError(f"a polygon needs at least three points (six numbers), got {len(polygon)} numbers")
        if len(polygon) % 2:
            raise ValueError(f"a polygon needs an x and a y for each point, got {len(polygon)} numbers")
        wrong = [each for each in polygon if isinstance(each, bool | str | None) or not abs(each) <= 1e6]
        if wrong:
            raise ValueError(f"a polygon has numbers from -1e6 to 1e6, got {shown(wrong[0])}")
    return value


Mask = Runs | list[list[float]]
"""Runs, or polygons [x, y, x, y, ...]."""


@dataclass(frozen=True)
class CocoObject:
    """An annotation of the JSON; the box is left, top, width, height."""

    image_id: int | str
    category_id: int
    bbox: tuple[Coordinate, Coordinate, Length, Length]
    area: NotNegative | None = None
    iscrowd: bool = False
    segmentation: Annotated[Runs | list[list[float]] | None, BeforeValidator(_polygons)] = None


@dataclass(frozen=True)
class CocoFile:
    """The JSON; other names in it are ignored."""

    images: Annotated[list[CocoImage], MinLen(1)]
    categories: Annotated[list[Category], MinLen(1)]
    annotations: list[CocoObject]


@dataclass(frozen=True)
class Annotations:
    """The objects of an image, in its own pixels."""

    boxes: np.ndarray
    """(n, 4) float64: left, top, right, bottom."""
    classes: np.ndarray
    """(n,) from 0."""
    crowd: np.ndarray
    """(n,) bool: many objects in one, which is neither taught nor counted."""
    area: np.ndarray
    """(n,) in pixels, of the mask if there is one: decides whether an object is small or large."""
    masks: tuple[Mask, ...] | None = None
    size: Size | None = None
    """Width and height of the image according to the JSON."""
    unused: int = 0
    """Masks that are not read because other objects of the JSON have none."""

    def __str__(self) -> str:
        """Return a hash of all fields."""
        arrays = b"".join(values.tobytes() for values in (self.boxes, self.classes, self.crowd, self.area))
        return hashlib.sha256(arrays + repr(self.masks).encode()).hexdigest()


def read_coco(path: Path, skip: bool) -> tuple[list[str], list[Annotations], list[str], int]:
    """Return the names of the images, their objects, the classes in the order of their ids, and images left out.

    skip: leave out images with an annotation that cannot be read. Without it that is a RecastError.
    """
    stored, where, count = parse_json(decode(read_bytes(path, LARGEST), path), path), str(path), 0
    try:
        content = read(CocoFile, stored, where)
        objects = parsed(content, where)
    except RecastError as error:
        if ": annotations." not in str(error):
            raise
        if not skip:
            raise RecastError(f"{error}; correct it, or leave such images out with --bad-image skip") from None
        good = _readable(stored, where)
        if not good["images"]:
            raise
        content, count = read(CocoFile, good, where), len(stored["images"]) - len(good["images"])
        objects = parsed(content, where)
    names = [composed(category.name) for category in sorted(content.categories, key=lambda category: category.id)]
    return [image.file_name for image in content.images], objects, names, count


def _readable(stored: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the JSON without images that have an annotation which cannot be read."""
    images = {each.id: each for each in read(CocoFile, {**stored, "annotations": []}, where).images}
    bad = set[int | str]()
    for each in stored["annotations"]:
        number = each.get("image_id") if isinstance(each, dict) else None
        if not isinstance(number, int | str) or number not in images:
            return {"images": []}  # of no image
        alone = {**stored, "images": [vars(images[number])], "annotations": [each]}
        try:
            parsed(read(CocoFile, alone, where), where)
        except RecastError:
            bad.add(number)
    keys = {"images": "id", "annotations": "image_id"}
    return {**stored, **{name: [each for each in stored[name] if each[key] not in bad] for name, key in keys.items()}}


def parsed(content: CocoFile, where: str) -> list[Annotations]:
    """Return the objects of every image.

    Raises RecastError for ids that are missing or not unique, boxes outside their image, and runs that do not fill
    their mask; `where` names the file.
    """
    images = {image.id: image for image in content.images}
    classes = {number: index for index, number in enumerate(sorted(category.id for category in content.categories))}
    _check_once([composed(category.name) for category in content.categories], f"{where} has categories")
    _check_once([image.id for image in content.images], f"{where} has images with the id")
    _check_once([category.id for category in content.categories], f"{where} has categories with the id")
    objects: dict[int | str, list[CocoObject]] = {number: [] for number in images}
    for number, each in enumerate(content.annotations):
        place = f"{where}: annotations.{number} has"
        if each.image_id not in images or each.category_id not in classes:
            raise RecastError(f"{place} the unknown image_id {each.image_id!r} or category_id {each.category_id}")
        width, height = images[each.image_id].width, images[each.image_id].height
        box, mask = np.array(each.bbox), each.segmentation
        if width and height and ((box[:2] >= (width, height)).any() or (box[:2] + box[2:] <= 0).any()):
            raise RecastError(f"{place} the box {list(each.bbox)}, outside of its image of {width}x{height}")
        if isinstance(mask, Runs) and isinstance(mask.counts, list) and sum(mask.counts) != math.prod(mask.size):
            raise RecastError(f"{place} a mask whose runs do not fill its size {list(mask.size)}")
        if isinstance(mask, list) and width and height:
            _check_near(mask, height, width, place)
        objects[each.image_id].append(each)
    has_masks = all(each.segmentation for each in content.annotations)
    return [_annotations(objects[image.id], classes, has_masks, image) for image in content.images]


def _check_once(values: Sequence[Any], where: str) -> None:
    if twice := [value for value, count in Counter(values).items() if count > 1]:
        raise RecastError(f"{where} {shown(twice[0])} twice: expected it once")


def _check_near(polygons: list[list[float]], height: int, width: int, where: str) -> None:
    """Raise RecastError if corners lie more than a side outside the image: drawing them could fill the memory."""
    for corners in map(np.array, polygons):
        sides = np.resize((width, height), corners.shape)
        if (corners < -sides).any() or (corners > 2 * sides).any():
            raise RecastError(f"{where} a polygon far outside of its image of {width}x{height}: mend or remove it")


def _annotations(
    objects: Sequence[CocoObject], classes: Mapping[int, int], has_masks: bool, image: CocoImage
) -> Annotations:
    boxes = np.array([each.bbox for each in objects], dtype=np.float64).reshape(-1, 4)
    areas = boxes[:, 2:].prod(1)
    boxes[:, 2:] += boxes[:, :2]
    return Annotations(
        boxes,
        np.array([classes[each.category_id] for each in objects], dtype=np.int64),
        np.array([each.iscrowd for each in objects], dtype=bool),
        np.array([area if each.area is None else each.area for each, area in zip(objects, areas, strict=True)], float),
        tuple(each.segmentation for each in objects if each.segmentation) if has_masks else None,
        (image.width, image.height) if image.width and image.height else None,
        0 if has_masks else sum(bool(each.segmentation) for each in objects),
    )


def is_taught(boxes: Any, crowd: Any) -> Any:
    """Return which boxes (n, 4) in pixels of the network's input training shows: no crowds, none thinner than one."""
    return (boxes[:, 2:] - boxes[:, :2] >= 1).all(1) & ~crowd


def check_boxes(objects: Sequence[Annotations], sizes: Sequence[Size | None], img_size: int, where: str) -> str:
    """Return the line with what is odd about boxes. Raises RecastError for boxes that are of another form or unit.

    sizes: width and height of the images, None for unknown. Left, top, right and bottom are known by boxes that, so
    read, lie within their image, and read as left, top, width and height reach far beyond.
    """
    boxes, crowd = np.concatenate([each.boxes for each in objects]), np.concatenate([each.crowd for each in objects])
    known = [(np.nan, np.nan) if size is None else size for size in sizes]
    ends = np.repeat(np.array(known, float), [len(each.boxes) for each in objects], axis=0)
    start, sides, count = boxes[:, :2], boxes[:, 2:] - boxes[:, :2], len(boxes)
    if count and (start >= 0).all() and max(start.max(), sides.max()) <= 1:
        raise RecastError(
            f"{where}: all {count} boxes are between 0 and 1: normalised? COCO's are left, top, width, height in pixels"
        )
    inside = (np.fmin(boxes[:, 2:], ends) - start.clip(0)).clip(0)
    far = inside.prod(1) < FAR * sides.prod(1)
    is_corner = ((sides >= start) & (start >= 0) & (sides <= ends + 1)).all(1)
    if count and (far.mean() > MANY[1] or (far.mean() > MANY[0] and is_corner.mean() > 1 - MANY[0])):
        raise RecastError(
            f"{where}: {far.sum()} of {count} boxes reach far beyond their image: is bbox left, top, width, height "
            "(not right, bottom), in pixels of the file?"
        )
    beyond = ((boxes[:, 2:] > ends + 1) | (start < -1)).any(1)
    again = count - sum(len(set(map(tuple, np.c_[each.boxes, each.classes].tolist()))) for each in objects)
    if again and again * 2 >= count:
        raise RecastError(f"{where}: {again} of {count} boxes are there twice (image, class and box): keep one each")
    scale = img_size / np.where(np.isnan(ends), img_size, ends).max(1, initial=1)[:, None]
    taught = is_taught(np.c_[start.clip(0), np.fmin(boxes[:, 2:], ends)] * scale, crowd)
    if not taught.any() and not crowd.all():
        raise RecastError(
            f"{where}: none of {count} boxes is a pixel wide and high at --img-size {img_size}: enlarge it"
        )
    unused = sum(each.unused for each in objects)
    return (
        f"{where}: images: {len(objects)}, boxes: {count}; beyond their image: {beyond.sum()}, without area: "
        f"{(sides <= 0).any(1).sum()}, twice: {again}, crowds: {crowd.sum()}, large enough at {img_size} pixels to be "
        f"taught: {100 * taught.sum() / max(count, 1):.3g} %"
        + f"; masks: {unused}, not used, as others have none"
        * bool(unused)
    )


def drawn_masks(masks: tuple[Mask, ...], height: int, width: int, name: str) -> Iterator[np.ndarray]:
    """Yield each mask of an image, (height, width) uint8; polygons and texts are drawn by COCO's own code."""
    for mask in masks:
        if isinstance(mask, Runs) and mask.size != (height, width):
            raise RecastError(f"{name} has {height} x {width} pixels (height x width), a mask of it {list(mask.size)}")
        if isinstance(mask, Runs) and isinstance(mask.counts, list):
            flat = np.repeat((np.arange(len(mask.counts)) % 2).astype(np.uint8), mask.counts)
            yield flat.reshape(width, height).T
            continue
        coco = optional_package("pycocotools.mask", "pycocotools", f"{name} has masks as polygons or text")
        if isinstance(mask, list):
            _check_near(mask, height, width, f"{name} has")
            runs = coco.merge(coco.frPyObjects(mask, height, width))
        else:
            runs = {"size": mask.size, "counts": mask.counts}
        try:
            drawn = np.ascontiguousarray(coco.decode(runs))
            if drawn.max(initial=0) > 1:  # the text ends too early
                raise ValueError("its text does not fill its size")
        except ValueError as error:
            raise RecastError(f"{name} has a damaged mask: {first_line(error)}") from None
        yield drawn
