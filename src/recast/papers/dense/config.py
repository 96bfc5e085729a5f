"""Settings of the tasks on whole scenes: a class for every pixel, and boxes and masks of objects. Imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator

from recast.config import Rare, Ratio
from recast.lab.config.inputs import ordered
from recast.lab.config.tasks import TaskConfig
from recast.lab.config.types import BelowOne, Probability


class _Dense(TaskConfig):
    """Settings of tasks on whole scenes."""

    unused: ClassVar[tuple[str, ...]] = ("pool.kind",)
    resize: Annotated[tuple[Ratio, Ratio], AfterValidator(ordered), Rare()] = (0.5, 2.0)
    """Range of the random resize before a random crop of S x S. 1: the short side to S, in detection the long side."""


class SegmentConfig(_Dense):
    """One class for each pixel."""

    data_sets: ClassVar[tuple[str, ...]] = ("scenes", "masks")
    kind: Literal["segment"] = "segment"
    erasing: Probability = 0.0
    """Probability of random erasing (one box of noise, timm's mode pixel)."""
    label_smoothing: BelowOne = 0.0
    """Label smoothing: share of the target spread over all classes."""


class DetectConfig(_Dense):
    """Boxes and masks of objects."""

    data_sets: ClassVar[tuple[str, ...]] = ("scene_objects", "coco")
    kind: Literal["detect"] = "detect"
