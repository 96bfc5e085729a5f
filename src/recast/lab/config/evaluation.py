"""What the suites of an evaluation can be told, as plain data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from recast.errors import RecastError, shown
from recast.fields import Checked, Count, CountOrZero, NotNegative, Pixels, Positive, check_value


@dataclass(frozen=True)
class Options(Checked):
    """Options of the suites."""

    eps: tuple[NotNegative, ...] = (1.0, 4.0)
    """budgets of the attacks in 1/255 of a [0, 1] pixel"""
    steps: Count = 5
    """steps of PGD"""
    step_size: Positive | None = None
    """step size of PGD in 1/255; None: 2.5·ε/steps"""
    restarts: Count = 1
    """starts of PGD, from the second on random ones: an image counts as correct if all fail"""
    random_start: bool = False
    """start PGD at a random point of the ball"""
    sizes: tuple[str, ...] | None = None
    """test sizes: 160 or 128x192 (height x width); None: sizes around the data's own"""
    neighbours: tuple[Count, ...] = (1, 5, 10, 20)
    """k of the knn suite"""
    labels: Literal["fine", "coarse"] | None = None
    """of knn, retrieval, linear, separability, tsne: labels, whatever a run was trained with; None: its own"""
    sets: str | None = None
    """folder of imagenet-c/, imagenet-a/ ...; None: the one that RECAST_DATA names"""
    test_mode: Literal["square", "whole", "slide"] = "square"
    """of segmentation: the middle square of an image; all of it, its short side the square's; or all of it by windows
    as large as the square, two thirds of it apart, and their mean"""
    test_scales: tuple[Positive, ...] = (1.0,)
    """of segmentation: mean of the predictions of the image at these scales"""
    test_flip: bool = False
    """of segmentation: and of its mirror image"""
    num_images: Count | None = None
    """measure on this many images of every data set, class-balanced"""
    seed: CountOrZero = 0
    """of corruptions, random starts and intervals"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("eps", "neighbours", "test_scales"):
            if not (values := getattr(self, name)):
                raise RecastError(f"{name} must be numbers, got none")
            object.__setattr__(self, name, tuple(dict.fromkeys(values)))
        for size in self.sizes or ():
            parse_size(size)


def parse_size(text: str, name: str = "each of sizes") -> tuple[int, int]:
    """(height, width) of "160" or "128x192"; RecastError with the option's name for anything else."""
    found = re.fullmatch(r"([0-9]{1,9})(?:[x×]([0-9]{1,9}))?", text.strip().lower())
    if not found or not int(found[1]) or (found[2] and not int(found[2])):
        raise RecastError(f"{name} takes pixels, 224 or 224x160 (height x width), got {shown(text)}")
    size = (int(found[1]), int(found[2] or found[1]))
    for side in size:
        check_value(Pixels, side, name)
    return size
