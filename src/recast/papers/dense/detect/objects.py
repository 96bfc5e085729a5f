"""Images with objects: boxes, classes and masks (`ObjectImages`), and folders of them.

An image is resized to S x S pixels: its long side to S, the rest filled up to the right and below, so that nothing is
cut off. Shapes of the objects of an image: boxes (n, 4) as left, top, right, bottom; classes, crowd, area (n,).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from recast.errors import RecastError, listed, shown
from recast.lab.config import DataConfig
from recast.lab.data.datasets import RawData
from recast.lab.data.fingerprint import digest_of
from recast.lab.data.folders import data_dir
from recast.lab.data.images import BICUBIC, NEAREST, PADDING, PHOTO, opened, to_bytes
from recast.lab.data.parts import HELD_OUT, TRAINING, part_word
from recast.lab.data.seeding import seeded
from recast.lab.data.table import locate
from recast.lab.data.trees import find_file
from recast.papers.dense.detect.coco import Annotations, check_boxes, drawn_masks, is_taught, read_coco
from recast.papers.dense.images import DenseImages, coloured, mirrored

AS_IT_IS = (0.0,) * 3, (1.0,) * 3
"""Mean and deviation of data for detectors, which normalise by themselves."""


class Objects(list[dict[str, Tensor]]):
    """The objects of each image of a batch, as torchvision's detectors take them (labels from 1).

    Besides, crowd, area, and scale, the factor from the image's own pixels to these.
    """

    def to(self, device: torch.device, non_blocking: bool = False) -> Objects:
        """Return copies on a device."""
        moved = ({k: v.to(device, non_blocking=non_blocking) for k, v in each.items()} for each in self)
        return Objects(moved)

    def __getitem__(self, index: Any) -> Any:
        objects = super().__getitem__(index)
        return Objects(objects) if isinstance(index, slice) else objects

    def taught(self) -> Objects:
        """Return the objects of training: no crowds, and none thinner than a pixel."""
        rest = Objects()
        for each in self:
            which = is_taught(each["boxes"], each["crowd"])
            rest.append({name: each[name][which] for name in ("boxes", "labels", "masks") if name in each})
        return rest


@dataclass(eq=False)
class ObjectImages(DenseImages):
    """Images and their objects."""

    objects: Sequence[Annotations]
    img_size: int
    task = "detect"
    have = "objects"

    @property
    def has_masks(self) -> bool:
        """Return True if every object has a mask."""
        return all(each.masks is not None for each in self.objects)

    def targets(self) -> list[str]:
        return [digest_of([each.boxes.tobytes(), each.classes.tobytes()]) for each in self.objects]

    @staticmethod
    def joined(labels: Sequence[Any]) -> Any:
        return Objects(chain(*labels))

    def load(self, indices: Sequence[int], seeds: Sequence[int] | None = None) -> tuple[Tensor, Any]:
        if not (rows := self.drawn(indices, seeds)):
            return torch.empty(0, 3, self.img_size, self.img_size), Objects()
        return torch.stack([pixels for pixels, _ in rows]), Objects(target for _, target in rows)

    def draw(self, index: int, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return image and objects on S x S pixels.

        They are scaled by a factor of `augment.resize` (1: the long side to S), cut or filled up, mirrored, coloured.
        """
        image, objects, size, augment = self.open(index), self.objects[index], self.img_size, self.augment
        name = self.image_name(index)
        if objects.size not in (None, image.size):
            sizes = "{}x{}, the file has {}x{}".format(*objects.size or (), *image.size)
            raise RecastError(f"{name}: the JSON says {sizes} (width x height): mend the JSON or the file")
        scale, corner, flip = size / max(image.size), [0, 0], False
        sides = [max(1, round(side * scale)) for side in image.size]
        if augment is not None:
            with seeded(seed):
                if augment.crop == "random":
                    scale, sides, corner = self.cut(image.size, scale, augment)
                flip = mirrored(augment)
                image = coloured(image, augment)
        left, top = corner
        ends = [min(side - start, size) for side, start in zip(sides, corner, strict=True)]
        boxes = (objects.boxes * scale - corner * 2).clip(0, ends * 2)
        if flip:
            boxes = np.stack([size - boxes[:, 2], boxes[:, 1], size - boxes[:, 0], boxes[:, 3]], 1)

        def canvas(picture: Image.Image, fill: Any, how: Image.Resampling) -> Image.Image:
            whole = Image.new(picture.mode, (size, size), fill)
            whole.paste(picture if picture.size == tuple(sides) else picture.resize(sides, how), (-left, -top))
            return whole.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else whole

        target = {
            "boxes": torch.from_numpy(boxes).float().reshape(-1, 4),
            "labels": torch.from_numpy(objects.classes + 1),
            "crowd": torch.from_numpy(objects.crowd),
            "area": torch.from_numpy(objects.area),
            "scale": torch.tensor(scale, dtype=torch.float64),
        }
        if objects.masks is not None:  # one at a time: hundreds on a large image would fill the memory
            masks = drawn_masks(objects.masks, image.height, image.width, name)
            drawn = [np.array(canvas(Image.fromarray(mask), 0, NEAREST)) for mask in masks]
            target["masks"] = torch.from_numpy(np.stack(drawn) if drawn else np.zeros((0, size, size), np.uint8))
        return to_bytes(canvas(image, PADDING, BICUBIC)), target


def find_coco(config: DataConfig) -> RawData:
    """Read annotations/*train*.json and *val*.json (or *test*), train/*.json and valid/*.json, or annotations.json.

    A share of the images of a single JSON is held out. Images are where the JSON's file_name says: in the folder,
    beside the JSON, in images/ of either, or in a folder of the part's name (train2017).
    """
    root = data_dir(config)
    folders = [folder.name for folder in sorted(root.iterdir()) if folder.is_dir() and part_word(folder.name)]
    files = _json(root, "", "annotations") or _json(root, *folders)
    parts = [_of_part(files, root, words) for words in (TRAINING, HELD_OUT)]
    train, val = parts if any(parts) else (_only(files, root), None)
    if train is None:
        expected = "annotations.json, annotations/*train*.json and *val*.json, or train/*.json and valid/*.json"
        raise RecastError(f"{root} has no COCO JSON: expected {expected}")
    images, names, notes = _read(train, root, config)
    if all(each.crowd.all() for each in images.objects):
        raise RecastError(f"{train} has {len(images)} images and no object but crowds: nothing can be learned")
    held_out, other_names, more = _read(val, root, config) if val else (None, names, [])
    if other_names != names:
        raise RecastError(f"{val} has other categories than {train}: they must be the same")
    unused = [str(file) for file in files if part_word(str(file.relative_to(root))) and file not in (train, val)]
    notes += [*more, *([f"{root}: not used: {listed(unused, 5)}"] if unused else [])]
    return RawData(root.resolve().name, images, held_out, names, AS_IT_IS, "none", notes=notes)


def _json(root: Path, *folders: str) -> list[Path]:
    return [file for folder in folders for file in sorted((root / folder).glob("*.json"))]


def _of_part(files: Sequence[Path], root: Path, words: Sequence[str]) -> Path | None:
    """Return the JSON of a part: that with the first of its words that any has."""
    for word in words:
        if same := [file for file in files if part_word(str(file.relative_to(root))) == word]:
            return _only(same, root)
    return None


def _only(files: Sequence[Path], root: Path) -> Path | None:
    """Return the only JSON, or the only one called instances*; None without any."""
    files = [file for file in files if file.stem.startswith("instances")] or files
    if len(files) > 1:
        raise RecastError(f"{root} has {len(files)} JSON files for one part ({files[0].name}, ...): keep one")
    return files[0] if files else None


def _read(path: Path, root: Path, config: DataConfig) -> tuple[ObjectImages, list[str], list[str]]:
    """Return the images of a COCO JSON, the names of its categories, and lines about them.

    Raises RecastError for images that are missing, unless they are skipped, or listed twice, and for suspicious boxes.
    """
    names, objects, classes, damaged = read_coco(path, config.bad_image == "skip")
    files = _files(names, path, root)
    missing = [name for name, file in zip(names, files, strict=True) if file is None]
    if missing and (config.bad_image == "stop" or len(missing) == len(names)):
        raise RecastError(
            f"{path}: {len(missing)} of {len(names)} images are in no folder of {root}: "
            f"{listed(list(map(shown, missing)), 3)}; add them, or skip them with --bad-image skip"
        )
    found = {row: file for row, file in enumerate(files) if file is not None}
    if twice := [file for file, count in Counter(map(os.path.realpath, found.values())).items() if count > 1]:
        raise RecastError(f"{path} lists images twice ({len(twice)}: {listed(twice, 3)}): keep one each")
    images = ObjectImages(list(found.values()), [objects[row] for row in found], PHOTO)
    sizes = [each.size or _size(file) for each, file in zip(images.objects, found.values(), strict=True)]
    line = check_boxes(images.objects, sizes, config.img_size or PHOTO, str(path))
    present = set(np.concatenate([each.classes for each in images.objects]).tolist())
    absent = [name for number, name in enumerate(classes) if number not in present]
    line += f"; categories without a box: {listed(absent, 3)}" * bool(absent)
    line += f"; images left out, which are missing: {len(missing)}" * bool(missing)
    line += f"; images left out for an annotation that cannot be read: {damaged}" * bool(damaged)
    return images, classes, [line]


def _files(names: Sequence[str], path: Path, root: Path) -> list[str | None]:
    """Return the file of every image of a JSON, None without one: as the JSON has it, else as a table's rows are found.

    Folders of another part count only if no image is elsewhere: numbered files are in both, with other objects.
    """
    folders = [root, root / "images", path.parent, path.parent / "images"]
    folders += [each for top in (root, root / "images") if top.is_dir() for each in sorted(top.iterdir())]
    folders.sort(key=lambda folder: folder.name not in path.stem)  # train2017 of instances_train2017.json
    part = part_word(str(path.relative_to(root)))
    others = HELD_OUT if part in ("train", "training") else TRAINING if part in HELD_OUT else ()

    def word(folder: Path) -> str | None:
        return part_word(str(folder.relative_to(root)))

    def found(folders: Sequence[Path], others: Sequence[str]) -> list[str | None]:
        files = [next((str(file) for folder in folders if (file := find_file(folder, name))), None) for name in names]
        for place in (*(folder for folder in folders if word(folder) and folder.is_dir()), root):
            if missing := [row for row, file in enumerate(files) if file is None]:
                matches, _, _ = locate(place, str(path), [names[row] for row in missing])
                for row, match in zip(missing, matches, strict=True):
                    files[row] = None if match is None or word(Path(match).parent) in others else match
        return files

    files = found([folder for folder in folders if word(folder) not in others], others)
    files = files if any(files) else found(folders, ())
    if not any(files) and (bare := [PureWindowsPath(name).name for name in names]) != list(names):
        return _files(bare, path, root)  # folders of another computer
    return files


def _size(path: str) -> tuple[int, int] | None:
    """Return width and height of an image file; None for one that cannot be read, which the loader names."""
    with suppress(RecastError), opened(path, path) as image:
        return image.size
    return None
