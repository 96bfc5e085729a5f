"""The 15 corruptions of ImageNet-C: suite `corruptions`, which computes them, and means shared with `imagenet-c`.

The code is the package `imagecorruptions-imaug` (Hendrycks & Dietterich 2019, arXiv:1903.12261; Michaelis et al. 2019,
arXiv:1907.07484). The released ImageNet-C, suite `imagenet-c`, was made with other library versions and stored as JPEG
files: its numbers differ. Below 224 pixels corruptions of the same name are stronger or weaker.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recast.lab.data.seeding import mix_seed, seeded
from recast.lab.evaluation.accuracy import score_part
from recast.lab.evaluation.basic_corruptions import mean_over_corruptions
from recast.lab.evaluation.context import Context, NotMeasured, Source
from recast.lab.evaluation.derived_images import DerivedImages
from recast.lab.evaluation.evaluators import evaluates
from recast.lab.evaluation.suites import CATEGORIES, SEVERITIES
from recast.lab.plugins import optional_package

KINDS = tuple(kind for kinds in CATEGORIES.values() for kind in kinds)
MIN_SIDE = 32
"""Smallest side that the package supports."""
ALEXNET_ERRORS = {
    "gaussian_noise": 0.886428, "shot_noise": 0.894468, "impulse_noise": 0.922640, "defocus_blur": 0.819880,
    "glass_blur": 0.826268, "motion_blur": 0.785948, "zoom_blur": 0.798360, "snow": 0.866816, "frost": 0.826572,
    "fog": 0.819324, "brightness": 0.564592, "contrast": 0.853204, "elastic_transform": 0.646056,
    "pixelate": 0.717840, "jpeg_compression": 0.606500,
}  # fmt: skip
"""Top-1 error of AlexNet, mean over severities, published by the authors (github.com/hendrycks/robustness)."""


def corrupt_bytes(image: np.ndarray, kind: str, severity: int, seed: int) -> np.ndarray:
    """Corrupt an image (H, W, 3) uint8; H, W ≥ 32.

    The same arguments give the same bytes; global random generators are restored. The severities of a kind share their
    random numbers, as far as they draw as many. Raises NotMeasured without the package.
    """
    corrupt = _package()
    # np.random.seed does not reach the generators of these two
    seeds: dict[str, dict[str, Any]] = {
        "impulse_noise": {"seed": np.random.default_rng(seed)},
        "glass_blur": {"seed": seed % 2**32},
    }
    with seeded(seed), contextlib.redirect_stdout(io.StringIO()):  # it prints warnings
        corrupted: np.ndarray = corrupt(image, severity=severity, corruption_name=kind, **seeds.get(kind, {}))
    return corrupted


def _package() -> Any:
    package = "imagecorruptions-imaug"
    return optional_package("imagecorruptions", package, f"corruptions requires {package}", NotMeasured).corrupt


@dataclass(eq=False)
class CorruptedImages(DerivedImages):
    """Images with one corruption; the bytes of an image depend on (seed, kind, index in `base`) alone."""

    kind: str
    severity: int
    seed: int = 0

    def changed(self, index: int) -> Tensor:
        plain = (self.base.batch([index])[0][0] * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        seed = mix_seed("corruptions", self.seed, self.kind, index)
        return torch.tensor(corrupt_bytes(plain, self.kind, self.severity, seed)).permute(2, 0, 1)


def sources_corruptions(context: Context) -> list[Source]:
    """Return the validation images with 15 corruptions at five severities."""
    data = context.data
    if data.test_size < MIN_SIDE:
        raise NotMeasured(
            f"corruptions requires images of at least {MIN_SIDE}x{MIN_SIDE} pixels, {data.name} has "
            f"{data.test_size}x{data.test_size}: set data.test_size, or use the suite basic"
        )
    _package()
    return [
        Source(CorruptedImages(data.val, kind, severity, context.options.seed), f"{kind}/{severity}")
        for kind, severity in product(KINDS, SEVERITIES)
    ]


def means_over_corruptions(scores: Mapping[str, np.ndarray], with_mce: bool = False) -> dict[str, np.ndarray]:
    """Return top1/CATEGORY (noise, blur, weather, digital), top1/mean/SEVERITY, top1/mean and mce.

    scores: top1/KIND/SEVERITY. T-CNN (d'Ascoli et al. 2021, Fig. 3) shows these means of accuracies, not the mCE.
    """
    by_kind = {kind: np.mean([scores[f"top1/{kind}/{s}"] for s in SEVERITIES], axis=0) for kind in KINDS}
    means = {f"top1/{name}": np.mean([by_kind[kind] for kind in kinds], axis=0) for name, kinds in CATEGORIES.items()}
    means |= mean_over_corruptions(scores)
    if with_mce:
        means["mce"] = mean_corruption_error({kind: 1 - mean for kind, mean in by_kind.items()})
    return means


def mean_corruption_error(errors: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return mCE = 1/15 Σ_c CE_c, CE_c = Σ_s E_{s,c} / Σ_s E^AlexNet_{s,c} (Hendrycks & Dietterich 2019, Sec. 4.1).

    errors: {corruption: mean error over the severities} of all 15; the result has the same unit. It is linear in the
    errors: arrays of errors per image give the share of each image.
    """
    return np.mean([errors[kind] / alexnet for kind, alexnet in ALEXNET_ERRORS.items()], axis=0)


evaluates("corruptions", sources=sources_corruptions, derive=means_over_corruptions, uses=("seed",))(score_part)
