"""Suite `corruptions`: the 15 corruptions of ImageNet-C at five severities, made on the fly from any images.

The code is the package `imagecorruptions-imaug` (Hendrycks & Dietterich 2019, arXiv:1903.12261; Michaelis et al. 2019,
arXiv:1907.07484). The released ImageNet-C was made with other library versions and stored as JPEG files: its numbers
are the suite `imagenet-c`, these are others. Below 224 pixels a corruption of the same name is stronger or weaker.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from recast.data.datasets import LabelledImages
from recast.data.seeding import mix_seed, restored
from recast.data.shards import ImageStream
from recast.errors import RecastError, suggest
from recast.evaluation.bench import Batch, Bench, NotMeasured, Score, Source, is_correct
from recast.run.config import AugmentConfig

CATEGORIES = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
}
KINDS = tuple(kind for kinds in CATEGORIES.values() for kind in kinds)
SEVERITIES = (1, 2, 3, 4, 5)

MIN_SIDE = 32
"""Smaller images are refused by the package."""


def corrupt_bytes(image: np.ndarray, kind: str, severity: int, seed: int = 0) -> np.ndarray:
    """The corrupted image (H, W, 3) uint8 of an image (H, W, 3) uint8; H, W ≥ 32.

    The same arguments give the same bytes; no global random generator is moved. The severities of a kind share their
    random numbers, as far as they draw as many. Raises RecastError for an unknown kind or severity and for a smaller
    image, NotMeasured without the package.
    """
    if kind not in KINDS:
        raise RecastError(f"unknown corruption {kind!r}: expected one of {', '.join(KINDS)}.{suggest(kind, KINDS)}")
    if severity not in SEVERITIES:
        raise RecastError(f"severity must be 1, 2, 3, 4 or 5, got {severity}")
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise RecastError(f"expected an image (H, W, 3) of uint8, got {image.shape} of {image.dtype}")
    if min(image.shape[:2]) < MIN_SIDE:
        height, width = image.shape[:2]
        raise RecastError(
            f"corruptions need images of at least {MIN_SIDE}x{MIN_SIDE} pixels, got {height}x{width}: use larger ones "
            "(--data.test_size), or the suite basic"
        )
    corrupt = _package()
    # Two corruptions draw from generators of their own, which np.random.seed does not reach.
    own: dict[str, Any] = {}
    if kind == "impulse_noise":
        own = {"seed": np.random.default_rng(seed)}
    elif kind == "glass_blur":
        own = {"seed": seed % 2**32}
    with restored() as seed_generators, contextlib.redirect_stdout(io.StringIO()):  # it prints what it works around
        seed_generators(seed)
        return corrupt(image, severity=severity, corruption_name=kind, **own)


def _package() -> Callable[..., np.ndarray]:
    try:
        from imagecorruptions import corrupt
    except ImportError as error:
        raise NotMeasured(
            f'corruptions come with imagecorruptions-imaug ({error}): pip install "recast-vision[eval]"'
        ) from None
    return corrupt


@dataclass(frozen=True, eq=False)
class CorruptedImages(LabelledImages):
    """Images with one corruption: the bytes of an image follow from (seed, kind, its index in `base`) alone."""

    base: LabelledImages
    kind: str
    severity: int
    seed: int = 0
    rows: Tensor | None = None
    """(N,) int64: the index in `base` of each image; None: all of them."""
    labels: Tensor = field(init=False)
    img_size: int = field(init=False)
    augment: AugmentConfig | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        rows = torch.arange(len(self.base)) if self.rows is None else self.rows
        for name, value in (("rows", rows), ("labels", self.base.labels[rows]), ("img_size", self.base.img_size)):
            object.__setattr__(self, name, value)

    @property
    def identity(self) -> str:
        """What tells these images apart from others of the same base."""
        return f"imagecorruptions {self.kind} {self.severity} {self.seed}"

    def _base_indices(self, indices: Sequence[int]) -> list[int]:
        assert self.rows is not None
        return self.rows[torch.as_tensor(indices, dtype=torch.long)].tolist()

    def batch(self, indices: Sequence[int], seeds: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        numbers = self._base_indices(indices)
        images, labels = self.base.batch(numbers)
        plain = (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
        corrupted = [
            corrupt_bytes(image, self.kind, self.severity, mix_seed("corruptions", self.seed, self.kind, number))
            for image, number in zip(plain, numbers, strict=True)
        ]
        stacked = torch.from_numpy(np.stack(corrupted)) if corrupted else torch.from_numpy(plain)
        return stacked.permute(0, 3, 1, 2).float().div_(255), labels

    def image_name(self, index: int) -> str:
        return self.base.image_name(self._base_indices([index])[0])

    def subset(self, indices: Tensor) -> Self:
        assert self.rows is not None
        return replace(self, rows=self.rows[indices])

    def augmented(self, augment: AugmentConfig | None) -> Self:
        if augment is not None:
            raise RecastError("corrupted images are not augmented")
        return self


def sources_corruptions(bench: Bench) -> list[Source]:
    """The validation images, corrupted in 15 ways at five severities."""
    images, size = bench.data.val, bench.data.test_size
    if isinstance(images, ImageStream):
        raise NotMeasured(
            f"corruptions follow from an image's index, which the shards of {bench.data.name} do not have: use an "
            "image folder, a zip or hfds/NAME, or the suite basic"
        )
    if size < MIN_SIDE:
        raise NotMeasured(
            f"corruptions need images of at least {MIN_SIDE}x{MIN_SIDE} pixels, {bench.data.name} has {size}x{size}: "
            "set data.test_size, or use the suite basic"
        )
    _package()
    return [
        Source(f"{kind}/{severity}", CorruptedImages(images, kind, severity, bench.options.seed), bench.data.name)
        for kind, severity in product(KINDS, SEVERITIES)
    ]


def score_part(bench: Bench, batch: Batch) -> Iterator[Score]:
    """top1/PART: top1/gaussian_noise/1 and so on."""
    for name in bench.models:
        yield Score(name, f"top1/{batch.source.part}", is_correct(batch.logits(name), batch.labels))


def means_over_corruptions(scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """top1/CATEGORY (noise, blur, weather, digital), top1/mean/SEVERITY and top1/mean from top1/KIND/SEVERITY.

    T-CNN (d'Ascoli et al. 2021, Fig. 3) shows these means of accuracies; they are no mCE. Raises RecastError if one of
    the 75 is missing.
    """
    wanted = {(kind, severity): f"top1/{kind}/{severity}" for kind, severity in product(KINDS, SEVERITIES)}
    if missing := [metric for metric in wanted.values() if metric not in scores]:
        raise RecastError(
            f"a mean over {len(wanted)} corruptions is wanted, {len(missing)} are missing: {missing[0]} ..."
        )
    by_kind = {kind: _mean(scores[wanted[kind, severity]] for severity in SEVERITIES) for kind in KINDS}
    means = {f"top1/{category}": _mean(by_kind[kind] for kind in kinds) for category, kinds in CATEGORIES.items()}
    means |= {
        f"top1/mean/{severity}": _mean(scores[wanted[kind, severity]] for kind in KINDS) for severity in SEVERITIES
    }
    return means | {"top1/mean": _mean(by_kind.values())}


def _mean(arrays: Any) -> np.ndarray:
    return np.mean(list(arrays), axis=0)
