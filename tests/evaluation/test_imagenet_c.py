from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from recast.data import Data
from recast.errors import RecastError
from recast.evaluation.bench import Bench, NotMeasured, Options, PixelModel, Suite
from recast.evaluation.corruptions import CATEGORIES, KINDS, SEVERITIES, score_part
from recast.evaluation.imagenet_c import (
    ALEXNET_ERRORS,
    mean_corruption_error,
    means_with_mce,
    sources_imagenet_c,
)
from recast.evaluation.measuring import score_suites

WNIDS = [f"n{number:08d}" for number in (5, 7, 9)]

# Top-1 accuracy in percent (mean over the severities), CE and mCE of two public ResNet-50, as published in
# github.com/bethgelab/game-of-noise (Rusak et al. 2020, arXiv:2001.06057) at 0b73e72, Results/clean_results.txt (with
# its mCE) and Results/ANT_results.txt (with its CEs only).
CLEAN = {
    "brightness": (67.66, 57.29),
    "contrast": (38.12, 72.52),
    "defocus_blur": (41.17, 71.75),
    "elastic_transform": (44.06, 86.58),
    "fog": (44.14, 68.18),
    "frost": (39.06, 73.72),
    "gaussian_noise": (27.42, 81.88),
    "glass_blur": (24.38, 91.53),
    "impulse_noise": (23.05, 83.41),
    "jpeg_compression": (54.45, 75.10),
    "motion_blur": (39.77, 76.64),
    "pixelate": (45.70, 75.64),
    "shot_noise": (27.89, 80.62),
    "snow": (33.44, 76.79),
    "zoom_blur": (38.05, 77.60),
}
CLEAN_MCE = 76.62
ANT = {
    "brightness": (69.30, 54.38),
    "contrast": (40.31, 69.96),
    "defocus_blur": (47.50, 64.03),
    "elastic_transform": (49.30, 78.48),
    "fog": (42.97, 69.61),
    "frost": (46.95, 64.18),
    "gaussian_noise": (65.47, 38.96),
    "glass_blur": (38.98, 73.84),
    "impulse_noise": (65.08, 37.85),
    "jpeg_compression": (62.11, 62.47),
    "motion_blur": (42.34, 73.36),
    "pixelate": (56.48, 60.62),
    "shot_noise": (66.80, 37.12),
    "snow": (35.86, 74.00),
    "zoom_blur": (38.98, 76.43),
}


@pytest.mark.parametrize("published", [CLEAN, ANT])
def test_corruption_errors_are_the_published_ones(published: dict[str, tuple[float, float]]) -> None:
    assert set(published) == set(KINDS) == set(ALEXNET_ERRORS)
    for kind, (accuracy, expected) in published.items():
        assert (100 - accuracy) / ALEXNET_ERRORS[kind] == pytest.approx(expected, abs=0.015)
    expected_mce = np.mean([ce for _, ce in published.values()])
    found = mean_corruption_error({kind: 100 - accuracy for kind, (accuracy, _) in published.items()})
    assert found == pytest.approx(expected_mce, abs=0.01)


def test_mce_is_the_published_one() -> None:
    found = mean_corruption_error({kind: 100 - accuracy for kind, (accuracy, _) in CLEAN.items()})
    assert found == pytest.approx(CLEAN_MCE, abs=0.005)
    with pytest.raises(RecastError, match="missing: snow, fog"):
        mean_corruption_error({kind: 1.0 for kind in KINDS if kind not in ("snow", "fog")})
    assert mean_corruption_error(ALEXNET_ERRORS) == pytest.approx(1)


def test_mce_of_scores_per_image() -> None:
    generator = np.random.default_rng(0)
    scores = {
        f"top1/{kind}/{severity}": generator.integers(0, 2, (40, 1)).astype(np.float32)
        for kind in KINDS
        for severity in SEVERITIES
    }
    mce = means_with_mce(scores)["mce"]
    assert mce.shape == (40, 1)
    errors = {
        kind: 1 - np.mean([scores[f"top1/{kind}/{severity}"].mean() for severity in SEVERITIES]) for kind in KINDS
    }
    assert mce.mean() == pytest.approx(float(mean_corruption_error(errors)))
    assert "top1/mean" in means_with_mce(scores)


def make_set(root: Path, by_category: bool, side: int = 20) -> Path:
    """Every image has the shade 10·class + severity, so that an honest model can tell them apart."""
    root.mkdir(parents=True)
    for category, kinds in CATEGORIES.items():
        for kind in kinds:
            for severity in SEVERITIES:
                folder = root / category / kind / str(severity) if by_category else root / kind / str(severity)
                for label, wnid in enumerate(WNIDS):
                    (folder / wnid).mkdir(parents=True)
                    for number in range(2):
                        shade = 80 * label + severity + 40 * number
                        Image.new("RGB", (side, side), (shade,) * 3).save(folder / wnid / f"val_{label}{number}.png")
    return root


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    make_set(folder / "ImageNet-C", by_category=False)
    make_set(folder / "tars" / "imagenet-c", by_category=True)
    return folder


@pytest.fixture
def data(digits: Data, monkeypatch: pytest.MonkeyPatch) -> Data:
    """A data set with the set's classes in another order."""
    monkeypatch.setattr("recast.evaluation.imagenet_c.imagenet_wnids", lambda: tuple(WNIDS))
    return replace(digits, classes=[WNIDS[1], WNIDS[2], WNIDS[0]], mean=(0.0,) * 3, std=(1.0,) * 3)


class Shades(nn.Module):
    """Knows the shades of the classes, except that class 2 is never told."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[2:] == (20, 20)
        shade = 255 * x[:, 0, 0, 0]
        label = (shade / 80).floor().clamp(max=1).long()
        return nn.functional.one_hot(torch.tensor([2, 0, 1])[label], 3).float()


def make_bench(data: Data, sets: Path, **options: int) -> Bench:
    models = {"m": PixelModel(Shades(), data.mean, data.std)}
    return Bench(models, data, 4, torch.device("cpu"), Options(sets=sets, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("folder", [".", "tars"])
def test_both_layouts_unresized_and_by_name(folder: str, sets: Path, data: Data) -> None:
    bench = make_bench(data, sets / folder)
    suite = Suite(score_part, sources=sources_imagenet_c, derive=means_with_mce)
    found, missing = score_suites(bench, {"imagenet-c": suite})
    assert not missing
    scores = found["imagenet-c"].scores["m"]
    assert found["imagenet-c"].dataset == "imagenet-c"
    assert scores["top1/frost/2"].mean() == pytest.approx(4 / 6)
    assert scores["top1/mean"].mean() == pytest.approx(4 / 6)
    assert scores["top1/blur"][:, 0].tolist() == [1, 1, 1, 1, 0, 0]
    expected = np.mean([(1 / 3) / error for error in ALEXNET_ERRORS.values()])
    assert scores["mce"].mean() == pytest.approx(expected)


def test_the_images_are_those_of_their_folder(sets: Path, data: Data) -> None:
    sources = sources_imagenet_c(make_bench(data, sets))
    assert [source.part for source in sources][:6] == [*(f"gaussian_noise/{s}" for s in SEVERITIES), "shot_noise/1"]
    for source in sources:
        images, labels = source.images.batch([0, 3, 4])
        severity = int(source.part[-1])
        assert (255 * images[:, 0, 5, 5]).round().tolist() == [severity, 120 + severity, 160 + severity]
        assert labels.tolist() == [2, 0, 1]  # outputs of the model
    assert [source.part for source in sources] == [f"{kind}/{severity}" for kind in KINDS for severity in SEVERITIES]


def test_a_part_of_the_set(sets: Path, data: Data) -> None:
    sources = sources_imagenet_c(make_bench(data, sets, num_samples=3))
    assert [len(source.images) for source in sources] == [3] * 75
    assert sources[0].images.labels.sort().values.tolist() == [0, 1, 2]
    names = [source.images.image_name(0).split()[-1] for source in sources]
    assert len(set(names)) == 1  # the same images of every corruption


def test_everything_that_is_missing_is_in_one_error(tmp_path: Path, data: Data) -> None:
    root = make_set(tmp_path / "imagenet-c", by_category=False)
    for folder in (root / "snow").iterdir():
        folder.rename(tmp_path / f"snow{folder.name}")
    for severity in ("2", "4"):
        (root / "fog" / severity).rename(tmp_path / f"fog{severity}")
    (root / "pixelate" / "5" / WNIDS[2]).rename(tmp_path / "class")
    with pytest.raises(NotMeasured) as raised:
        sources_imagenet_c(make_bench(data, tmp_path))
    message = str(raised.value)
    assert f"missing: snow; fog (severity 2, 4); pixelate/5 (classes {WNIDS[2]})" in message
    assert "digital.tar" in message
    assert "\n" not in message


def test_bad_images(tmp_path: Path, data: Data) -> None:
    root = make_set(tmp_path / "imagenet-c", by_category=False)
    wrong = root / "fog" / "3" / WNIDS[0] / "val_00.png"
    Image.new("RGB", (20, 24)).save(wrong)
    sources = {source.part: source for source in sources_imagenet_c(make_bench(data, tmp_path))}
    with pytest.raises(
        RecastError, match=r"without resizing, all images must have 20x20 pixels, but .*val_00.png has 24x20"
    ):
        sources["fog/3"].images.batch([0])
    wrong.unlink()
    with pytest.raises(RecastError, match="no such image"):
        sources["fog/3"].images.batch([0])
    for image in (root / "gaussian_noise" / "1" / WNIDS[1]).iterdir():
        image.unlink()
    with pytest.raises(NotMeasured, match=f"class folders without an image: {WNIDS[1]}"):
        sources_imagenet_c(make_bench(data, tmp_path))


def test_without_the_set_or_for_other_classes(tmp_path: Path, sets: Path, data: Data, digits: Data) -> None:
    with pytest.raises(NotMeasured, match=r"no folder imagenet-c in .*To get it: noise.tar, blur.tar"):
        sources_imagenet_c(make_bench(data, tmp_path))
    with pytest.raises(RecastError, match="imagenet-c is for models of ImageNet's 1000 classes, digits has 10"):
        sources_imagenet_c(make_bench(digits, sets))
