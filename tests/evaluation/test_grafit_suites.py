from typing import Any

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch.nn import functional as F

from recast.errors import RecastError
from recast.lab.data import Data
from recast.lab.evaluation import evaluate
from recast.papers.grafit.suites import choose_classifier, energy, fit_linear, halves_accuracy, scaled


def unit(count: int, width: int) -> torch.Tensor:
    return F.normalize(torch.randn(count, width, generator=torch.Generator().manual_seed(0)), dim=1)


def test_the_classifier_minimises_cross_entropy_and_decay() -> None:
    x, labels, decay = scaled(unit(60, 5)), np.arange(60) % 3, 0.01
    classifier = fit_linear(x, labels, decay)
    weight = torch.tensor(classifier.coef_, requires_grad=True)
    logits = torch.tensor(x) @ weight.T + torch.tensor(classifier.intercept_)
    loss = F.cross_entropy(logits, torch.tensor(labels)) + decay / 2 * weight.square().sum()
    (gradient,) = torch.autograd.grad(loss, weight)
    assert gradient.abs().max() < 1e-3


def test_weight_decay_is_chosen_on_held_out_images(digits: Data, score: Any, spy: Any) -> None:
    noise, labels = unit(400, 5), torch.arange(400) % 2
    signal = F.normalize(noise + 3 * torch.eye(5)[labels], dim=1)
    classifier, _ = choose_classifier(scaled(signal), labels)
    assert classifier.predict(scaled(torch.eye(5)[:2])).tolist() == [0, 1]
    with pytest.raises(RecastError, match="two training images"):
        choose_classifier(scaled(noise[:3]), torch.arange(3))
    scores = score("linear", spy().eval(), digits, 50)
    assert list(scores) == ["top1", "weight_decay"]
    assert scores["top1"].mean() > 0.5


def test_collapsed_classes_hide_halves_and_others_show_them() -> None:
    labels = torch.arange(60) % 3
    points = scaled(torch.eye(4)[labels])
    assert halves_accuracy(points, labels, 0) == pytest.approx((0.5, 0.5))
    alone, conditioned = halves_accuracy(scaled(unit(60, 59)), labels, 0)
    assert alone == conditioned == 1


def test_separability(digits: Data, spy: Any) -> None:
    rows = {row.metric: row.value for row in evaluate(spy().eval(), "separability", digits, progress=False)}
    energies = [value for metric, value in rows.items() if metric.startswith("energy@")]
    assert energies == sorted(energies)
    assert energies[-1] <= 100 + 1e-9
    assert 50 <= rows["halves/conditioned"] <= 100


def test_energy_is_that_of_scikit_learn() -> None:
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)) * torch.tensor([9.0, 5, 3, 1, 1, 0.1]) + 4
    np.testing.assert_allclose(energy(x), PCA().fit(x.double()).explained_variance_ratio_.cumsum(), rtol=1e-6)
