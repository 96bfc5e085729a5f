"""Images with objects: boxes, classes and masks (`ObjectImages`), and folders of them.

An image is brought to S x S pixels: its long side to S, the rest filled up to the right and below, so that nothing is
cut off. Shapes of one image's objects: boxes (n, 4) as left, top, right, bottom; classes, crowd, area (n,).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms

from recast.errors import RecastError, listed, shown
from recast.lab.config import DataConfig
from recast.lab.data.datasets import Found
from recast.lab.data.fingerprint import digest_of
from recast.lab.data.folders import data_dir
from recast.lab.data.images import BICUBIC, PADDING, PHOTO, to_pixels
from recast.lab.data.parts import HELD_OUT, TRAINING, best_part, part_word
from recast.lab.data.seeding import drawing
from recast.lab.data.trees import find_file
from recast.lab.tasks.dense import DenseImages, chosen
from recast.lab.tasks.detect.coco import Annotations, drawn_masks, read_coco

AS_IT_IS = (0.0,) * 3, (1.0,) * 3
"""Detectors normalise by themselves."""


class Objects(list[dict[str, Tensor]]):
    """What is on each image of a batch, as torchvision's detectors take it (labels from 1), with crowd and area; scale:
    the image's pixels to its own."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Objects:
        """Copies there."""
        moved = ({k: v.to(device, non_blocking=non_blocking) for k, v in one.items()} for one in self)
        return Objects(moved)

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return Objects(found) if isinstance(index, slice) else found

    def taught(self) -> Objects:
        """Those that training sees: no crowds, nothing that is thinner than a pixel."""
        found = Objects()
        for one in self:
            sides = one["boxes"][:, 2:] - one["boxes"][:, :2]
            kept = (sides >= 1).all(1) & ~one["crowd"]
            found.append({name: one[name][kept] for name in ("boxes", "labels", "masks") if name in one})
        return found


@dataclass(eq=False)
class ObjectImages(DenseImages):
    """Images and what is on them."""

    objects: Sequence[Annotations]
    img_size: int
    task = "detect"
    have = "objects"

    @property
    def has_masks(self) -> bool:
        """Every object has one."""
        return all(one.masks is not None for one in self.objects)

    def targets(self) -> list[str]:
        return [digest_of([one.boxes.tobytes(), one.classes.tobytes()]) for one in self.objects]

    @staticmethod
    def joined(labels: Sequence[Any]) -> Any:
        return Objects(chain(*labels))

    def batch(self, indices: Sequence[int], seeds: Sequence[int] | None = None) -> tuple[Tensor, Any]:
        if not (found := self.drawn(indices, seeds)):
            return torch.empty(0, 3, self.img_size, self.img_size), Objects()
        return torch.stack([pixels for pixels, _ in found]), Objects(target for _, target in found)

    def draw(self, index: int, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The image and its objects on S x S pixels: scaled by a factor of `augment.resize` (1: the long side to S),
        cut or filled up, mirrored, coloured."""
        image, found, size, augment = self.open(index), self.objects[index], self.img_size, self.augment
        if found.size not in (None, image.size):
            sizes = "{}x{}, the file has {}x{}".format(*found.size or (), *image.size)
            name = self.image_name(index)
            raise RecastError(f"{name}: the JSON says {sizes} (width x height): mend the JSON or the file")
        scale, left, top, flip = size / max(image.size), 0, 0, False
        with drawing(seed):
            if augment is not None and augment.crop == "random":
                smallest, largest = augment.resize
                scale *= smallest + (largest - smallest) * float(torch.rand(()))
            scaled = [max(1, round(side * scale)) for side in image.size]
            if augment is not None:
                if augment.crop == "random":
                    left, top = (int(torch.randint(max(side - size, 0) + 1, ())) for side in scaled)
                flip = bool(augment.flip and torch.rand(()) < 0.5)
                if jitter := augment.color_jitter:
                    image = transforms.ColorJitter(jitter, jitter, jitter)(image)
        ends = [min(side - start, size) for side, start in zip(scaled, (left, top), strict=True)]
        boxes = (found.boxes * scale - (left, top, left, top)).clip(0, ends * 2)
        if flip:
            boxes = np.stack([size - boxes[:, 2], boxes[:, 1], size - boxes[:, 0], boxes[:, 3]], 1)

        def canvas(one: Image.Image, fill: Any, how: Image.Resampling) -> Image.Image:
            whole = Image.new(one.mode, (size, size), fill)
            whole.paste(one if one.size == tuple(scaled) else one.resize(scaled, how), (-left, -top))
            return whole.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else whole

        target = {
            "boxes": torch.from_numpy(boxes).float().reshape(-1, 4), "labels": torch.from_numpy(found.classes + 1),
            "crowd": torch.from_numpy(found.crowd), "area": torch.from_numpy(found.area),
            "scale": torch.tensor(scale, dtype=torch.float64),
        }  # fmt: skip
        if found.masks is not None:  # one at a time: hundreds on a large image would fill the memory
            masks = drawn_masks(found.masks, image.height, image.width, self.image_name(index))
            drawn = [np.array(canvas(Image.fromarray(mask), 0, Image.Resampling.NEAREST)) for mask in masks]
            target["masks"] = torch.from_numpy(np.stack(drawn) if drawn else np.zeros((0, size, size), np.uint8))
        return to_pixels(canvas(image, PADDING, BICUBIC)), target

    def subset(self, indices: Tensor) -> Self:
        return replace(self, items=chosen(self.items, indices), objects=chosen(self.objects, indices))


def find_coco(config: DataConfig) -> Found:
    """A folder with COCO's JSON: annotations/*train*.json and *val*.json (or *test*), train/*.json and valid/*.json, or
    one annotations.json of which a share is held out. Images are where the JSON's file_name says: in the folder, beside
    the JSON, in images/ of either, or in a folder of the part's name (train2017). Its categories are the classes, in
    the order of their ids, gaps and all."""
    root = data_dir(config)
    folders = [folder.name for folder in sorted(root.iterdir()) if folder.is_dir() and part_word(folder.name)]
    files = _json(root, "", "annotations") or _json(root, *folders)
    paths = {str(file.relative_to(root)): file for file in files}
    by_part = {part: [paths[name] for name in best_part(list(paths), words)]
               for part, words in (("train", TRAINING), ("val", HELD_OUT))}  # fmt: skip
    if not any(by_part.values()):
        by_part["train"] = files
    for part, found in by_part.items():
        instances = [file for file in found if file.stem.startswith("instances")] or found
        if len(instances) > 1:
            raise RecastError(f"{root} has {len(instances)} JSON files for {part} ({instances[0].name}, ...): keep one")
        by_part[part] = instances
    if not by_part["train"]:
        expected = "annotations.json, annotations/*train*.json and *val*.json, or train/*.json and valid/*.json"
        raise RecastError(f"{root} has no COCO JSON: expected {expected}")
    read = {part: _read(found[0], root) for part, found in by_part.items() if found}
    objects, names = read["train"][0].objects, read["train"][1]
    if all(one.crowd.all() for one in objects):
        which = "nothing but crowds" if any(len(one.classes) for one in objects) else "no object on any"
        raise RecastError(f"{by_part['train'][0]} has {len(objects)} images and {which}: nothing can be learned")
    if "val" in read and read["val"][1] != names:
        raise RecastError(f"{by_part['val'][0]} has other categories than {by_part['train'][0]}: they must be the same")
    val = read["val"][0] if "val" in read else None
    unused = [str(file) for name, file in paths.items() if part_word(name) and [file] not in by_part.values()]
    notes = [f"{root}: not used: {listed(unused, 5)}"] if unused else []
    return Found(root.resolve().name, read["train"][0], val, names, AS_IT_IS, "none", notes=notes)


def _json(root: Path, *folders: str) -> list[Path]:
    return [file for folder in folders for file in sorted((root / folder).glob("*.json"))]


def _read(path: Path, root: Path) -> tuple[ObjectImages, list[str]]:
    """The images of a COCO JSON, and the names of its categories."""
    own, objects, classes = read_coco(path)
    paths = []
    folders = [root, root / "images", path.parent, path.parent / "images"]
    folders += [folder for folder in sorted(root.iterdir()) if folder.is_dir()]
    folders.sort(key=lambda folder: folder.name not in path.stem)  # train2017 of instances_train2017.json
    for name in own:
        there = next(filter(None, (find_file(folder, name) for folder in folders)), None)
        if there is None:
            looked = f"{root}, images/, {path.parent.name}/"
            raise RecastError(f"{path} names the image {shown(name)}, which is in none of the folders {looked}")
        paths.append(str(there))
    return ObjectImages(paths, objects, PHOTO), classes
