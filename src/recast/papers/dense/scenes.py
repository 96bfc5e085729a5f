"""Cluttered scenes with a class for every pixel: shapes and handwritten digits that cover one another.

Most classes are local: discs, squares, triangles, even and odd digits, the bar. Two are distant (`DISTANT`): a ring is
`ring, bar lies` or `ring, bar stands` by the direction of the scene's one bar, and no pixel of a ring is nearer than
`FAR` rows or columns to the bar. A network that sees less than that around a pixel can only guess the class of a ring;
one that compares distant places can know it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from recast.config import coerce
from recast.lab.config import DataConfig
from recast.lab.data.datasets import RawData
from recast.lab.data.digits import read_digits
from recast.papers.dense.detect.coco import CocoFile, parsed
from recast.papers.dense.detect.objects import AS_IT_IS, ObjectImages
from recast.papers.dense.segment.pairs import ImagePairs

SIDE, FAR = 96, 38
"""Side of a scene, and distance between a ring and the bar in rows or columns, in pixels."""
CLASSES: tuple[str, ...] = ("background", "disc", "square", "triangle", "even digit", "odd digit", "bar")
CLASSES += ("ring, bar lies", "ring, bar stands")
DISTANT = CLASSES[-2:]
KINDS = {"local": CLASSES[1:-2], "distant": DISTANT}
NUM_SCENES = {"train": 1000, "val": 200}
NORM = (0.50,) * 3, (0.25,) * 3
BAR, RING, DIGIT = (5, 18), 9, 24
"""Sides of the bar, outer radius of a ring, side of an enlarged digit."""
LOCAL, RINGS, NOISE = (3, 7), (1, 3), 0.1
"""Numbers of each in a scene, from and below; amplitude of the noise."""
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
    """Return the scene of a seed; digits (n, 8, 8) in [0, 1] with their labels (n,)."""
    random = np.random.default_rng(seed)  # type: ignore[arg-type]
    colours = random.uniform(0.15, 0.85, (2, 3))
    ramp = (_ROWS * np.cos(angle := random.uniform(0, 7)) + _COLUMNS * np.sin(angle)) / SIDE
    canvas = NOISE * random.random((SIDE, SIDE, 3)) + colours[0] + (colours[1] - colours[0]) * ramp[..., None]
    mask, objects = (np.zeros((SIDE, SIDE), np.uint8) for _ in range(2))

    def paint(share: np.ndarray, name: str) -> None:
        """Cover the pixels by `share`, in a colour that stands out from those below."""
        covered, colour = share > 0.5, random.uniform(0, 1, 3)
        below = canvas[covered].mean(0)
        while np.abs(colour - below).max() < 0.35:
            colour = random.uniform(0, 1, 3)
        pixels = canvas[covered]
        canvas[covered] = (
            pixels + share[covered, None] * (colour - pixels) + NOISE * (random.random(pixels.shape) - 0.5)
        )
        mask[covered] = CLASSES.index(name)
        objects[covered] = objects.max() + 1

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
    """Return the share of every pixel of a scene that an enlarged digit covers."""
    enlarged = F.interpolate(torch.from_numpy(grey)[None, None], (DIGIT, DIGIT), mode="bilinear")[0, 0].numpy()
    share = np.zeros((SIDE, SIDE))
    share[row : row + DIGIT, column : column + DIGIT] = enlarged
    return share


def draw_scenes(part: str) -> list[DrawnScene]:
    """Return the scenes of a part, train or val; held-out ones show held-out digits."""
    grey, labels, is_val = (values.numpy() for values in read_digits())
    which = is_val if part == "val" else ~is_val
    return [draw_scene((part == "val", i), grey[which, 0], labels[which]) for i in range(NUM_SCENES[part])]


def find_scenes(_config: DataConfig) -> RawData:
    """Return both parts, in memory, neither cut nor mirrored: a ring needs the bar, and a mirror changes digits."""
    train, val = (
        ImagePairs(_pixels(scenes), torch.from_numpy(np.stack([scene.mask for scene in scenes])), SIDE)
        for scenes in map(draw_scenes, NUM_SCENES)
    )
    return RawData("scenes", train, val, list(CLASSES), NORM, crop="none", flip=False, kinds=KINDS)


def find_scene_objects(_config: DataConfig) -> RawData:
    """Return the same with the visible part of every object."""
    train, val = (
        ObjectImages(_pixels(scenes), parsed(coerce(CocoFile, as_coco(scenes), "scenes"), "scenes"), SIDE)
        for scenes in map(draw_scenes, NUM_SCENES)
    )
    return RawData("scene_objects", train, val, list(CLASSES[1:]), AS_IT_IS, crop="none", flip=False, kinds=KINDS)


def _pixels(scenes: list[DrawnScene]) -> torch.Tensor:
    return torch.from_numpy(np.stack([scene.image for scene in scenes])).permute(0, 3, 1, 2).contiguous()


def as_coco(scenes: Iterable[DrawnScene]) -> dict[str, Any]:
    """Return the objects of scenes as COCO's JSON, the visible part of each, with masks as run lengths."""
    images, annotations = [], list[dict[str, Any]]()
    for number, scene in enumerate(scenes, start=1):
        images.append({"id": number, "file_name": f"{number}.png", "height": SIDE, "width": SIDE})
        for index in np.unique(scene.objects)[1:]:
            pixels = scene.objects == index
            (rows, columns), flat = np.nonzero(pixels), pixels.T.ravel()
            box = [columns.min(), rows.min(), np.ptp(columns) + 1, np.ptp(rows) + 1]
            edges = np.flatnonzero(np.diff(flat, prepend=False)).tolist()
            counts = np.diff([0, *edges, flat.size]).tolist()
            row: dict[str, Any] = {"id": len(annotations) + 1, "image_id": number}
            row |= {"category_id": int(scene.mask[pixels][0]), "bbox": [int(side) for side in box]}
            row |= {"area": int(pixels.sum()), "iscrowd": 0, "segmentation": {"size": [SIDE, SIDE], "counts": counts}}
            annotations.append(row)
    categories = [{"id": index, "name": name} for index, name in enumerate(CLASSES) if index]
    return {"images": images, "annotations": annotations, "categories": categories}
