"""Suites `basic` and `corruptions`, and the mean corruption error."""

import random
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recast.lab.config import DataConfig
from recast.lab.data import Data, load_data
from recast.lab.evaluation import PixelModel
from recast.lab.evaluation.basic_corruptions import CORRUPTIONS, corrupt
from recast.lab.evaluation.imagenet_corruptions import (
    ALEXNET_ERRORS,
    KINDS,
    CorruptedImages,
    corrupt_bytes,
    mean_corruption_error,
)
from recast.lab.suites import SEVERITIES

Score = Callable[..., dict[str, Any]]
needs_package = pytest.mark.skipif(find_spec("imagecorruptions") is None, reason="needs imagecorruptions-imaug")

# Top-1 accuracy in percent (mean over the severities), CE and mCE of a public ResNet-50, as published in
# github.com/bethgelab/game-of-noise (Rusak et al. 2020, arXiv:2001.06057) at 0b73e72, Results/clean_results.txt, in the
# order of `KINDS`.
CLEAN = (
    (27.42, 81.88), (27.89, 80.62), (23.05, 83.41), (41.17, 71.75), (24.38, 91.53), (39.77, 76.64), (38.05, 77.60),
    (33.44, 76.79), (39.06, 73.72), (44.14, 68.18), (67.66, 57.29), (38.12, 72.52), (44.06, 86.58), (45.70, 75.64),
    (54.45, 75.10),
)  # fmt: skip
CLEAN_MCE = 76.62


def test_corruption_errors_are_the_published_ones() -> None:
    errors = {kind: np.array(100 - accuracy) for kind, (accuracy, _) in zip(KINDS, CLEAN, strict=True)}
    for kind, (_, expected) in zip(KINDS, CLEAN, strict=True):
        assert errors[kind] / ALEXNET_ERRORS[kind] == pytest.approx(expected, abs=0.015)
    assert mean_corruption_error(errors) == pytest.approx(CLEAN_MCE, abs=0.005)


def picture(height: int, width: int) -> np.ndarray:
    rows, columns = np.mgrid[:height, :width]
    shades = [np.sin(rows / 5) + np.cos(columns / 7), rows / height, columns / width]
    return np.stack([255 * (shade - shade.min()) / np.ptp(shade) for shade in shades], axis=-1).astype(np.uint8)


@needs_package
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_bytes_and_no_global_generator_moves(kind: str) -> None:
    image = picture(32, 48)
    np.random.seed(1)
    torch.manual_seed(1)
    before = repr(np.random.get_state()), repr(torch.get_rng_state()), random.getstate()
    first = corrupt_bytes(image, kind, 3, seed=2**62 + 5)
    assert before == (repr(np.random.get_state()), repr(torch.get_rng_state()), random.getstate())
    np.random.seed(2)
    torch.manual_seed(2)
    assert (first.dtype, first.shape) == (np.uint8, image.shape)
    assert (first == corrupt_bytes(image, kind, 3, seed=2**62 + 5)).all()
    assert not (first == image).all()
    is_random = kind not in ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression")
    assert (first == corrupt_bytes(image, kind, 3, seed=6)).all() == (not is_random)


@needs_package
def test_the_suite_of_imagenets_corruptions(score: Score) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10)).eval()
    small = load_data(DataConfig(num_train=10, num_val=2, img_size=32))
    found, other = score("corruptions", net, small, 2), score("corruptions", net, small, 1)
    single = [f"top1/{kind}/{severity}" for kind in KINDS for severity in SEVERITIES]
    assert list(found)[:75] == single
    assert all((values == other[metric]).all() for metric, values in found.items())
    expected = PixelModel(net, small.mean, small.std)(CorruptedImages(small.val, "frost", 5).batch([0, 1])[0])
    twice = CorruptedImages(small.val.subset(torch.tensor([1, 1])), "snow", 2).batch([0, 1])[0]
    assert not twice[0].equal(twice[1])  # every index has its own random numbers
    assert found["top1/frost/5"][:, 0].tolist() == (expected.argmax(1) == small.val.labels).float().tolist()


def make_images(height: int, width: int, count: int = 8) -> Tensor:
    """Coloured blobs with some texture, in [0, 1]."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 3, 4, 4, generator=generator)
    smooth = F.interpolate(coarse, size=(height, width), mode="bicubic")
    return (smooth + 0.2 * torch.rand(count, 3, height, width, generator=generator)).clamp(0, 1)


@pytest.mark.parametrize("kind", CORRUPTIONS)
@pytest.mark.parametrize("size", [(8, 8), (16, 12), (45, 64)])
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


def test_the_suite_of_basic_corruptions(
    trained: nn.Module, digits: Data, values: Callable[..., dict[str, float]]
) -> None:
    found = values(trained, "basic", digits)
    single = {metric: value for metric, value in found.items() if "mean" not in metric}
    assert set(single) == {f"top1/{kind}/{severity}" for kind in CORRUPTIONS for severity in SEVERITIES}
    assert found["top1/mean/5"] == pytest.approx(sum(single[f"top1/{kind}/5"] for kind in CORRUPTIONS) / 5)
    assert found["top1/mean"] == pytest.approx(sum(single.values()) / 25)
    assert found["top1/mean"] < values(trained, "clean", digits)["top1"]
