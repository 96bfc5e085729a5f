"""scikit-learn's handwritten digits: as they are, and on canvases that ask for comparing far-apart places.

`one_digit`: a digit somewhere on an empty canvas; which? `odd_digit`: three digits far apart, two of one class and one
of another; which is the odd one? Both have ten classes, so what learned the first can go on with the second. To answer
the second, what stands at one place must be compared with what stands at others: the mean over a map says which digits
are there and how much of each, and the odd one is the one of which there is *less*.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from recast.errors import optional_package
from recast.lab.config import DataConfig
from recast.lab.data.datasets import Found, ImageTensors
from recast.lab.data.seeding import choose_balanced
from recast.lab.device import check_memory

NUM_VAL = 500
"""Digits that are held out, stratified; the rest, 1,297, is for training."""
SIDE, DIGIT = 32, 8
"""Pixels of a canvas and of a digit."""
APART = 10
"""Digits of a canvas differ by this many pixels or more in rows or in columns."""
NUM_CANVASES = {"train": 5000, "val": 1000}
NORM = {
    "digits": ((0.313,) * 3, (0.356,) * 3),  # of the 1,297 training images at 32 x 32
    "canvases": ((0.057,) * 3, (0.202,) * 3),  # of odd_digit's training images
}


def find_digits(config: DataConfig) -> Found:
    """The 1,797 digits, 8 x 8 grey levels 0..16, enlarged (bicubic)."""
    grey, labels, is_val = read_digits()

    def enlarged(which: Tensor, img_size: int) -> ImageTensors:
        side = int(img_size / (config.crop_pct or 1))
        pixels = _enlarged(grey[which], side)
        edge = (side - img_size) // 2
        return _images(pixels[:, :, edge : edge + img_size, edge : edge + img_size], labels[which])

    img_size = config.img_size or 32
    train, val = enlarged(~is_val, img_size), enlarged(is_val, config.test_size or img_size)
    return Found("digits", train, val, None, NORM["digits"], crop="pad", flip=False)


def find_canvases(config: DataConfig, name: str) -> Found:
    """Canvases of `SIDE` pixels, enlarged where another size is asked for. Held-out ones show held-out digits."""
    grey, labels, is_val = read_digits()
    parts: list[ImageTensors] = []
    sizes = {"train": config.img_size, "val": config.test_size or config.img_size}
    for part, which in (("train", ~is_val), ("val", is_val)):
        generator = torch.Generator().manual_seed(len(parts))
        classes, answers = _classes(name, NUM_CANVASES[part], generator)
        canvases = _canvases(grey[which, 0], labels[which], classes, generator)
        if (side := sizes[part]) not in (None, SIDE):
            canvases = _enlarged(canvases, side)
        parts.append(_images(canvases, answers))
    train, val = parts
    return Found(name, train, val, None, NORM["canvases"], crop="none", flip=False)


SOURCES: dict[str, Callable[[DataConfig], Found]] = {
    "digits": find_digits,
    "one_digit": partial(find_canvases, name="one_digit"),
    "odd_digit": partial(find_canvases, name="odd_digit"),
}


def _enlarged(images: Tensor, side: int) -> Tensor:
    check_memory(2 * 4 * len(images) * images.shape[1] * side**2, f"{len(images):,} images of {side:,} pixels a side")
    return F.interpolate(images, size=(side, side), mode="bicubic").clamp(0, 1)


def read_digits() -> tuple[Tensor, Tensor, Tensor]:
    """Grey levels (1797, 1, 8, 8) in [0, 1], classes, and which are held out."""
    digits = optional_package("sklearn.datasets", "scikit-learn", "the digits come with scikit-learn").load_digits()
    labels = torch.tensor(digits.target, dtype=torch.long)
    is_val = torch.zeros(len(labels), dtype=torch.bool)
    is_val[choose_balanced(labels, NUM_VAL, "the validation part")] = True
    return torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, labels, is_val


def _images(pixels: Tensor, labels: Tensor) -> ImageTensors:
    return ImageTensors((pixels * 255).round().to(torch.uint8).repeat(1, 3, 1, 1), labels)


def _classes(name: str, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The classes of every canvas' digits (N, 1 or 3), and its answer (N,), as many of each."""
    answers = torch.arange(count) % 10
    if name == "one_digit":
        return answers[:, None], answers
    pair = (answers + 1 + torch.randint(9, (count,), generator=generator)) % 10
    return torch.stack([answers, pair, pair], 1), answers


def _canvases(grey: Tensor, labels: Tensor, classes: Tensor, generator: torch.Generator) -> Tensor:
    """(N, 1, 32, 32): digits of these classes (N, K), drawn from `grey` (n, 8, 8), at random places far apart."""
    count, digits = classes.shape
    corners = torch.zeros(count, digits, 2, dtype=torch.long)
    todo = torch.arange(count)
    while len(todo):
        drawn = torch.randint(SIDE - DIGIT + 1, (len(todo), digits, 2), generator=generator)
        corners[todo] = drawn
        distance = (drawn[:, :, None] - drawn[:, None]).abs().amax(-1) + SIDE * torch.eye(digits, dtype=torch.long)
        todo = todo[(distance < APART).any(-1).any(-1)]
    canvas, pixel = torch.zeros(count, SIDE, SIDE), torch.arange(DIGIT)
    order = torch.argsort(labels, stable=True)
    members = torch.bincount(labels, minlength=10)
    first = members.cumsum(0) - members
    for place in range(digits):
        drawn = (torch.rand(count, generator=generator) * members[classes[:, place]]).long()
        rows, columns = (corners[:, place, axis, None] + pixel for axis in (0, 1))
        at = torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None]
        canvas[at] = grey[order[first[classes[:, place]] + drawn]]
    return canvas[:, None]
