"""Low-passed and high-passed images, and the suite on them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from recast.data import Data
from recast.errors import RecastError
from recast.evaluation.bench import Bench, PixelModel, Source, ready
from recast.evaluation.frequency import RADII, keep_frequencies, score_frequency


@pytest.mark.parametrize("size", [(8, 8), (7, 9), (12, 5), (1, 1), (1, 6)])
@pytest.mark.parametrize("radius", [0.0, 0.25, 0.5, 1.0, 1.5])
def test_low_and_high_make_the_image(size: tuple[int, int], radius: float) -> None:
    x = torch.rand(2, 3, *size)
    low, high = (keep_frequencies(x, band, radius) for band in ("low", "high"))  # type: ignore[arg-type]
    mean = x.mean((-2, -1), keepdim=True)
    assert torch.allclose(low + high, x + mean, atol=1e-5)
    for part in (low, high):
        assert torch.allclose(part.mean((-2, -1), keepdim=True), mean, atol=1e-5)
        assert part.shape == x.shape
        assert part.dtype == x.dtype
    if radius == 0:
        assert torch.allclose(low, mean.expand_as(x), atol=1e-5)
    if radius == 1.5:
        assert torch.allclose(low, x, atol=1e-5)


def wave(height: int, width: int, rows: int, columns: int) -> torch.Tensor:
    """A cosine with so many cycles down and across."""
    i, j = torch.arange(height)[:, None] / height, torch.arange(width) / width
    return 0.5 + 0.4 * torch.cos(2 * math.pi * (rows * i + columns * j))[None, None]


@pytest.mark.parametrize("size", [(16, 16), (16, 24), (15, 9)])
@pytest.mark.parametrize("cycles", [(1, 0), (0, 2), (2, 2), (-3, 1), (4, 0), (0, 4)])
def test_waves_pass_by_their_true_frequency(size: tuple[int, int], cycles: tuple[int, int]) -> None:
    x = wave(*size, *cycles)
    frequency = math.hypot(2 * cycles[0] / size[0], 2 * cycles[1] / size[1])
    grey = torch.full_like(x, 0.5)
    for radius, passes in ((frequency - 0.01, False), (frequency, True), (frequency + 0.01, True)):
        assert torch.allclose(keep_frequencies(x, "low", radius), x if passes else grey, atol=1e-5)
        assert torch.allclose(keep_frequencies(x, "high", radius), grey if passes else x, atol=1e-5)


def test_filtering_twice_is_filtering_once() -> None:
    x = torch.rand(1, 3, 10, 14)
    for band in ("low", "high"):
        once = keep_frequencies(x, band, 0.4)  # type: ignore[arg-type]
        assert torch.allclose(keep_frequencies(once, band, 0.4), once, atol=1e-5)  # type: ignore[arg-type]
    assert keep_frequencies(x.bfloat16(), "low", 0.4).dtype == torch.bfloat16


def test_mistakes_are_named() -> None:
    with pytest.raises(RecastError, match="'low', 'high'"):
        keep_frequencies(torch.rand(1, 1, 4, 4), "middle", 0.5)  # type: ignore[arg-type]
    for radius in (-0.1, math.nan):
        with pytest.raises(RecastError, match="0 or more"):
            keep_frequencies(torch.rand(1, 1, 4, 4), "low", radius)


def test_the_suite(digits: Data, trained: nn.Module) -> None:
    device = torch.device("cpu")
    other = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 10))
    models = {"parent": PixelModel(trained, digits.mean, digits.std), "recast": PixelModel(other, (0,) * 3, (1,) * 3)}
    bench = Bench(models, digits, 50, device)
    with ready(models.values(), device):
        (batch,) = bench.batches(Source("", digits.val, digits.name))
        scores = {(score.model, score.metric): score.values for score in score_frequency(bench, batch)}
        assert len(scores) == 2 * 2 * len(RADII)
        assert {metric for _, metric in scores} >= {"low@0.1", "high@0.1", "low@1", "high@0.5"}
        filtered = keep_frequencies(batch.images, "low", 0.5)
        expected = bench.logits("parent", filtered).argmax(1) == batch.labels
        assert torch.equal(scores["parent", "low@0.5"], expected.float())
        clean = float((batch.logits("parent").argmax(1) == batch.labels).float().mean())
    assert all(values.shape == (50,) for values in scores.values())
    low = [float(scores["parent", f"low@{radius:g}"].mean()) for radius in RADII]
    assert low[0] < 0.5 < low[-1]
    assert abs(low[-1] - clean) <= 0.06
    assert float(scores["parent", "high@1"].mean()) < 0.5
