import random
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recast.lab.config import DataConfig
from recast.lab.data import Data, load_data
from recast.lab.evaluation import PixelModel, imagenet_corruptions
from recast.lab.evaluation.basic_corruptions import CORRUPTIONS, corrupt
from recast.lab.evaluation.suites import SEVERITIES

KINDS = imagenet_corruptions.KINDS
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
        assert errors[kind] / imagenet_corruptions.ALEXNET_ERRORS[kind] == pytest.approx(expected, abs=0.015)
    assert imagenet_corruptions.mean_corruption_error(errors) == pytest.approx(CLEAN_MCE, abs=0.005)


def make_images(height: int, width: int, count: int = 8) -> Tensor:
    """Coloured blobs with some texture, in [0, 1]."""
    coarse = torch.rand(count, 3, 4, 4)
    smooth = F.interpolate(coarse, size=(height, width), mode="bicubic")
    return (smooth + 0.2 * torch.rand(count, 3, height, width)).clamp(0, 1)


@needs_package
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_bytes_and_no_global_generator_moves(kind: str) -> None:
    image = (255 * make_images(32, 48, 1)[0]).byte().permute(1, 2, 0).numpy()
    np.random.seed(1)
    torch.manual_seed(1)
    before = repr(np.random.get_state()), repr(torch.get_rng_state()), random.getstate()
    first = imagenet_corruptions.corrupt_bytes(image, kind, 3, seed=2**62 + 5)
    assert before == (repr(np.random.get_state()), repr(torch.get_rng_state()), random.getstate())
    np.random.seed(2)
    torch.manual_seed(2)
    assert (first.dtype, first.shape) == (np.uint8, image.shape)
    assert (first == imagenet_corruptions.corrupt_bytes(image, kind, 3, seed=2**62 + 5)).all()
    assert not (first == image).all()
    is_random = kind not in ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression")
    assert (first == imagenet_corruptions.corrupt_bytes(image, kind, 3, seed=6)).all() == (not is_random)


@needs_package
def test_the_suite_of_imagenets_corruptions(score: Any) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10)).eval()
    small = load_data(DataConfig(num_train=10, num_val=2, img_size=32))
    scores, one_by_one = score("corruptions", net, small, 2), score("corruptions", net, small, 1)
    assert list(scores)[:75] == [f"top1/{kind}/{severity}" for kind in KINDS for severity in SEVERITIES]
    assert all((values == one_by_one[metric]).all() for metric, values in scores.items())
    expected = PixelModel(net, small.mean, small.std)(
        imagenet_corruptions.CorruptedImages(small.val, "frost", 5).batch([0, 1])[0]
    )
    twice = imagenet_corruptions.CorruptedImages(small.val.subset(torch.tensor([1, 1])), "snow", 2).batch([0, 1])[0]
    assert not twice[0].equal(twice[1])  # every index has its own random numbers
    assert scores["top1/frost/5"][:, 0].tolist() == (expected.argmax(1) == small.val.labels).float().tolist()


@pytest.mark.parametrize("kind", CORRUPTIONS)
@pytest.mark.parametrize("size", [(8, 8), (16, 12), (45, 64)])
def test_severities_move_away_from_the_clean_image(kind: str, size: tuple[int, int]) -> None:
    images = make_images(*size, count=3)
    distances = [0.0, *((corrupt(images, kind, severity) - images).norm().item() for severity in SEVERITIES)]
    assert distances == sorted(set(distances))


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_pixels_follow_the_image_not_the_batch(kind: str) -> None:
    images = make_images(16, 16)
    corrupted = corrupt(images, kind, 3, first_index=100)
    parts = torch.cat([corrupt(images[:3], kind, 3, 100), corrupt(images[3:], kind, 3, 103)])
    torch.testing.assert_close(corrupted, parts, rtol=0, atol=1e-6)
    assert corrupted.shape == images.shape
    assert 0 <= corrupted.min() <= corrupted.max() <= 1
    if kind in ("gaussian_noise", "occlusion"):
        assert not corrupted.equal(corrupt(images, kind, 3, first_index=101))


def test_the_suite_of_basic_corruptions(trained: nn.Module, digits: Data, values: Any) -> None:
    top1 = values(trained, "basic", digits)
    single = {metric: value for metric, value in top1.items() if "mean" not in metric}
    assert set(single) == {f"top1/{kind}/{severity}" for kind in CORRUPTIONS for severity in SEVERITIES}
    assert top1["top1/mean/5"] == pytest.approx(sum(single[f"top1/{kind}/5"] for kind in CORRUPTIONS) / 5)
    assert top1["top1/mean"] == pytest.approx(sum(single.values()) / 25)
    assert top1["top1/mean"] < values(trained, "clean", digits)["top1"]
