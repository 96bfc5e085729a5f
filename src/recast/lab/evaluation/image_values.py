"""What each image contributes to the values of a run (RUN/scores/images.npz), and means of runs with intervals."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recast.errors import first_line
from recast.files import replaced
from recast.lab.evaluation.intervals import PERCENT, POINTS, Interval, interval
from recast.reading import check_archive

Key = tuple[str, str, str]
"""Suite, metric and model."""


@dataclass(frozen=True)
class ImageValues:
    """Numbers (n,) whose mean is a value: one per image, or one per group of images."""

    values: np.ndarray
    is_percentage: bool
    """True if each is the percentage of an image, from 0 to 100."""


def write_images(path: Path, images: Mapping[Key, ImageValues], suites: Collection[str]) -> None:
    """Replace the values of these suites in the file of a run."""
    lines = {key: each for key, each in read_images(path).items() if key[0] not in suites}
    lines |= {key: each for key, each in images.items() if key[0] in suites}
    arrays = {str(place): each.values.astype(np.float32) for place, each in enumerate(lines.values())}
    path.parent.mkdir(exist_ok=True)
    with replaced(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(
            file,
            keys=np.array(list(lines), dtype=str).reshape(-1, 3),
            are_percentages=np.array([each.is_percentage for each in lines.values()], dtype=bool),
            **arrays,  # type: ignore[arg-type]
        )


def read_images(path: Path) -> dict[Key, ImageValues]:
    """Return the values in the file of a run; empty if it is missing, and with a warning if it is damaged."""
    if not path.is_file():
        return {}
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            check_archive(stored.zip)
            lines = enumerate(zip(stored["keys"].tolist(), stored["are_percentages"].tolist(), strict=True))
            return {tuple(key): ImageValues(stored[str(place)].astype(float), bool(is_)) for place, (key, is_) in lines}
    except Exception as error:  # a damaged file can raise anything
        warnings.warn(f"{path} is damaged ({first_line(error)}); recast evaluate writes it again", stacklevel=2)
        return {}


def over_seeds(ours: Sequence[ImageValues], theirs: Sequence[ImageValues] | None = None) -> Interval | None:
    """Return the mean over runs with its interval over seeds and images; None for runs of different images.

    theirs: of another model of the same runs, which is subtracted.
    """
    every = [*ours, *(theirs or ())]
    if len({each.values.shape for each in every}) != 1:
        return None
    values = np.stack([each.values for each in ours])
    ends = None
    if all(each.is_percentage for each in every):
        ends = POINTS if theirs else PERCENT
    return interval(values - np.stack([each.values for each in theirs]) if theirs else values, ends)
