from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch.nn import functional as F

from recast.data import Data
from recast.evaluation import evaluate
from recast.evaluation.context import NotMeasured
from recast.evaluation.separability import energy, halves_told, random_halves


def test_halves_are_random_and_equal() -> None:
    labels = torch.tensor([0] * 40 + [1] * 41)
    halves = random_halves(labels, 0)
    assert [int(halves[labels == label].sum()) for label in (0, 1)] == [20, 20]
    assert not halves.equal(random_halves(labels, 1))
    assert halves.equal(random_halves(labels, 0))


def test_collapsed_classes_have_no_halves() -> None:
    """Images of a class at one point: its halves cannot be told; rows in general position: each is told from all."""
    labels = torch.arange(60) % 3
    points = F.one_hot(labels, 80).float()
    assert halves_told(points, labels, 0) == pytest.approx((0.5, 0.5))
    spread = F.normalize(torch.randn(60, 80, generator=torch.Generator().manual_seed(0)), dim=1)
    assert halves_told(spread, labels, 0) == (1.0, 1.0)


def test_energy_is_that_of_scikit_learn() -> None:
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)) * torch.tensor([9.0, 5, 3, 1, 1, 0.1]) + 4
    np.testing.assert_allclose(energy(x), PCA().fit(x.double()).explained_variance_ratio_.cumsum(), rtol=1e-6)


def test_the_suite(digits: Data, spy: Any) -> None:
    rows = {row.metric: row.value for row in evaluate(spy().eval(), "separability", digits, progress=False)}
    energies = [value for metric, value in rows.items() if metric.startswith("energy@")]
    assert energies == sorted(energies)
    assert 50 <= rows["halves/given"] <= 100
    assert energies[-1] <= 100 + 1e-9
    assert rows["halves"] <= rows["halves/given"]
    empty = replace(digits, train=digits.train.subset(torch.empty(0, dtype=torch.long)))
    with pytest.raises(NotMeasured, match="digits has none"):
        evaluate(spy().eval(), "separability", empty, progress=False)
