from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recast.lab.data import Data
from recast.lab.evaluation.basic_corruptions import CORRUPTIONS, _random, cell_means, corrupt
from recast.lab.suites import SEVERITIES


def make_images(height: int, width: int, count: int = 8) -> Tensor:
    """Coloured blobs with some texture, in [0, 1]."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 3, 4, 4, generator=generator)
    smooth = F.interpolate(coarse, size=(height, width), mode="bicubic")
    return (smooth + 0.2 * torch.rand(count, 3, height, width, generator=generator)).clamp(0, 1)


@pytest.mark.parametrize("kind", CORRUPTIONS)
@pytest.mark.parametrize("size", [(8, 8), (16, 12), (45, 64), (224, 224)])
def test_severities_move_away_from_the_clean_image(kind: str, size: tuple[int, int]) -> None:
    images = make_images(*size, count=3)
    distances = [0.0, *((corrupt(images, kind, severity) - images).norm().item() for severity in SEVERITIES)]
    assert distances == sorted(set(distances))


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_pixels_follow_the_image_not_the_batch(kind: str) -> None:
    images = make_images(16, 16)
    whole = corrupt(images, kind, 3, first_index=100)
    parts = torch.cat([corrupt(images[:3], kind, 3, 100), corrupt(images[3:], kind, 3, 103)])
    torch.testing.assert_close(whole, parts, rtol=0, atol=1e-6)
    assert whole.shape == images.shape
    assert 0 <= whole.min() <= whole.max() <= 1
    if kind in ("gaussian_noise", "occlusion"):
        assert not whole.equal(corrupt(images, kind, 3, first_index=101))


def test_no_two_kinds_share_their_random_numbers() -> None:
    one, other = (_random(torch.rand, (3,), kind, range(2)) for kind in ("gaussian_noise", "occlusion"))
    assert not one.equal(other)


def test_occlusions_are_nested_squares() -> None:
    images = torch.zeros(8, 3, 32, 32)
    covered = [corrupt(images, "occlusion", severity) == 0.5 for severity in SEVERITIES]
    assert [int(mask[0, 0].sum()) for mask in covered] == [16, 64, 144, 256, 400]
    for smaller, larger in pairwise(covered):
        assert (smaller <= larger).all()


def test_blur_and_pixelation_keep_the_mean_of_smooth_images_and_contrast_of_all() -> None:
    images = make_images(32, 32)
    assert corrupt(images, "pixelate", 5).mean().item() == pytest.approx(images.mean().item(), abs=5e-3)
    assert corrupt(images, "contrast", 5).mean((2, 3)).allclose(images.mean((2, 3)), atol=1e-5)
    flat = torch.full((1, 3, 32, 32), 0.3)
    for kind in ("gaussian_blur", "pixelate", "contrast"):
        torch.testing.assert_close(corrupt(flat, kind, 5), flat)


@pytest.mark.parametrize("side", [2, 7, 32, 45])
def test_cells_are_nested_and_nearly_even(side: int) -> None:
    milder = torch.eye(side)
    for cells in range(side, 0, -1):
        means = cell_means(side, cells)
        torch.testing.assert_close(means @ means, means)
        torch.testing.assert_close(means @ milder, means)  # averaging the milder averages: cells are unions
        assert means.unique(dim=0).shape[0] == cells
        assert 1 / means.diagonal().min() < 2 * side / cells + 1  # no cell is twice the average
        milder = means
    image = torch.arange(8.0).div(8).expand(1, 3, 8, 8)
    assert corrupt(image, "pixelate", 5)[0, 0, 0].tolist() == [0.1875] * 4 + [0.6875] * 4


def test_rows(trained: nn.Module, digits: Data, values: Callable[..., dict[str, float]]) -> None:
    found = values(trained, "basic", digits)
    single = {metric: value for metric, value in found.items() if "mean" not in metric}
    assert set(single) == {f"top1/{kind}/{severity}" for kind in CORRUPTIONS for severity in SEVERITIES}
    assert found["top1/mean/5"] == pytest.approx(sum(single[f"top1/{kind}/5"] for kind in CORRUPTIONS) / 5)
    assert found["top1/mean"] == pytest.approx(sum(single.values()) / 25)
    assert found["top1/mean"] < values(trained, "clean", digits)["top1"]
