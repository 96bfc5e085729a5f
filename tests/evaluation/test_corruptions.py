from __future__ import annotations

import copy
import random
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from recast.data import Data, load_data, loader
from recast.errors import RecastError
from recast.evaluation.bench import Bench, NotMeasured, Options, PixelModel, Suite
from recast.evaluation.corruptions import (
    CATEGORIES,
    KINDS,
    SEVERITIES,
    CorruptedImages,
    corrupt_bytes,
    means_over_corruptions,
    score_part,
    sources_corruptions,
)
from recast.evaluation.measuring import score_suites
from recast.run.config import AugmentConfig, DataConfig

pytest.importorskip("imagecorruptions")


@pytest.fixture(scope="module")
def digits32() -> Data:
    return load_data(DataConfig(num_train=50, num_val=6, img_size=32))


def picture(height: int, width: int) -> np.ndarray:
    rows, columns = np.mgrid[:height, :width]
    shades = [np.sin(rows / 5) + np.cos(columns / 7), rows / height, columns / width]
    return np.stack([255 * (shade - shade.min()) / np.ptp(shade) for shade in shades], axis=-1).astype(np.uint8)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_bytes(kind: str) -> None:
    image = picture(32, 48)
    np.random.seed(1)
    torch.manual_seed(1)
    first = corrupt_bytes(image, kind, 3, seed=2**62 + 5)
    np.random.seed(2)
    torch.manual_seed(2)
    assert first.dtype == np.uint8
    assert first.shape == image.shape
    assert (first == corrupt_bytes(image, kind, 3, seed=2**62 + 5)).all()
    assert not (first == image).all()
    is_random = kind not in ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression")
    assert (first == corrupt_bytes(image, kind, 3, seed=6)).all() == (not is_random)


@pytest.mark.parametrize("kind", ["gaussian_noise", "impulse_noise", "glass_blur", "frost", "elastic_transform"])
def test_the_global_generators_are_not_moved(kind: str) -> None:
    before = copy.deepcopy(np.random.get_state()), torch.get_rng_state(), random.getstate()
    corrupt_bytes(picture(32, 32), kind, 1)
    after = np.random.get_state()
    assert (before[0][1] == after[1]).all()
    assert before[0][2:] == after[2:]
    assert before[1].equal(torch.get_rng_state())
    assert before[2] == random.getstate()


@pytest.mark.parametrize("size", [(32, 32), (33, 57), (64, 40)])
def test_any_size_of_at_least_32(size: tuple[int, int], capsys: pytest.CaptureFixture[str]) -> None:
    for kind in KINDS:
        for severity in (1, 5):
            assert corrupt_bytes(picture(*size), kind, severity).shape == (*size, 3)
    assert capsys.readouterr().out == ""


def test_images_do_not_depend_on_their_batch(digits32: Data) -> None:
    for kind in ("shot_noise", "glass_blur", "snow"):
        images = CorruptedImages(digits32.val, kind, 2)
        whole = images.batch(range(6))[0]
        assert whole.equal(torch.cat([images.batch([0, 1])[0], images.batch([2, 3, 4, 5])[0]]))
        backwards = images.batch([5, 4, 3, 2, 1, 0])
        assert whole.flip(0).equal(backwards[0])
        assert digits32.val.labels.flip(0).equal(backwards[1])
        assert whole[[1, 4]].equal(images.subset(torch.tensor([1, 4])).batch([0, 1])[0])
        assert whole[4:5].equal(images.subset(torch.tensor([1, 4])).subset(torch.tensor([1])).batch([0])[0])
        assert not whole.equal(CorruptedImages(digits32.val, kind, 2, seed=1).batch(range(6))[0])
        assert not whole[0].equal(digits32.val.batch([0])[0][0])
        assert whole.min() >= 0
        assert whole.max() <= 1
    same = digits32.val.subset(torch.tensor([3, 3]))
    noisy = CorruptedImages(same, "shot_noise", 2).batch([0, 1])[0]
    assert not noisy[0].equal(noisy[1])  # every index has its own random numbers


def test_loader_processes_give_the_same(digits32: Data) -> None:
    images = CorruptedImages(digits32.val, "impulse_noise", 4)
    alone, helped = ([batch for batch, _ in loader(images, 4, workers=workers)] for workers in (0, 1))
    assert all(mine.equal(theirs) for mine, theirs in zip(alone, helped, strict=True))


def test_severities_grow(digits32: Data) -> None:
    plain = digits32.val.batch(range(6))[0]
    for kind in ("gaussian_noise", "contrast", "brightness", "impulse_noise"):
        moved = [(CorruptedImages(digits32.val, kind, s).batch(range(6))[0] - plain).norm() for s in SEVERITIES]
        assert moved == sorted(moved)


def test_the_suite(digits32: Data) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10)).eval()
    models = {"m": PixelModel(net, digits32.mean, digits32.std)}
    small = replace(digits32, val=digits32.val.subset(torch.arange(2)))

    def scores(batch_size: int, seed: int = 0) -> dict[str, np.ndarray]:
        bench = Bench(models, small, batch_size, torch.device("cpu"), Options(seed=seed))
        suite = Suite(score_part, sources=sources_corruptions, derive=means_over_corruptions)
        found, missing = score_suites(bench, {"corruptions": suite})
        assert not missing
        assert found["corruptions"].dataset == "digits"
        return found["corruptions"].scores["m"]

    found = scores(2)
    single = [f"top1/{kind}/{severity}" for kind in KINDS for severity in SEVERITIES]
    assert list(found)[:75] == single
    assert set(found) - set(single) == {
        *(f"top1/{category}" for category in CATEGORIES),
        *(f"top1/mean/{severity}" for severity in SEVERITIES),
        "top1/mean",
    }
    assert all(values.shape == (2, 1) for values in found.values())
    other = scores(1)
    assert all((values == other[metric]).all() for metric, values in found.items())
    expected = (
        net(
            ((CorruptedImages(small.val, "frost", 5).batch([0, 1])[0]) - torch.tensor(small.mean)[:, None, None])
            / torch.tensor(small.std)[:, None, None]
        ).argmax(1)
        == small.val.labels
    )
    assert found["top1/frost/5"][:, 0].tolist() == expected.float().tolist()


def test_means() -> None:
    scores = {
        f"top1/{kind}/{severity}": np.array([[float(severity == 1)], [float(kind in CATEGORIES["noise"])]])
        for kind in KINDS
        for severity in SEVERITIES
    }
    means = means_over_corruptions(scores)
    assert means["top1/mean"][:, 0].tolist() == pytest.approx([1 / 5, 3 / 15])
    assert means["top1/noise"][:, 0].tolist() == pytest.approx([1 / 5, 1])
    assert means["top1/digital"][:, 0].tolist() == pytest.approx([1 / 5, 0])
    assert means["top1/mean/1"][:, 0].tolist() == pytest.approx([1, 3 / 15])
    assert means["top1/mean/2"][:, 0].tolist() == pytest.approx([0, 3 / 15])
    scores.pop("top1/fog/3")
    with pytest.raises(RecastError, match="75 corruptions is wanted, 1 are missing: top1/fog/3"):
        means_over_corruptions(scores)


def test_bad_requests(digits: Data, digits32: Data) -> None:
    with pytest.raises(RecastError, match=r"unknown corruption 'snowy'.*Did you mean snow"):
        corrupt_bytes(picture(32, 32), "snowy", 1)
    with pytest.raises(RecastError, match="severity must be 1, 2, 3, 4 or 5, got 0"):
        corrupt_bytes(picture(32, 32), "snow", 0)
    with pytest.raises(RecastError, match="at least 32x32 pixels, got 40x31"):
        corrupt_bytes(picture(40, 31), "snow", 1)
    with pytest.raises(RecastError, match=r"expected an image \(H, W, 3\) of uint8, got \(32, 32\)"):
        corrupt_bytes(picture(32, 32)[..., 0], "snow", 1)
    with pytest.raises(RecastError, match="not augmented"):
        CorruptedImages(digits32.val, "snow", 1).augmented(AugmentConfig())
    bench = Bench({}, digits, 4, torch.device("cpu"))
    with pytest.raises(NotMeasured, match="at least 32x32 pixels, digits has 16x16"):
        sources_corruptions(bench)


def test_without_the_package(digits32: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = None  # what makes an import fail
    monkeypatch.setitem(sys.modules, "imagecorruptions", package)
    with pytest.raises(NotMeasured, match=r'pip install "recast-vision\[eval\]"'):
        sources_corruptions(Bench({}, digits32, 4, torch.device("cpu")))
