from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from recast.lab.config import DataConfig
from recast.lab.data import Data, Loader, load_data
from recast.lab.evaluation import PixelModel
from recast.lab.evaluation.context import NotMeasured
from recast.lab.evaluation.imagenet_corruptions import (
    ALEXNET_ERRORS,
    KINDS,
    CorruptedImages,
    corrupt_bytes,
    mean_corruption_error,
    means_over_corruptions,
)
from recast.lab.suites import CATEGORIES, SEVERITIES

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


def test_means() -> None:
    scores = {
        f"top1/{kind}/{severity}": np.array([[float(severity == 1)], [float(kind in CATEGORIES["noise"])]])
        for kind in KINDS
        for severity in SEVERITIES
    }
    means = {metric: values[:, 0].tolist() for metric, values in means_over_corruptions(scores, True).items()}
    assert means["top1/mean"] == pytest.approx([1 / 5, 3 / 15])
    assert means["top1/noise"] == pytest.approx([1 / 5, 1])
    assert means["top1/digital"] == pytest.approx([1 / 5, 0])
    assert means["top1/mean/1"] == pytest.approx([1, 3 / 15])
    assert means["top1/mean/2"] == pytest.approx([0, 3 / 15])
    others = [kind not in CATEGORIES["noise"] for kind in KINDS]
    weights = np.array([1 / ALEXNET_ERRORS[kind] for kind in KINDS]) / 15
    assert means["mce"] == pytest.approx([4 / 5 * weights.sum(), weights[others].sum()])
    assert "mce" not in means_over_corruptions(scores)


@pytest.fixture(scope="module")
def digits32() -> Data:
    return load_data(DataConfig(num_train=50, num_val=6, img_size=32))


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
@pytest.mark.parametrize("kind", ["shot_noise", "glass_blur", "snow"])
def test_images_do_not_depend_on_their_batch(kind: str, digits32: Data) -> None:
    images = CorruptedImages(digits32.val, kind, 2)
    (whole, labels), backwards = images.batch(range(6)), images.batch(range(5, -1, -1))
    assert whole.equal(torch.cat([batch for batch, _ in Loader(images, 4, workers=1)]))
    assert all(one.flip(0).equal(other) for one, other in zip((whole, labels), backwards, strict=True))
    assert not whole.equal(CorruptedImages(digits32.val, kind, 2, seed=1).batch(range(6))[0])
    assert not whole[0].equal(digits32.val.batch([0])[0][0])
    assert 0 <= whole.min() <= whole.max() <= 1
    noisy = CorruptedImages(digits32.val.subset(torch.tensor([3, 3])), kind, 2).batch([0, 1])[0]
    assert not noisy[0].equal(noisy[1])  # every index has its own random numbers


@needs_package
def test_the_suite(digits32: Data, score: Score) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10)).eval()
    small = replace(digits32, val=digits32.val.subset(torch.arange(2)))
    found, other = score("corruptions", net, small, 2), score("corruptions", net, small, 1)
    single = [f"top1/{kind}/{severity}" for kind in KINDS for severity in SEVERITIES]
    assert list(found)[:75] == single
    assert all((values == other[metric]).all() for metric, values in found.items())
    expected = PixelModel(net, small.mean, small.std)(CorruptedImages(small.val, "frost", 5).batch([0, 1])[0])
    assert found["top1/frost/5"][:, 0].tolist() == (expected.argmax(1) == small.val.labels).float().tolist()


def test_bad_requests(digits: Data, digits32: Data, score: Score, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotMeasured, match="at least 32x32 pixels, digits has 16x16"):
        score("corruptions", nn.Identity(), digits)
    package: Any = None  # what makes an import fail
    monkeypatch.setitem(sys.modules, "imagecorruptions", package)
    with pytest.raises(NotMeasured, match="pip install imagecorruptions-imaug"):
        score("corruptions", nn.Identity(), digits32)


def test_an_image_s_seed_is_of_its_kind_and_index(digits: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def watched(image: np.ndarray, _kind: str, _severity: int, seed: int) -> np.ndarray:
        seeds.append(seed)
        return image

    monkeypatch.setattr("recast.lab.evaluation.imagenet_corruptions.corrupt_bytes", watched)
    for kind, severity, index in (("fog", 1, 0), ("fog", 2, 0), ("snow", 1, 0), ("fog", 1, 1)):
        CorruptedImages(digits.val, kind, severity).changed(index)
    assert seeds[0] == seeds[1], "severities share what is drawn"
    assert len(set(seeds)) == 3
