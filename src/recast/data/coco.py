"""Folders with objects in COCO's JSON, and what such a dictionary says of every image."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recast.data.datasets import Found
from recast.data.folders import VAL_NAMES, data_dir
from recast.data.images import PHOTO
from recast.data.objects import Annotations, ObjectImages
from recast.errors import RecastError, shown
from recast.run.config import DataConfig
from recast.run.files import read_json

AS_IT_IS = (0.0,) * 3, (1.0,) * 3
"""Detectors normalise by themselves."""


def find_coco(config: DataConfig) -> Found:
    """A folder with COCO's JSON: annotations/*train*.json and *val*.json (or *test*), or one annotations.json of which
    a share is held out; images where the JSON's file_name says, in the folder, images/, or a folder of the part's name
    (train2017). Its categories are the classes, in the order of their ids, gaps and all."""
    root = data_dir(config)
    files = sorted([*root.glob("*.json"), *root.glob("annotations/*.json")])
    wanted = {"train": ("train",), "val": VAL_NAMES}
    by_part = {part: [f for f in files if any(name in f.stem for name in names)] for part, names in wanted.items()}
    if not any(by_part.values()):
        by_part["train"] = files
    for part, found in by_part.items():
        instances = [file for file in found if file.stem.startswith("instances")] or found
        if len(instances) > 1:
            raise RecastError(f"{root} has {len(instances)} JSON files for {part} ({instances[0].name}, ...): keep one")
        by_part[part] = instances
    if not by_part["train"]:
        raise RecastError(
            f"{root} has no COCO JSON: expected annotations.json, or annotations/*train*.json and *val*.json"
        )
    read = {part: _read(found[0], root) for part, found in by_part.items() if found}
    names = read["train"][1]
    if "val" in read and read["val"][1] != names:
        raise RecastError(f"{by_part['val'][0]} has other categories than {by_part['train'][0]}: they must be the same")
    val = read["val"][0] if "val" in read else None
    return Found(root.resolve().name, read["train"][0], val, names, AS_IT_IS, "none")


def _read(path: Path, root: Path) -> tuple[ObjectImages, list[str]]:
    """The images of a COCO JSON, and the names of its categories."""
    found = read_json(path, "images", "annotations", "categories")
    images, paths, own = parsed(found, str(path)), [], [str(one["file_name"]) for one in found["images"]]
    folders = [root, root / "images", path.parent, *(f for f in sorted(root.iterdir()) if f.is_dir())]
    folders.sort(key=lambda folder: folder.name not in path.stem)  # train2017 of instances_train2017.json
    for name in own:
        there = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if there is None:
            raise RecastError(f"{path} names the image {shown(name)}, which is not in {root} or {root / 'images'}")
        paths.append(str(there))
    return ObjectImages(paths, images, PHOTO), [str(one["name"]) for one in _categories(found)]


def _categories(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return sorted(found["categories"], key=lambda one: int(one["id"]))


def parsed(found: Mapping[str, Any], where: str) -> list[Annotations]:
    """The objects of every image of a COCO dictionary, in its order. Raises RecastError for ids that name nothing or
    two things, boxes without a side and what is no box."""
    try:
        ids = [one["id"] for one in found["images"]]
        classes = {one["id"]: index for index, one in enumerate(_categories(found))}
        if not ids or not classes:
            raise RecastError(f"{where} has {len(ids)} images and {len(classes)} categories: expected some of both")
        for what, numbers in (("images", ids), ("categories", [one["id"] for one in found["categories"]])):
            if twice := [number for number, count in Counter(numbers).items() if count > 1]:
                raise RecastError(f"{where} has two {what} with the id {shown(twice[0])}")
        of, known_images = defaultdict[Any, list[Mapping[str, Any]]](list), set(ids)
        for one in found["annotations"]:
            for key, known in (("image_id", known_images), ("category_id", set(classes))):
                if one[key] not in known:
                    which = f"annotation {shown(one.get('id'))} has {key} {shown(one[key])}"
                    raise RecastError(f"{where}: {which}, which names nothing there: mend or remove it")
            box = np.array(one["bbox"], dtype=np.float64)
            if box.shape != (4,) or not np.isfinite(box).all() or (box[2:] <= 0).any():
                raise RecastError(
                    f"{where}: annotation {shown(one.get('id'))} has the box {shown(one['bbox'])}: expected [left, "
                    "top, width, height] with sides above 0; mend or remove it"
                )
            of[one["image_id"]].append(one)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecastError(f"{where} is no COCO JSON of objects ({type(error).__name__}: {error})") from None
    has_masks = all(one.get("segmentation") for one in found["annotations"]) and bool(found["annotations"])
    return [_annotations(of[number], classes, has_masks) for number in ids]


def _annotations(own: Sequence[Mapping[str, Any]], classes: Mapping[Any, int], has_masks: bool) -> Annotations:
    boxes = np.array([one["bbox"] for one in own], dtype=np.float64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    sides = boxes[:, 2:] - boxes[:, :2]
    area = [float(one.get("area", side)) for one, side in zip(own, sides.prod(1), strict=True)]
    return Annotations(
        boxes, np.array([classes[one["category_id"]] for one in own], dtype=np.int64),
        np.array([bool(one.get("iscrowd", 0)) for one in own], dtype=bool), np.array(area, dtype=np.float64),
        tuple(one["segmentation"] for one in own) if has_masks else None,
    )  # fmt: skip
