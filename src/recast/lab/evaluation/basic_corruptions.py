"""Suite `basic`: five corruptions at five severities, for images of any size from 8 x 8 on.

Random numbers are seeded by the index of an image: all models, batch sizes and severities share them, and severities
differ by their strength alone. Not comparable with ImageNet-C.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from recast.lab.data.seeding import draw_by_index
from recast.lab.evaluation.context import Batch, Score
from recast.lab.evaluation.evaluators import evaluates
from recast.lab.evaluation.suites import SEVERITIES


def corrupt(images: Tensor, kind: str, severity: int, first_index: int = 0) -> Tensor:
    """Return corrupted pixels (B, C, H, W) in [0, 1]; image i of the batch is image `first_index` + i of the data."""
    # On the CPU: the same pixels on every device, and MPS has no uneven adaptive pooling.
    change, strengths = CORRUPTIONS[kind]
    indices = range(first_index, first_index + len(images))
    return change(images.cpu(), strengths[severity - 1], indices).clamp(0, 1).to(images.device)


def _gaussian_noise(images: Tensor, strength: float, indices: range) -> Tensor:
    """Add σ·z, σ ∝ √side: 0.08 to 0.38 at 224 (as in ImageNet-C), 0.03 to 0.14 at 32, where less averages out."""
    sigma = strength * math.sqrt(min(images.shape[-2:]) / 224)
    return images + sigma * draw_by_index(torch.randn, images.shape[1:], indices, "gaussian_noise")


def _gaussian_blur(images: Tensor, strength: float, indices: range) -> Tensor:
    """Blur by a Gaussian of σ ∝ √side pixels: 1.8 to 6 at 224 (about ImageNet-C), 0.7 to 2.3 at 32."""
    sigma = strength * math.sqrt(min(images.shape[-2:]))
    radius = math.ceil(3 * sigma)
    weights = torch.exp(-(torch.arange(-radius, radius + 1) ** 2) / (2 * sigma**2))
    weights = weights / weights.sum()
    channels = images.shape[1]
    padded = F.pad(images, [radius] * 4, mode="replicate")
    rows = F.conv2d(padded, weights.view(1, 1, -1, 1).expand(channels, 1, -1, 1), groups=channels)
    return F.conv2d(rows, weights.view(1, 1, 1, -1).expand(channels, 1, 1, -1), groups=channels)


def _contrast(images: Tensor, strength: float, indices: range) -> Tensor:
    """Return m + c·(x - m), m the mean of each channel; c from 0.75 to 0.2, milder than ImageNet-C (0.4 to 0.05)."""
    mean = images.mean(dim=(-2, -1), keepdim=True)
    return mean + strength * (images - mean)


def _pixelate(images: Tensor, strength: float, indices: range) -> Tensor:
    """Return P_H X P_W: each pixel becomes the mean of its cell of a coarser grid; cells are unions of milder cells."""
    height, width = images.shape[-2:]
    return cell_means(height, round(height * strength)) @ images @ cell_means(width, round(width * strength))


def cell_means(side: int, cells: int) -> Tensor:
    """Return the symmetric projection P (side, side) that replaces a value by the mean of its cell.

    Borders of cells are the first numbers of a van der Corput sequence (1/2, 1/4, 3/4, 1/8, ...): nearly even for any
    number of cells, even for powers of two, and nested, so that the distance to the image grows with the severity.
    """
    bits = side.bit_length()
    sequence = (side * int(f"{number:0{bits}b}"[::-1], 2) >> bits for number in range(2**bits))
    borders = list(dict.fromkeys(sequence))[1 : min(cells, side)]  # the first one is 0
    cell = torch.bucketize(torch.arange(side), torch.tensor(sorted(borders)), right=True)
    same = (cell[:, None] == cell[None, :]).float()
    return same / same.sum(dim=1)


def _occlusion(images: Tensor, strength: float, indices: range) -> Tensor:
    """Cover a share of each side by a grey rectangle, which lies inside that of the next severity."""
    sizes = [round(strength * side) for side in images.shape[-2:]]
    place = draw_by_index(torch.rand, (2,), indices, "occlusion")
    inside = []
    for size, side, position in zip(sizes, images.shape[-2:], place.unbind(1), strict=True):
        begin = (position * (side - size)).floor()[:, None]
        pixel = torch.arange(side)
        inside.append((pixel >= begin) & (pixel < begin + size))
    covered = inside[0][:, :, None] & inside[1][:, None, :]  # (B, H, W)
    return images.masked_fill(covered[:, None], 0.5)


CORRUPTIONS: dict[str, tuple[Callable[[Tensor, float, range], Tensor], tuple[float, ...]]] = {
    "gaussian_noise": (_gaussian_noise, (0.08, 0.12, 0.18, 0.26, 0.38)),
    "gaussian_blur": (_gaussian_blur, (0.12, 0.17, 0.22, 0.30, 0.40)),
    "contrast": (_contrast, (0.75, 0.6, 0.45, 0.3, 0.2)),
    "pixelate": (_pixelate, (0.8, 0.65, 0.5, 0.35, 0.25)),
    "occlusion": (_occlusion, (0.125, 0.25, 0.375, 0.5, 0.625)),
}
"""Function of (images, strength, indices), and its strengths by severity."""


def mean_over_corruptions(scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return top1/mean over all kinds and severities, and top1/mean/SEVERITY over the kinds."""
    means = {
        f"top1/mean/{s}": np.mean([values for metric, values in scores.items() if metric.endswith(f"/{s}")], axis=0)
        for s in SEVERITIES
    }
    return {**means, "top1/mean": np.mean(list(scores.values()), axis=0)}


@evaluates("basic", derive=mean_over_corruptions)
def score_basic(batch: Batch) -> Iterator[Score]:
    """Score top1/KIND/SEVERITY."""
    for kind in CORRUPTIONS:
        for severity in SEVERITIES:
            yield from batch.top1(f"top1/{kind}/{severity}", corrupt(batch.images, kind, severity, batch.first))
