"""Suite `imagenet-c`: the released ImageNet-C (Hendrycks & Dietterich 2019, arXiv:1903.12261), as it is.

15 corruptions at five severities, each with the 50,000 validation images as JPEG files of 224 x 224 pixels that are
neither resized nor cropped. mCE divides a model's errors by AlexNet's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image

from recast.data.datasets import ImageFiles
from recast.data.images import decode_errors, open_image
from recast.errors import RecastError
from recast.evaluation.bench import Bench, NotMeasured, Source
from recast.evaluation.corruptions import CATEGORIES, KINDS, SEVERITIES, means_over_corruptions
from recast.evaluation.imagenet_sets import (
    class_folders,
    find_set,
    image_names,
    imagenet_wnids,
    listed,
    outputs_of,
    sample,
)

ALEXNET_ERRORS = {
    "gaussian_noise": 0.886428,
    "shot_noise": 0.894468,
    "impulse_noise": 0.922640,
    "defocus_blur": 0.819880,
    "glass_blur": 0.826268,
    "motion_blur": 0.785948,
    "zoom_blur": 0.798360,
    "snow": 0.866816,
    "frost": 0.826572,
    "fog": 0.819324,
    "brightness": 0.564592,
    "contrast": 0.853204,
    "elastic_transform": 0.646056,
    "pixelate": 0.717840,
    "jpeg_compression": 0.606500,
}
"""Top-1 error of AlexNet, mean over the severities, as the authors published it (github.com/hendrycks/robustness)."""

WHERE = (
    "noise.tar, blur.tar, weather.tar and digital.tar of ImageNet-C, linked at github.com/hendrycks/robustness, "
    "together in one folder imagenet-c"
)

Number = TypeVar("Number", float, np.ndarray)


def mean_corruption_error(errors: Mapping[str, Number]) -> Number:
    """mCE = 1/15 Σ_c CE_c, CE_c = Σ_s E_{s,c} / Σ_s E^AlexNet_{s,c} (Hendrycks & Dietterich 2019, Sec. 4.1).

    errors: {corruption: mean error over the severities} of all 15; in percent the result is in percent. It is linear in
    the errors: arrays of errors per image give each image's share. Raises RecastError if a corruption is missing.
    """
    if missing := [kind for kind in ALEXNET_ERRORS if kind not in errors]:
        raise RecastError(f"mCE is a mean over 15 corruptions, missing: {', '.join(missing)}")
    ratios = [errors[kind] / alexnet for kind, alexnet in ALEXNET_ERRORS.items()]
    return sum(ratios[1:], ratios[0]) / len(ratios)


def means_with_mce(scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The means of `means_over_corruptions`, and mce."""
    errors = {
        kind: 1 - np.mean([scores[f"top1/{kind}/{severity}"] for severity in SEVERITIES], axis=0) for kind in KINDS
    }
    return means_over_corruptions(scores) | {"mce": mean_corruption_error(errors)}


@dataclass(frozen=True)
class ReadUnresized:
    """index → the RGB image ROOT/names[index]; RecastError if it cannot be read or has not side x side pixels."""

    root: Path
    names: list[str]
    """Relative; one list for all 75 folders."""
    side: int

    def __call__(self, index: int) -> Image.Image:
        image = open_image(self.root / self.names[index])
        if image.size != (self.side, self.side):
            raise RecastError(
                f"ImageNet-C is evaluated without resizing, all images must have {self.side}x{self.side} pixels, but "
                f"{self.root / self.names[index]} has {image.height}x{image.width}"
            )
        return image


def sources_imagenet_c(bench: Bench) -> list[Source]:
    """The 75 folders, KIND/SEVERITY or CATEGORY/KIND/SEVERITY; what is missing is listed in one NotMeasured."""
    wnids = sorted(imagenet_wnids())
    outputs = outputs_of(bench, wnids, "imagenet-c")
    root = find_set(bench, ("imagenet-c", "imagenet_c", "imagenetc"), WHERE)
    folders = _folders(root, wnids)
    first = folders[KINDS[0], SEVERITIES[0]]
    by_class = {wnid: image_names(first / wnid) for wnid in wnids}
    if empty := [wnid for wnid, names in by_class.items() if not names]:
        raise NotMeasured(f"{first} has class folders without an image: {listed(empty)}. Unpack its tar file again")
    names = [f"{wnid}/{name}" for wnid in wnids for name in by_class[wnid]]
    counts = torch.tensor([len(by_class[wnid]) for wnid in wnids])
    labels = outputs.repeat_interleave(counts)
    rows = sample(labels, bench.options.num_samples)
    items, side = rows.tolist(), _side(first / names[0])
    return [
        Source(
            f"{kind}/{severity}",
            ImageFiles(labels[rows], side, items, ReadUnresized(folder, names, side), f"imagenet-c {folder}"),
            "imagenet-c",
        )
        for (kind, severity), folder in folders.items()
    ]


def _folders(root: Path, wnids: list[str]) -> dict[tuple[str, int], Path]:
    folders, missing = {}, []
    for (category, kinds), severity in product(CATEGORIES.items(), SEVERITIES):
        for kind in kinds:
            places = [root / kind / str(severity), root / category / kind / str(severity)]
            folders[kind, severity] = next((place for place in places if place.is_dir()), places[0])
    for kind in KINDS:
        absent = [str(severity) for severity in SEVERITIES if not folders[kind, severity].is_dir()]
        if len(absent) == len(SEVERITIES):
            missing.append(kind)
        elif absent:
            missing.append(f"{kind} (severity {', '.join(absent)})")
    for (kind, severity), folder in folders.items():
        if folder.is_dir():
            lacking = sorted(set(wnids) - set(class_folders(folder)))
            missing += [f"{kind}/{severity} (classes {listed(lacking)})"] if lacking else []
    if missing:
        raise NotMeasured(f"{root} is not the whole ImageNet-C, missing: {'; '.join(missing)}. To get it: {WHERE}")
    return {(kind, severity): folders[kind, severity] for kind, severity in product(KINDS, SEVERITIES)}


def _side(path: Path) -> int:
    with decode_errors(str(path)), Image.open(path) as image:
        return max(image.size)
