from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recast.analysis.faithfulness import Curves, blur, deletion, insertion, removal_order
from recast.errors import RecastError
from recast.evaluation.scores import Resampled, plain_mean


class Weighted(nn.Module):
    """Logits (⟨weight, x⟩, 0): what every pixel adds is known."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        score = (x * self.weight).sum((1, 2, 3))
        return torch.stack([score, torch.zeros_like(score)], dim=1)


def one_class(n: int = 1) -> Tensor:
    return torch.zeros(n, dtype=torch.long)


def test_a_linear_model_by_hand() -> None:
    """Contributions 4, 3, 2, 1: what is left after each removal is known, and so are both areas."""
    model = Weighted(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]))
    images = torch.ones(1, 1, 2, 2)
    maps = model.weight.detach()
    removed = deletion(model, images, maps, one_class(), steps=4, baseline="zero")
    inserted = insertion(model, images, maps, one_class(), steps=4, baseline="zero")
    left, back = torch.tensor([10.0, 6, 3, 1, 0]), torch.tensor([0.0, 4, 7, 9, 10])
    assert removed.fractions.tolist() == [0, 0.25, 0.5, 0.75, 1]
    torch.testing.assert_close(removed.probabilities[0], left.sigmoid())
    torch.testing.assert_close(inserted.probabilities[0], back.sigmoid())
    p = left.sigmoid()
    torch.testing.assert_close(removed.areas[0], (p[0] / 2 + p[1] + p[2] + p[3] + p[4] / 2) / 4)
    other = deletion(model, images, maps, torch.tensor([1]), steps=4, baseline="zero")
    torch.testing.assert_close(other.probabilities, 1 - removed.probabilities)
    halves = deletion(model, images, maps, one_class(), steps=2, baseline="zero")
    torch.testing.assert_close(halves.probabilities[0], torch.tensor([10.0, 3, 0]).sigmoid())
    uneven = deletion(model, images, maps, one_class(), steps=3, baseline="zero")  # 1, 2 and 4 of the 4 pixels
    assert uneven.fractions.tolist() == [0, 0.25, 0.5, 1]


@pytest.mark.parametrize("size", [(12, 12), (6, 20)])
def test_oracle_beats_random_beats_its_opposite(size: tuple[int, int]) -> None:
    n = 24
    contributions = 0.2 * torch.randn(n, 1, *size)
    model = Weighted(torch.ones(1, *size))
    truth = contributions[:, 0]
    random = torch.rand(n, *size)
    areas = {
        name: [
            call(model, contributions, maps, one_class(n), steps=12, baseline="zero").areas.mean()
            for call in (deletion, insertion)
        ]
        for name, maps in {"oracle": truth, "random": random, "opposite": -truth}.items()
    }
    assert areas["oracle"][0] < areas["random"][0] - 0.1 < areas["opposite"][0] - 0.2
    assert areas["oracle"][1] > areas["random"][1] + 0.1 > areas["opposite"][1] + 0.2


def test_a_constant_map_is_a_random_one() -> None:
    """Its order is any order, another for each image and seed, and on average it scores as random maps do."""
    n, size = 200, (8, 10)
    constant = torch.full((n, 3, 5), 0.3)
    places = removal_order(constant, size)
    assert (places.flatten(1).sort(1).values == torch.arange(80)).all()
    assert not torch.equal(places[0], places[1])
    assert torch.equal(places, removal_order(constant, size))
    assert not torch.equal(places, removal_order(constant, size, seed=1))
    # early places are anywhere: not in the first rows, as they were in the order of storage
    mean_row = (torch.arange(8.0)[:, None].expand(size) * (places < 20)).sum((1, 2)) / 20
    assert mean_row.mean() == pytest.approx(3.5, abs=0.1)
    images = 0.2 * torch.randn(n, 1, *size) + 0.05
    model = Weighted(torch.ones(1, *size))
    drawn = deletion(model, images, torch.rand(n, *size), one_class(n), steps=8, baseline="zero").areas
    tied = deletion(model, images, constant, one_class(n), steps=8, baseline="zero").areas
    assert (tied - drawn).abs().mean() > 0
    assert (tied - drawn).mean().abs() < 3 * (tied - drawn).std() / n**0.5


def test_the_order_follows_the_map() -> None:
    maps = torch.tensor([[[0.0, 5.0, 5.0], [9.0, -1.0, 0.0]]])
    (places,) = removal_order(maps, (2, 3))
    assert places[1, 0] == 0
    assert {int(places[0, 1]), int(places[0, 2])} == {1, 2}
    assert {int(places[0, 0]), int(places[1, 2])} == {3, 4}
    assert places[1, 1] == 5
    (cells,) = removal_order(maps, (4, 7), "cell")
    assert cells.shape == (4, 7)
    assert sorted(cells.unique().tolist()) == list(range(6))
    assert (cells[2:, :3] == 0).all()  # row 1, column 0 of the map: pixels 0 to 2 of 7
    assert (cells[2:, 3:5] == 5).all()
    (smooth,) = removal_order(torch.tensor([[[0.0, 1.0]]]), (1, 8))
    assert smooth[0, 2:6].tolist() == [5, 4, 3, 2]  # interpolated: larger towards the larger cell
    fine = torch.rand(2, 5, 5, dtype=torch.float64)
    assert torch.equal(removal_order(fine + 1e6, (9, 9)), removal_order(fine, (9, 9)))


def test_cells_go_as_a_whole() -> None:
    model = Weighted(torch.ones(1, 4, 4))
    maps = torch.tensor([[[4.0, 3.0], [2.0, 1.0]]])
    found = deletion(model, torch.full((1, 1, 4, 4), 0.1), maps, one_class(), steps=4, unit="cell", baseline="zero")
    torch.testing.assert_close(found.probabilities[0], (0.4 * torch.arange(4.0, -1, -1)).sigmoid())


def test_baselines() -> None:
    images = torch.rand(3, 3, 16, 24)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 24, 5)).eval()
    maps, targets = torch.rand(3, 4, 6), torch.tensor([0, 4, 2])

    def probability(x: Tensor) -> Tensor:
        return model(x).softmax(1).gather(1, targets[:, None])[:, 0]

    given = torch.rand(3, 1, 1)
    expected = {
        "mean": images.mean((2, 3), keepdim=True).expand_as(images),
        "blur": blur(images),
        "zero": torch.zeros_like(images),
    }
    for baseline, value in [*expected.items(), (given, given.expand_as(images))]:
        removed = deletion(model, images, maps, targets, steps=3, baseline=baseline)  # type: ignore[arg-type]
        inserted = insertion(model, images, maps, targets, steps=3, baseline=baseline)  # type: ignore[arg-type]
        for curves, first, last in ((removed, images, value), (inserted, value, images)):
            torch.testing.assert_close(curves.probabilities[:, 0], probability(first).detach())
            torch.testing.assert_close(curves.probabilities[:, -1], probability(last).detach())
    assert not torch.equal(removed.areas, inserted.areas)


def test_blur() -> None:
    assert torch.allclose(blur(torch.full((1, 2, 9, 5), 0.7)), torch.tensor(0.7))
    dot = torch.zeros(1, 1, 41, 61)
    dot[0, 0, 20, 30] = 1
    spread = blur(dot, 3.0)[0, 0]
    assert float(spread.sum()) == pytest.approx(1, abs=1e-5)
    rows = (torch.arange(41.0) - 20).square() @ spread.sum(1)
    columns = (torch.arange(61.0) - 30).square() @ spread.sum(0)
    assert float(rows) == pytest.approx(9, rel=0.03)  # cut off at three standard deviations
    assert float(columns) == pytest.approx(float(rows), rel=1e-4)
    assert blur(torch.rand(1, 3, 2, 2)).shape == (1, 3, 2, 2)


def test_batches_and_modes_make_no_difference() -> None:
    """Images do not meet, be it in other batches or in a norm; the model comes in training mode and keeps it."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 3)
    ).train()
    images, maps, targets = torch.randn(5, 3, 8, 8), torch.randn(5, 8, 8), torch.tensor([0, 1, 2, 0, 1])
    whole, small = (deletion(model, images, maps, targets, steps=4, batch_size=size) for size in (100, 3))
    torch.testing.assert_close(whole.probabilities, small.probabilities)
    assert model[2].training
    assert int(model[1].num_batches_tracked) == 0
    assert not whole.areas.requires_grad
    assert all(p.grad is None for p in model.parameters())


def test_areas_are_compared_in_pairs() -> None:
    fractions = torch.tensor([0.0, 0.5, 1.0])
    a = Curves(fractions, torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, 0.0]]))
    b = Curves(fractions, torch.tensor([[0.5, 0.5, 0.5], [0.0, 0.0, 1.0]]))
    assert a.areas.tolist() == [1, 0.5]
    scores = {(name, "area"): np.asarray(c.areas)[:, None] for name, c in {"a": a, "b": b}.items()}
    value, low, high = Resampled(scores, {"area": plain_mean}, seed=0).difference("a", "b", "area")
    assert value == pytest.approx(0.375)
    assert low == pytest.approx(0.25)
    assert high == pytest.approx(0.5)


IMAGES, MAPS = torch.zeros(2, 1, 4, 4), torch.zeros(2, 2, 2)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"images": torch.zeros(1, 4, 4)}, r"images are .* got \(1, 4, 4\)"),
        ({"maps": torch.zeros(3, 2, 2)}, "each of the 2 images"),
        ({"maps": torch.zeros(2, 1, 2, 2)}, r"\(2, h, w\)"),
        ({"maps": torch.full((2, 2, 2), torch.nan)}, "finite"),
        ({"targets": torch.zeros(2)}, "class number"),
        ({"targets": torch.tensor([0])}, "class number"),
        ({"targets": torch.tensor([0, 2])}, "classes 0 to 1 .* got 0 to 2"),
        ({"steps": 0}, "1 or more"),
        ({"steps": 17}, "at most the 16 parts"),
        ({"steps": 5, "unit": "cell"}, "at most the 4 parts"),
        ({"unit": "cells"}, "Did you mean cell"),
        ({"unit": "cell", "maps": torch.zeros(2, 5, 2)}, "finer than images"),
        ({"baseline": "blurr"}, "Did you mean blur"),
        ({"baseline": torch.zeros(3, 4, 5)}, "broadcast"),
        ({"model": nn.Identity()}, r"logits .* got \(\d+, 1, 4, 4\)"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], match: str) -> None:
    given: dict[str, Any] = {
        "model": Weighted(torch.ones(1, 4, 4)), "images": IMAGES, "maps": MAPS, "targets": one_class(2), "steps": 4
    }  # fmt: skip
    calls: tuple[Callable[..., Curves], ...] = (deletion, insertion)
    for call in calls:
        with pytest.raises(RecastError, match=match):
            call(**{**given, **change})
