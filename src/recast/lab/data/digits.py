"""scikit-learn's handwritten digits, and canvases of them that require comparing distant places.

`one_digit`: a digit somewhere on an empty canvas; the label is its class. `odd_digit`: three digits far apart, two of
one class and one of another; the label is the class of the odd one. Both have ten classes, so that a network trained on
the first can be fine-tuned on the second. That requires comparing places: the mean over a map only measures how much of
each digit there is, and the odd digit is the one with *less*.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from recast.lab.config import DataConfig
from recast.lab.data.datasets import ImageTensors, RawData
from recast.lab.data.device import check_memory
from recast.lab.data.seeding import choose_balanced
from recast.lab.plugins import optional_package

NUM_VAL = 500
"""Number of held-out digits, stratified; the other 1,297 are for training."""
SIDE, DIGIT = 32, 8
"""Sides of a canvas and of a digit in pixels."""
APART = 10
"""Smallest distance of the digits of a canvas in rows or columns, in pixels."""
NUM_CANVASES = {"train": 5000, "val": 1000}
NORM = {
    "digits": ((0.313,) * 3, (0.356,) * 3),  # the 1,297 training images at 32 x 32
    "canvases": ((0.057,) * 3, (0.202,) * 3),  # the training images of odd_digit
}


def find_digits(config: DataConfig) -> RawData:
    """Return the 1,797 digits, 8 x 8 grey levels 0..16, enlarged (bicubic)."""
    grey, labels, is_val = read_digits()

    def enlarged(which: Tensor, img_size: int) -> ImageTensors:
        side = int(img_size / (config.crop_pct or 1))
        pixels = _enlarged(grey[which], side)
        edge = (side - img_size) // 2
        return as_rgb(pixels[:, :, edge : edge + img_size, edge : edge + img_size], labels[which])

    img_size = config.img_size or 32
    train, val = enlarged(~is_val, img_size), enlarged(is_val, config.test_size or img_size)
    return RawData("digits", train, val, None, NORM["digits"], crop="pad", flip=False)


def find_canvases(config: DataConfig) -> RawData:
    """Return canvases of `SIDE` pixels, enlarged to another img_size. Held-out canvases show held-out digits."""
    grey, labels, is_val = read_digits()

    def drawn(which: Tensor, count: int, seed: int, img_size: int | None) -> ImageTensors:
        generator = torch.Generator().manual_seed(seed)
        classes, answers = draw_classes(config.name, count, generator)
        canvases = draw_canvases(grey[which, 0], labels[which], classes, generator)
        return as_rgb(canvases if img_size in (None, SIDE) else _enlarged(canvases, img_size), answers)

    train = drawn(~is_val, NUM_CANVASES["train"], 0, config.img_size)
    val = drawn(is_val, NUM_CANVASES["val"], 1, config.test_size or config.img_size)
    return RawData(config.name, train, val, None, NORM["canvases"], crop="none", flip=False)


def _enlarged(images: Tensor, side: int) -> Tensor:
    check_memory(2 * 4 * len(images) * images.shape[1] * side**2, f"{len(images):,} images of {side:,} pixels a side")
    return F.interpolate(images, size=(side, side), mode="bicubic").clamp(0, 1)


def read_digits() -> tuple[Tensor, Tensor, Tensor]:
    """Return grey levels (1797, 1, 8, 8) in [0, 1], classes, and True for held-out digits."""
    digits = optional_package("sklearn.datasets", "scikit-learn", "the digits are part of scikit-learn").load_digits()
    labels = torch.tensor(digits.target, dtype=torch.long)
    is_val = torch.zeros(len(labels), dtype=torch.bool)
    is_val[choose_balanced(labels, NUM_VAL, "the validation part")] = True
    return torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, labels, is_val


def as_rgb(pixels: Tensor, labels: Tensor) -> ImageTensors:
    """Return grey pixels (N, 1, S, S) in [0, 1] as RGB images."""
    return ImageTensors((pixels * 255).round().to(torch.uint8).repeat(1, 3, 1, 1), labels)


def draw_classes(name: str, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw the classes of the digits of every canvas (N, 1 or 3) and its label (N,), balanced."""
    answers = torch.arange(count) % 10
    if name == "one_digit":
        return answers[:, None], answers
    pair = (answers + 1 + torch.randint(9, (count,), generator=generator)) % 10
    return torch.stack([answers, pair, pair], 1), answers


def draw_canvases(grey: Tensor, labels: Tensor, classes: Tensor, generator: torch.Generator) -> Tensor:
    """Draw canvases (N, 1, 32, 32) with digits of classes (N, K) from `grey` (n, 8, 8), at random places far apart."""
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
