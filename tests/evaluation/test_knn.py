from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import squeezenet1_1
from torchvision.transforms.v2.functional import normalize

from recast.errors import RecastError
from recast.lab.config import AugmentConfig, DataConfig
from recast.lab.data import Data, load_data
from recast.lab.evaluation import PixelModel
from recast.lab.evaluation.context import NotMeasured
from recast.lab.evaluation.knn import TEMPERATURE, bank_images, choose_probe, features, fit_probe, nearest, vote


def unit(count: int, width: int, seed: int) -> Tensor:
    return F.normalize(torch.randn(count, width, generator=torch.Generator().manual_seed(seed)), dim=1)


@pytest.mark.parametrize("chunk", [7, 1000])
def test_chunks_find_the_nearest(chunk: int) -> None:
    queries, bank = unit(9, 6, 0), unit(50, 6, 1)
    values, where = nearest(queries, bank, 12, chunk)
    expected = (queries @ bank.T).topk(12, dim=1)
    torch.testing.assert_close(values, expected.values)
    assert where.equal(expected.indices)


def test_votes_are_those_of_scikit_learn() -> None:
    queries, bank = unit(40, 5, 0), unit(300, 5, 1)
    labels = torch.randint(4, (300,), generator=torch.Generator().manual_seed(2))
    values, where = nearest(queries, bank, 20)
    votes = vote(values, labels[where], (1, 5, 20), 4)
    assert votes[1].equal(labels[where[:, 0]])
    weights = lambda distances: np.exp((1 - distances) / TEMPERATURE)  # noqa: E731
    for k in (5, 20):
        theirs = KNeighborsClassifier(k, weights=weights, metric="cosine", algorithm="brute")
        assert votes[k].tolist() == theirs.fit(bank.numpy(), labels.numpy()).predict(queries.numpy()).tolist()
    assert not votes[5].equal(votes[20])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet10t", {}),
        ("test_vit", {"img_size": 32}),
        ("test_vit", {"img_size": 32, "global_pool": "avg"}),
        ("convnext_atto", {}),
        ("deit_tiny_distilled_patch16_224", {"img_size": 32, "depth": 1}),
    ],
)
def test_features_are_timms(name: str, options: dict[str, Any]) -> None:
    model = timm.create_model(name, num_classes=7, **options).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model.forward_head(model.forward_features(images), pre_logits=True)
    torch.testing.assert_close(features(model, images, 7), expected)


def test_features_of_any_network() -> None:
    images = torch.randn(2, 3, 40, 40)
    squeeze = squeezenet1_1(num_classes=5).eval()  # ends in a convolution
    torch.testing.assert_close(features(squeeze, images, 5), squeeze.features(images).mean((2, 3)))
    own = nn.Sequential(nn.Flatten(), nn.Linear(3 * 1600, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    wrapped = PixelModel(own, (0.5,) * 3, (2.0,) * 3)
    torch.testing.assert_close(features(wrapped, images, 3), own[:3]((images - 0.5) / 2).detach())
    assert not features(own, images).requires_grad
    tokens = nn.Sequential(nn.Flatten(2), nn.Linear(1600, 6)).eval()  # logits for each position
    torch.testing.assert_close(features(tokens, images, 6), images.flatten(2).mean(1))
    with pytest.raises(RecastError, match="no known classifier"):
        features(nn.Sequential(nn.Conv2d(3, 4, 1)), images, 9)
    own.forward = lambda x: x  # type: ignore[method-assign]  # the classifier is not called
    with pytest.raises(RecastError, match="no features of Sequential"):
        features(own, images, 3)


def test_the_suite(digits: Data, score: Callable[..., dict[str, Any]], spy: Any) -> None:
    augmented = replace(digits, train=digits.train.augmented(AugmentConfig()))
    model = spy().eval()
    found = score("knn", model, augmented, 50, neighbours=(1, 5))
    assert model.batches == [50] * 5  # four batches of 200 training images once, one of the validation
    assert list(found) == ["top1@1", "top1@5"]
    bank, queries = (
        F.normalize(normalize(part.plain().batch(range(len(part)))[0], digits.mean, digits.std).flatten(1), dim=1)
        for part in (digits.train, digits.val)
    )
    own = digits.train.labels[(queries @ bank.T).argmax(1)] == digits.val.labels
    assert found["top1@1"][:, 0].tolist() == own.float().tolist()
    near = (queries @ bank.T).topk(5, dim=1)
    voted = vote(near.values, digits.train.labels[near.indices], (5,), 10)[5] == digits.val.labels
    assert found["top1@5"][:, 0].tolist() == voted.float().tolist()
    parts = score("knn", model, augmented, 13, neighbours=(1, 5))
    assert all((values == found[metric]).all() for metric, values in parts.items())


def test_bad_requests(digits: Data, score: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(RecastError, match=r"between 1 and 200 .*, got 201"):
        score("knn", nn.Identity(), digits, neighbours=(5, 201))
    empty = replace(digits, train=digits.train.subset(torch.empty(0, dtype=torch.long)))
    with pytest.raises(NotMeasured, match="digits has none"):
        score("knn", nn.Identity(), empty)


def test_the_bank_is_seen_at_the_test_size() -> None:
    data = load_data(DataConfig(num_train=20, num_val=10, img_size=16, test_size=24))
    images, labels = bank_images(data).batch([3, 4])
    assert images.shape == (2, 3, 24, 24)
    assert labels.tolist() == data.train.labels[3:5].tolist()
    same = replace(data, val=data.train)
    assert bank_images(same).batch([3])[0].equal(data.train.plain().batch([3])[0])


def test_the_linear_classifier_is_that_of_scikit_learn() -> None:
    x, labels = unit(60, 5, 0).double() * 5**0.5, torch.randint(3, (60,), generator=torch.Generator().manual_seed(1))
    ours, theirs = fit_probe(x, labels, 3, 0.01), LogisticRegression(C=1 / (0.01 * 60), tol=1e-10).fit(x, labels)
    np.testing.assert_allclose(ours(x).softmax(1).numpy(), theirs.predict_proba(x), atol=1e-4)


def test_weight_decay_is_chosen_on_held_out_images(digits: Data, score: Callable[..., Any], spy: Any) -> None:
    """Of noise without any signal nothing is learnt: the largest decay is as good as any."""
    noise, labels = unit(400, 5, 0), torch.arange(400) % 2
    assert choose_probe(noise, torch.zeros_like(labels), 2)[1] == 0.1
    probe, _ = choose_probe(F.normalize(noise + 3 * torch.eye(5)[labels], dim=1), labels, 2)
    assert (probe(F.normalize(torch.eye(5)[:2], dim=1)).argmax(1) == torch.arange(2)).all()
    with pytest.raises(RecastError, match="weight decay on held-out training images, and every class has a single one"):
        choose_probe(noise[:3], torch.arange(3), 3)
    found = score("linear", spy().eval(), digits, 50)
    assert list(found) == ["top1", "weight_decay"]
    assert found["top1"].mean() > 0.5
