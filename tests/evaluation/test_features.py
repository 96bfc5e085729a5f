import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from sklearn.decomposition import PCA
from sklearn.metrics import average_precision_score
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import squeezenet1_1
from torchvision.transforms.v2.functional import normalize

from recast.errors import RecastError
from recast.lab.config import Augmentation, DataConfig, Recipe
from recast.lab.config.evaluation import Options
from recast.lab.config.recipe import Groups
from recast.lab.data import Data
from recast.lab.evaluation import PixelModel, evaluate
from recast.lab.evaluation.knn import TEMPERATURE, features, nearest, posterior
from recast.lab.evaluation.run_folder import evaluate_run
from recast.lab.training.run import train
from recast.models.config import ModelConfig
from recast.papers.grafit import retrieval
from recast.papers.grafit.config import EmbedConfig, Projector
from recast.papers.grafit.head import add_embedding_
from recast.papers.grafit.linear import choose_classifier, energy, fit_linear, halves_accuracy, scaled
from recast.papers.grafit.retrieval import choose_k, rankings

BANK = torch.tensor([(1, 0), (0.8, 0.6), (0, 1), (-0.6, 0.8)], dtype=torch.float64)
QUERY = F.normalize(torch.tensor([[1.0, 0.5]], dtype=torch.float64), dim=1)


def unit(count: int, width: int) -> Tensor:
    return F.normalize(torch.randn(count, width), dim=1)


def test_votes_are_those_of_scikit_learn() -> None:
    queries, bank = unit(40, 5), unit(300, 5)
    labels = torch.randint(4, (300,))
    values, where = nearest(queries, bank, 20)
    votes = {k: posterior(values[:, :k], labels[where[:, :k]], 4, TEMPERATURE).argmax(1) for k in (1, 5, 20)}
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
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 1600, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    wrapped = PixelModel(network, (0.5,) * 3, (2.0,) * 3)
    torch.testing.assert_close(features(wrapped, images, 3), network[:3]((images - 0.5) / 2).detach())
    assert not features(network, images).requires_grad
    expected = features(network, images, 3)
    embedding = add_embedding_(copy.deepcopy(network), Projector("linear", dim=5), 3)
    torch.testing.assert_close(features(embedding, images, 3), embedding[3].projector(expected).detach())
    tokens = nn.Sequential(nn.Flatten(2), nn.Linear(1600, 6)).eval()  # logits for each position
    torch.testing.assert_close(features(tokens, images, 6), images.flatten(2).mean(1))
    with pytest.raises(RecastError, match="no known classifier"):
        features(nn.Sequential(nn.Conv2d(3, 4, 1)), images, 9)
    network.forward = lambda x: x  # the classifier is not called
    with pytest.raises(RecastError, match="no features of Sequential"):
        features(network, images, 3)


@pytest.fixture
def unit_features(digits: Data) -> tuple[Tensor, Tensor]:
    """What `Spy` has of the training and the validation images."""
    parts = [part.plain().batch(range(len(part)))[0] for part in (digits.train, digits.val)]
    bank, queries = (F.normalize(normalize(part, digits.mean, digits.std).flatten(1), dim=1) for part in parts)
    return bank, queries


def test_knn(digits: Data, unit_features: tuple[Tensor, Tensor], score: Any, spy: Any) -> None:
    augmented = replace(digits, train=digits.train.augmented(Augmentation()))
    model = spy().eval()
    scores = score("knn", model, augmented, 50, neighbours=(1, 5))
    assert model.batches == [50] * 5  # four batches of 200 training images once, one of the validation
    assert list(scores) == ["top1@1", "top1@5"]
    bank, queries = unit_features
    nearest_label = digits.train.labels[(queries @ bank.T).argmax(1)]
    assert scores["top1@1"][:, 0].tolist() == (nearest_label == digits.val.labels).float().tolist()
    near = (queries @ bank.T).topk(5, dim=1)
    voted = posterior(near.values, digits.train.labels[near.indices], 10, TEMPERATURE).argmax(1) == digits.val.labels
    assert scores["top1@5"][:, 0].tolist() == voted.float().tolist()
    parts = score("knn", model, augmented, 13, neighbours=(1, 5))
    assert all((values == scores[metric]).all() for metric, values in parts.items())


def test_rankings_by_hand() -> None:
    same = torch.tensor([[False, False, True, True]])
    coarse = torch.tensor([[0.9, 0.9, 0.1, 0.1]], dtype=torch.float64), same
    ranked = dict(rankings(QUERY @ BANK.T, coarse))
    expected = [3.0916517684, 3.1810944874, -1.7500109818, -2.3761100155]
    assert ranked["map/conditioned"][0].tolist() == pytest.approx(expected, abs=1e-10)
    assert ranked["map/oracle"][0].argsort(descending=True).tolist() == [2, 3, 1, 0]
    sure = torch.tensor([[1.0, 1.0, 0.0, 0.0]]), same
    assert dict(rankings(QUERY @ BANK.T, sure))["map/conditioned"].isfinite().all()
    assert list(dict(rankings(QUERY @ BANK.T, None))) == ["map"]


def test_k_is_the_one_that_classifies_held_out_images_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rare images in the middle of frequent ones: few neighbours are right, many are not."""
    angle = torch.cat([torch.linspace(0, 1, 40), torch.linspace(0.49, 0.51, 12)])
    bank, labels = torch.stack([angle.cos(), angle.sin()], 1), torch.tensor([0] * 40 + [1] * 12)
    for possible, target, k in (((3, 40), labels, 3), ((40, 3), torch.zeros_like(labels), 40), ((60,), labels, 47)):
        monkeypatch.setattr(retrieval, "NEIGHBOURS", possible)
        assert choose_k(bank, target, 2) == k


def test_retrieval(digits: Data, unit_features: tuple[Tensor, Tensor], score: Any, spy: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(retrieval, "PAIRS", 1000)  # in parts
    coarse = Groups(torch.arange(10) // 5, ["low", "high"])
    scores = score("retrieval", spy().eval(), replace(digits, groups=coarse), 50, neighbours=(201,))  # those of knn
    assert list(scores) == ["top1", "neighbours", "map", "map/conditioned", "map/oracle"]
    bank, queries = unit_features
    cosines, labels = (queries @ bank.T).numpy(), digits.train.labels.numpy()
    for row, label in enumerate(digits.val.labels.numpy()):
        within = labels // 5 == label // 5
        expected = average_precision_score(labels == label, cosines[row])
        oracle = average_precision_score((labels == label)[within], cosines[row, within])
        values = [scores[metric][row, 0] for metric in ("map", "map/oracle")]
        assert values == pytest.approx([expected, oracle], rel=1e-5)
    k = int(scores["neighbours"][0, 0])
    near = nearest(queries, bank, k)
    voted = posterior(near[0], digits.train.labels[near[1]], 10, 0.05).argmax(1)
    assert scores["top1"][:, 0].tolist() == (voted == digits.val.labels).float().tolist()


def test_scores_of_other_coarse_classes_are_not_taken(digits: Data, tmp_path: Path, spy: Any) -> None:
    model = spy().eval()
    passes, oracles = list[int](), list[float]()
    for coarse in (torch.arange(10) // 5, torch.arange(10) % 2, torch.arange(10) // 5):
        data = replace(digits, groups=Groups(coarse, ["a", "b"]))
        rows = evaluate(model, "retrieval", data, cache=tmp_path, batch_size=50, progress=False)
        oracles += [row.value for row in rows if row.metric == "map/oracle"]
        passes.append(model.seen)
    assert oracles[0] == oracles[2] != oracles[1]
    assert passes[0] < passes[1] == passes[2]


def test_a_run_of_coarse_classes_is_measured_with_fine_labels(tmp_path: Path) -> None:
    lines = [f"{digit},{'odd' if digit % 2 else 'even'}" for digit in range(10)]
    (tmp_path / "parity.csv").write_text("\n".join(["fine,coarse", *lines]), encoding="utf-8")
    papers = {"grafit": {"labels": "coarse", "coarse_file": f"{tmp_path}/parity.csv"}}
    data = DataConfig("digits", img_size=16, num_train=60, num_val=30, batch_size=20)
    task = EmbedConfig(projector=Projector("linear", dim=8, hidden=16, views=2))
    model = ModelConfig("digits_resnet")
    recipe = Recipe(model, data, where=["layer3.1.conv1"], epochs=1, device="cpu", task=task, papers=papers)
    run = train(recipe, tmp_path / "run")

    def values(*suites: str, **options: Any) -> dict[tuple[str, str, str], float]:
        results = evaluate_run(run, suites, device="cpu", progress=False, options=Options(**options))
        return {(row.model, row.suite, row.metric): row.value for row in results.rows}

    rows = values("knn", "retrieval", labels="fine")
    for arm in ("parent", "finetuned", "recast"):
        assert 0 < rows[arm, "retrieval", "map"] < rows[arm, "retrieval", "map/oracle"] < 100
    coarse = values("retrieval")
    assert ("recast", "retrieval", "map/oracle") not in coarse
    assert coarse["recast", "retrieval", "top1"] > rows["recast", "retrieval", "top1"]
    with pytest.raises(RecastError, match="labels=fine"):
        values("clean", labels="fine")


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
    x = torch.randn(50, 6) * torch.tensor([9.0, 5, 3, 1, 1, 0.1]) + 4
    np.testing.assert_allclose(energy(x), PCA().fit(x.double()).explained_variance_ratio_.cumsum(), rtol=1e-6)
