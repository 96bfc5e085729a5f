from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from recast.data import Data
from recast.data.datasets import ImageFiles, LabelledImages
from recast.data.images import resize_and_crop, to_bytes
from recast.errors import RecastError
from recast.evaluation.bench import Bench, NotMeasured, Options, PixelModel, Suite
from recast.evaluation.measuring import score_suites
from recast.evaluation.resolution import (
    ResizedImages,
    default_sizes,
    parse_size,
    resize_to,
    score_resolution,
    sources_resolution,
)

SUITE = Suite(score_resolution, sources=sources_resolution)


def make_bench(data: Data, models: dict[str, nn.Module], *sizes: str) -> Bench:
    wrapped = {name: PixelModel(model, data.mean, data.std) for name, model in models.items()}
    return Bench(wrapped, data, 20, torch.device("cpu"), Options(sizes=sizes))


@pytest.fixture
def photographs(tmp_path: Path, digits: Data) -> Data:
    """Three files of different shapes, cropped to 112 from 128."""
    paths = []
    generator = torch.Generator().manual_seed(0)
    for number, (width, height) in enumerate([(150, 200), (201, 133), (112, 112)]):
        noise = torch.randint(256, (height // 8, width // 8, 3), generator=generator, dtype=torch.uint8)
        path = tmp_path / f"{number}.png"
        Image.fromarray(noise.numpy()).resize((width, height), Image.Resampling.BICUBIC).save(path)
        paths.append(str(path))
    return replace(digits, val=ImageFiles(torch.arange(3), 112, paths))


@pytest.mark.parametrize("side", [97, 112, 160, 224])
@pytest.mark.parametrize("crop_pct", [None, 0.9, 1.0])
def test_squares_are_the_pixels_of_validation(side: int, crop_pct: float | None) -> None:
    for width, height in [(301, 200), (200, 301), (130, 130), (64, 90)]:
        image = Image.effect_noise((width, height), 80).convert("RGB")
        expected = resize_and_crop(image, side, crop_pct)
        assert resize_to(image, (side, side), crop_pct or 0.875).tobytes() == expected.tobytes()


def test_the_own_size_is_the_validation_image(photographs: Data, digits: Data) -> None:
    for images in (photographs.val, digits.val):
        own = images.img_size
        assert ResizedImages(images, (own, own)).batch([2, 0])[0].equal(images.batch([2, 0])[0])
        assert ResizedImages(images, (own, own)).batch([2, 0])[1].equal(images.labels[[2, 0]])


def test_every_size_shows_the_same_part(photographs: Data) -> None:
    """Enlarging and then averaging pixels of one size gives those of another."""
    for index in range(3):
        base = photographs.val.batch([index])[0]
        twice = ResizedImages(photographs.val, (224, 224)).batch([index])[0]
        assert twice.shape == (1, 3, 224, 224)
        back = nn.functional.avg_pool2d(twice, 2)
        assert (back - base).abs().mean() < 0.02
        shifted = (back[..., 6:] - base[..., :-6]).abs().mean()
        assert shifted > 3 * (back - base).abs().mean()


def test_non_square_sizes_keep_the_proportions(tmp_path: Path) -> None:
    image = Image.new("RGB", (100, 100))
    image.paste((255, 255, 255), (40, 40, 60, 60))  # a centred square
    wide = resize_to(image, (50, 100), 1.0)
    assert wide.size == (100, 50)
    white = to_bytes(wide)[0] > 127
    assert white.any(0).sum() == white.any(1).sum() == 20
    tall = resize_to(image, (100, 50), 0.5)  # half of the height is shown
    white = to_bytes(tall)[0] > 127
    assert white.any(0).sum() == white.any(1).sum() == 40


class Pooled(nn.Module):
    """Takes any size; remembers which it saw."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.seen: set[tuple[int, ...]] = set()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 10))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(tuple(x.shape[2:]))
        logits: Tensor = self.layers(x)
        return logits


def test_the_suite(digits: Data) -> None:
    model = Pooled().eval()
    found, _ = score_suites(make_bench(digits, {"m": model}, "8", "16", "12x20", "16x16"), {"resolution": SUITE})
    scores = found["resolution"].scores["m"]
    assert list(scores) == ["top1@8x8", "top1@16x16", "top1@12x20"]
    assert model.seen == {(8, 8), (16, 16), (12, 20)}
    images, labels = digits.val.batch(range(50))
    mean, std = torch.tensor(digits.mean)[:, None, None], torch.tensor(digits.std)[:, None, None]
    clean = (model((images - mean) / std).argmax(1) == labels).float()
    assert scores["top1@16x16"][:, 0].tolist() == clean.tolist()
    assert scores["top1@8x8"].shape == (50, 1)


class Fixed(Pooled):
    """Takes one size, as a ViT does."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[2:] == (16, 16), f"input {tuple(x.shape[2:])} does not match model (16, 16)"
        return super().forward(x)


def test_a_model_that_cannot_take_a_size_is_named_and_the_rest_goes_on(digits: Data) -> None:
    bench = make_bench(digits, {"any": Pooled().eval(), "fixed": Fixed().eval()}, "8", "16")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found, _ = score_suites(bench, {"resolution": SUITE})
    assert [str(warning.message) for warning in told] == [
        "fixed cannot take images of 8x8 and is left out there: input (8, 8) does not match model (16, 16)"
    ]
    scores = found["resolution"].scores
    assert list(scores["any"]) == ["top1@8x8", "top1@16x16"]
    assert list(scores["fixed"]) == ["top1@16x16"]


class Broken(Pooled):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


@pytest.mark.parametrize("error", [RecastError("not a number"), torch.OutOfMemoryError("full"), KeyError("a bug")])
def test_other_errors_are_not_taken_for_a_size(error: Exception, digits: Data) -> None:
    with pytest.raises(type(error)):
        score_suites(make_bench(digits, {"m": Broken(error).eval()}, "8"), {"resolution": SUITE})


def test_sizes() -> None:
    assert parse_size("160") == (160, 160)
    assert parse_size(" 128X192 ") == (128, 192)
    for wrong in ("", "0", "12x0", "-3", "12x", "big", "1.5"):
        with pytest.raises(RecastError, match="HEIGHTxWIDTH such as 128x192, got"):
            parse_size(wrong)
    assert default_sizes(224) == ((128, 128), (160, 160), (224, 224), (288, 288), (320, 320))
    assert default_sizes(32) == ((16, 16), (24, 24), (32, 32), (40, 40), (48, 48))
    assert default_sizes(3) == ((3, 3), (4, 4))


def test_default_sizes_and_streams(digits: Data) -> None:
    sources = sources_resolution(make_bench(digits, {}))
    assert [source.part for source in sources] == ["8x8", "12x12", "16x16", "20x20", "24x24"]
    assert sources[0].images.subset(torch.tensor([4])).batch([0])[0].equal(sources[0].images.batch([4])[0])

    class Stream(LabelledImages):
        img_size = 16

    with pytest.raises(NotMeasured, match="shards of digits do not allow"):
        sources_resolution(make_bench(replace(digits, val=Stream()), {}))
