"""Options of the suites of an evaluation, as plain data."""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeVar

from annotated_types import MinLen
from pydantic import AfterValidator

from recast.config import Config, Count, CountOrZero, FilePath, NotNegative, Pixels, Positive, Rare, coerce, problem
from recast.errors import RecastError, shown

T = TypeVar("T")


def parse_size(text: str, name: str = "each of sizes") -> tuple[int, int]:
    """Return (height, width) of "160" or "128x192". Raises RecastError with the option's name for anything else."""
    match = re.fullmatch(r"([0-9]{1,9})(?:[x×]([0-9]{1,9}))?", text.strip().lower())
    if not match:
        raise RecastError(f"{name} takes pixels, 224 or 224x160 (height x width), got {shown(text)}")
    height, width = (coerce(Pixels, side, name) for side in (match[1], match[2] or match[1]))
    return height, width


def _size(text: str) -> str:
    try:
        parse_size(text)
    except RecastError:
        raise problem("must be pixels, 224 or 224x160 (height x width)") from None
    return text


def _once(values: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(values))


Size = Annotated[str, AfterValidator(_size)]


class Options(Config):
    """Options of the suites"""

    eps: Annotated[tuple[NotNegative, ...], MinLen(1), AfterValidator(_once)] = (1.0, 4.0)
    """Budgets ε of the attacks, in 1/255 of a [0, 1] pixel."""
    steps: Count = 5
    """Steps of PGD, each of size 2.5·ε/steps."""
    sizes: tuple[Size, ...] | None = None
    """Test sizes: 160 or 128x192 (height x width). None: sizes around the data's own."""
    neighbours: Annotated[tuple[Count, ...], MinLen(1), AfterValidator(_once)] = (1, 5, 10, 20)
    """Numbers of neighbours k of the suite knn."""
    labels: str | None = None
    """Labels of the suites knn and retrieval: fine or coarse, for Grafit. None: those of the training."""
    sets: FilePath | None = None
    """Folder that holds imagenet-c/, imagenet-a/ ... None: $RECAST_DATA."""
    test_mode: Literal["square", "whole"] = "square"
    """Segmentation: predict the central square of an image, or the whole image with its short side resized to it."""
    test_scales: Annotated[tuple[Positive, ...], MinLen(1), AfterValidator(_once), Rare()] = (1.0,)
    """Segmentation: average the predictions over these scales of the image."""
    test_flip: Annotated[bool, Rare()] = False
    """Segmentation: also average over the mirrored image."""
    num_images: Count | None = None
    """Measure on this many images of every data set, with its class shares. None: all."""
    seed: CountOrZero = 0
    """Random seed of corruptions and intervals."""
