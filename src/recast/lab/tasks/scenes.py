"""Cluttered scenes with a class for every pixel: shapes and handwritten digits that cover one another, drawn here.

Most classes are local: what stands at a place says them (discs, squares, triangles, even and odd digits, the bar). Two
are distant: a ring is of the class `ring, bar lies` or `ring, bar stands` by how the scene's one bar lies, and no pixel
of a ring is nearer than `FAR` rows or columns to the bar. A network that sees less than that around a pixel can only
guess which of the two a ring is; one that compares distant places can know. `DISTANT` names the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from recast.lab.config import DataConfig
from recast.lab.data.datasets import Found
from recast.lab.data.digits import read_digits
from recast.lab.tasks.detect.coco import parsed
from recast.lab.tasks.detect.objects import AS_IT_IS, ObjectImages
from recast.lab.tasks.segment.pairs import ImagePairs

SIDE, FAR = 96, 38
"""Pixels: of a scene; between a ring and the bar, in rows or in columns."""
CLASSES = (
    "background", "disc", "square", "triangle", "even digit", "odd digit", "bar", "ring, bar lies", "ring, bar stands",
)  # fmt: skip
DISTANT = CLASSES[-2:]
KINDS = {"local": CLASSES[1:-2], "distant": DISTANT}
NUM_SCENES = {"train": 1000, "val": 200}
NORM = (0.50,) * 3, (0.25,) * 3
BAR, RING, DIGIT = (5, 18), 9, 24
"""Sides of the bar, outer radius of a ring, side of an enlarged digit."""
LOCAL, RINGS, NOISE = (3, 7), (1, 3), 0.1
"""How many of each a scene has, from, and below; how far noise reaches."""
_ROWS, _COLUMNS = np.mgrid[:SIDE, :SIDE]


@dataclass(frozen=True)
class DrawnScene:
    """One image with the class of every pixel, and its objects."""

    image: np.ndarray
    """(SIDE, SIDE, 3) uint8."""
    mask: np.ndarray
    """(SIDE, SIDE) uint8, positions in `CLASSES`."""
    objects: np.ndarray
    """(SIDE, SIDE) uint8: which object a pixel is of, from 1; 0 is the background."""


def draw_scene(seed: object, digits: np.ndarray, labels: np.ndarray) -> DrawnScene:
    """A scene that follows from the seed; digits (n, 8, 8) in [0, 1] with their labels (n,)."""
    random = np.random.default_rng(seed)  # type: ignore[arg-type]
    colours = random.uniform(0.15, 0.85, (2, 3))
    ramp = (_ROWS * np.cos(angle := random.uniform(0, 7)) + _COLUMNS * np.sin(angle)) / SIDE
    canvas = NOISE * random.random((SIDE, SIDE, 3)) + colours[0] + (colours[1] - colours[0]) * ramp[..., None]
    mask, objects = (np.zeros((SIDE, SIDE), np.uint8) for _ in range(2))

    def paint(share: np.ndarray, name: str) -> None:
        """Cover the pixels by `share`, in a colour that stands out from what is below."""
        own, colour = share > 0.5, random.uniform(0, 1, 3)
        below = canvas[own].mean(0)
        while np.abs(colour - below).max() < 0.35:
            colour = random.uniform(0, 1, 3)
        pixels = canvas[own]
        canvas[own] = pixels + share[own, None] * (colour - pixels) + NOISE * (random.random(pixels.shape) - 0.5)
        mask[own] = CLASSES.index(name)
        objects[own] = objects.max() + 1

    lies = bool(random.integers(2))
    height, width = BAR if lies else BAR[::-1]
    corner = random.integers(2, size=2) * (SIDE - np.array([height, width]) - 12) + random.integers(12, size=2)
    bar = np.zeros((SIDE, SIDE))
    bar[corner[0] : corner[0] + height, corner[1] : corner[1] + width] = 1
    for _ in range(random.integers(*LOCAL)):
        row, column = random.uniform(8, SIDE - 8, 2)
        kind, size = random.integers(4), random.uniform(6, 12)
        down, right = _ROWS - row, _COLUMNS - column
        if kind == 0:
            paint(np.hypot(down, right) < size, "disc")
        elif kind == 1:
            paint(np.maximum(abs(down), abs(right)) < size * 0.85, "square")
        elif kind == 2:
            paint((down < size * 0.7) & (down > 2 * abs(right) - size), "triangle")
        else:
            index = random.integers(len(labels))
            name = ("even digit", "odd digit")[labels[index] % 2]
            paint(_digit(digits[index], *random.integers(SIDE - DIGIT, size=2)), name)
    inner = np.argwhere(np.ones((SIDE - 2 * RING,) * 2)) + RING
    away = np.maximum(corner - inner, inner - corner - (height - 1, width - 1))
    places = inner[away.max(1) >= FAR + RING]
    for _ in range(random.integers(*RINGS)):
        row, column = places[random.integers(len(places))]
        radius = np.hypot(_ROWS - row, _COLUMNS - column)
        paint((radius < RING) & (radius > RING - 4), DISTANT[not lies])
    paint(bar, "bar")  # last: it is never covered
    return DrawnScene((canvas.clip(0, 1) * 255).round().astype(np.uint8), mask, objects)


def _digit(grey: np.ndarray, row: int, column: int) -> np.ndarray:
    """How much of every pixel of a scene an enlarged digit covers."""
    enlarged = F.interpolate(torch.from_numpy(grey)[None, None], (DIGIT, DIGIT), mode="bilinear")[0, 0].numpy()
    share = np.zeros((SIDE, SIDE))
    share[row : row + DIGIT, column : column + DIGIT] = enlarged
    return share


def draw_scenes(part: str) -> list[DrawnScene]:
    """The scenes of a part, train or val; held-out ones show held-out digits."""
    grey, labels, is_val = (found.numpy() for found in read_digits())
    which = is_val if part == "val" else ~is_val
    return [draw_scene((part == "val", i), grey[which, 0], labels[which]) for i in range(NUM_SCENES[part])]


def find_scenes(_config: DataConfig) -> Found:
    """Both parts, in memory. Neither cut nor mirrored: what makes a ring's
    class would be lost, and a digit is another one in a mirror."""
    drawn = map(draw_scenes, NUM_SCENES)
    train, val = (ImagePairs(_pixels(s), torch.from_numpy(np.stack([one.mask for one in s])), SIDE) for s in drawn)
    return Found("scenes", train, val, list(CLASSES), NORM, crop="none", flip=False, kinds=KINDS)


def find_scene_objects(_config: DataConfig) -> Found:
    """The same with what is visible of every object."""
    drawn = map(draw_scenes, NUM_SCENES)
    train, val = (ObjectImages(_pixels(s), parsed(as_coco(s), "scenes"), SIDE) for s in drawn)
    return Found("scene_objects", train, val, list(CLASSES[1:]), AS_IT_IS, crop="none", flip=False, kinds=KINDS)


def _pixels(scenes: list[DrawnScene]) -> torch.Tensor:
    return torch.from_numpy(np.stack([scene.image for scene in scenes])).permute(0, 3, 1, 2).contiguous()


def as_coco(scenes: Iterable[DrawnScene]) -> dict[str, Any]:
    """The objects of scenes as COCO's JSON: what is visible of each, its box [left, top, width, height], its class
    (`category_id`, from 1), area and run lengths, column by column from a run of zeros."""
    images, annotations = [], list[dict[str, Any]]()
    for number, scene in enumerate(scenes, start=1):
        images.append({"id": number, "file_name": f"{number}.png", "height": SIDE, "width": SIDE})
        for index in np.unique(scene.objects)[1:]:
            own = scene.objects == index
            (rows, columns), flat = np.nonzero(own), own.T.ravel()
            box = [columns.min(), rows.min(), np.ptp(columns) + 1, np.ptp(rows) + 1]
            edges = np.flatnonzero(np.diff(flat, prepend=False)).tolist()
            counts = np.diff([0, *edges, flat.size]).tolist()
            annotations.append({
                "id": len(annotations) + 1, "image_id": number, "category_id": int(scene.mask[own][0]),
                "bbox": [int(side) for side in box], "area": int(own.sum()), "iscrowd": 0,
                "segmentation": {"size": [SIDE, SIDE], "counts": counts},
            })  # fmt: skip
    categories = [{"id": index, "name": name} for index, name in enumerate(CLASSES) if index]
    return {"images": images, "annotations": annotations, "categories": categories}
