import copy
import math
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import recast.papers  # noqa: F401  (registers the small networks with timm)
from recast import RecastError, plan, recast_
from recast.lab.analysis.cka import cka, tabulate_cka


def hsic1(x: Tensor, y: Tensor) -> float:
    """Nguyen et al. 2021, Eq. 3, term by term."""
    n = len(x)
    K, L = x @ x.T, y @ y.T
    K, L = K - torch.diag(K.diag()), L - torch.diag(L.diag())
    ones = torch.ones(n, dtype=x.dtype)
    terms = torch.trace(K @ L) + (ones @ K @ ones) * (ones @ L @ ones) / ((n - 1) * (n - 2))
    return float(terms - 2 / (n - 2) * (ones @ K @ L @ ones)) / (n * (n - 3))


def closed_form(x: Tensor, y: Tensor) -> float:
    return hsic1(x, y) / math.sqrt(hsic1(x, x) * hsic1(y, y))


class Fixed(nn.Module):
    """Two layers that are linear maps of the flattened images."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, len(first), bias=False), nn.Linear(12, len(second), bias=False)
        self.first.weight, self.second.weight = nn.Parameter(first), nn.Parameter(second)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.flatten(1)
        return self.first(x), self.second(x)


def random(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


LAYERS = ["first", "second"]
A, B = Fixed(random(5, 0), random(7, 1)), Fixed(random(3, 2), random(12, 3))


def images(n: int, shift: float = 0.0) -> Tensor:
    return random(n, 9).view(n, 3, 2, 2) + shift


@pytest.mark.parametrize("shift", [0.0, 30.0])
@pytest.mark.parametrize("n", [4, 5, 40])
def test_one_batch_against_the_closed_form(n: int, shift: float) -> None:
    x = images(n, shift)
    similarity = cka(A, B, x, LAYERS, LAYERS)
    assert (similarity.layers_a, similarity.layers_b, similarity.n) == (tuple(LAYERS), tuple(LAYERS), n)
    with torch.no_grad():
        for i, features_a in enumerate(A(x)):
            for j, features_b in enumerate(B(x)):
                assert similarity.cka[i, j] == pytest.approx(closed_form(features_a, features_b), rel=1e-6, abs=1e-6)


def test_batches_are_averaged_before_the_ratio() -> None:
    x = images(30)
    parts = [x[:12], x[12:24], x[24:27]]  # the last is too small to count
    similarity = cka(A, B, [(part, None) for part in parts], LAYERS, LAYERS)
    assert similarity.n == 24
    with torch.no_grad():
        pairs = [(A(part)[0], B(part)[1]) for part in parts[:2]]
    both = sum(hsic1(first, second) for first, second in pairs)
    alone = sum(hsic1(first, first) for first, _ in pairs) * sum(hsic1(second, second) for _, second in pairs)
    assert similarity.cka[0, 1] == pytest.approx(both / math.sqrt(alone), rel=1e-6)


def test_a_dead_layer_has_no_similarity() -> None:
    a = Fixed(torch.zeros(3, 12).double(), random(4, 1))
    similarity = cka(a, a, images(10), LAYERS, LAYERS)
    assert similarity.cka[0].isnan().all()
    assert similarity.cka[1, 1] == pytest.approx(1)


def test_parent_and_recast_layer_by_layer() -> None:
    parent = timm.create_model("digits_resnet").eval()
    x = torch.rand(12, 3, 16, 16)
    child = recast_(copy.deepcopy(parent), plan(parent, x[:1]))
    other = timm.create_model("digits_resnet").eval()
    table = tabulate_cka({"parent": parent, "other": other, "recast": child}, [(x, torch.zeros(12))])
    assert table.columns == ("model_a", "layer_a", "model_b", "layer_b", "cka", "n")
    assert len(table.rows) == 3 * 25
    layers = list(dict.fromkeys(row[1] for row in table.rows))
    assert layers == ["stem", "layer1.0", "layer2.0", "layer3.0", "layer3.1"]
    assert {row[5] for row in table.rows} == {12}
    value = {row[:4]: row[4] for row in table.rows}
    for layer in layers:
        assert value["parent", layer, "parent", layer] == pytest.approx(1)
        assert value["parent", layer, "recast", layer] == pytest.approx(1, abs=1e-4)
    assert value["parent", "layer3.1", "other", "layer3.1"] < 0.99


@pytest.mark.parametrize(
    ("layers", "batches", "match"),
    [
        (["third"], images(8), "no module 'third'"),
        (LAYERS, images(3), "at least 4 images"),
        (LAYERS, [], "images is empty"),
    ],
)
def test_mistakes_are_named(layers: list[str], batches: Any, match: str) -> None:
    with pytest.raises(RecastError, match=match):
        cka(A, A, batches, layers, LAYERS)
