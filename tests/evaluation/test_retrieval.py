from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.metrics import average_precision_score
from torch import Tensor, nn
from torch.nn import functional as F

from recast.errors import RecastError
from recast.lab.config import DataConfig, EmbeddingConfig, Recipe
from recast.lab.config.evaluation import Options
from recast.lab.data import Data, load_data
from recast.lab.data.coarse import Coarse
from recast.lab.evaluation import evaluate, retrieval
from recast.lab.evaluation.context import Batch
from recast.lab.evaluation.knn import features, fit_probe, nearest, posterior, vote
from recast.lab.evaluation.retrieval import (
    Above,
    average_precision,
    choose_k,
    coarse_logits,
    energy,
    halves_told,
    random_halves,
    rankings,
)
from recast.lab.evaluation.run_folder import evaluate_run, open_run
from recast.lab.evaluation.runner import open_context
from recast.lab.tasks.embedding import add_embedding_, embedding_head
from recast.lab.training.run import train
from recast.models.config import ModelConfig

BANK = torch.tensor([(1, 0), (0.8, 0.6), (0, 1), (-0.6, 0.8)], dtype=torch.float64)
LABELS = torch.tensor([0, 0, 1, 1])
QUERY = F.normalize(torch.tensor([[1.0, 0.5]], dtype=torch.float64), dim=1)


def test_neighbours_vote_as_by_hand() -> None:
    similarities, indices = nearest(QUERY, BANK, 3)
    assert similarities[0].tolist() == pytest.approx([0.9838699101, 0.8944271910, 0.4472135955], abs=1e-10)
    found = posterior(similarities, LABELS[indices], 2, 0.5)
    assert found[0].tolist() == pytest.approx([0.8430384595, 0.1569615405], abs=1e-10)


def test_rankings_by_hand() -> None:
    coarse = Above(torch.tensor([1]), LABELS, torch.tensor([[0.9, 0.1]], dtype=torch.float64))
    found = dict(rankings(QUERY @ BANK.T, coarse))
    expected = [3.0916517684, 3.1810944874, -1.7500109818, -2.3761100155]
    assert found["map/conditioned"][0].tolist() == pytest.approx(expected, abs=1e-10)
    assert found["map/oracle"][0].argsort(descending=True).tolist() == [2, 3, 1, 0]
    sure = coarse._replace(posterior=torch.tensor([[1.0, 0.0]]))
    assert dict(rankings(QUERY @ BANK.T, sure))["map/conditioned"].isfinite().all()
    assert list(dict(rankings(QUERY @ BANK.T, None))) == ["map"]


def test_average_precision_is_that_by_hand_and_of_scikit_learn() -> None:
    assert average_precision(torch.tensor([[1, 0, 1, 1, 0]]).bool()).tolist() == pytest.approx([0.8055555556])
    generator = torch.Generator().manual_seed(0)
    scores, relevant = torch.rand(6, 40, generator=generator), torch.rand(6, 40, generator=generator) < 0.3
    found = average_precision(relevant.gather(1, scores.argsort(1, descending=True)))
    theirs = [average_precision_score(r, s) for r, s in zip(relevant.numpy(), scores.numpy(), strict=True)]
    assert found.tolist() == pytest.approx(theirs)


def test_k_is_the_one_that_classifies_held_out_images_best() -> None:
    """Rare images in the middle of frequent ones: few neighbours are right, many are not."""
    angle = torch.cat([torch.linspace(0, 1, 40), torch.linspace(0.49, 0.51, 12)])
    bank, labels = torch.stack([angle.cos(), angle.sin()], 1), torch.tensor([0] * 40 + [1] * 12)
    assert choose_k(bank, labels, 2, (3, 40)) == 3
    assert choose_k(bank, torch.zeros(52, dtype=torch.long), 2, (40, 3)) == 40  # the first of equals
    with pytest.raises(RecastError, match=r"k from 60, 70 nearest images, .* has 47: give it more"):
        choose_k(bank, labels, 2, (60, 70))


@pytest.mark.parametrize("pairs", [1, 2**22])
def test_the_suite(digits: Data, score: Callable[..., dict[str, Any]], spy: Any, pairs: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(retrieval, "PAIRS", pairs)
    coarse = Coarse(torch.arange(10) // 5, ["low", "high"])
    found = score("retrieval", spy().eval(), replace(digits, coarse=coarse), 50, neighbours=(201,))  # those of knn
    assert list(found) == ["top1", "neighbours", "map", "map/conditioned", "map/oracle"]
    model = spy().eval()
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (digits.mean, digits.std))
    bank, queries = (
        F.normalize(features(model, (part.plain().batch(range(len(part)))[0] - mean) / std, 10), dim=1)
        for part in (digits.train, digits.val)
    )
    cosines, labels, own = (queries @ bank.T).numpy(), digits.train.labels.numpy(), digits.val.labels.numpy()
    theirs = [average_precision_score(labels == label, row) for label, row in zip(own, cosines, strict=True)]
    np.testing.assert_allclose(found["map"][:, 0], theirs, rtol=1e-5)
    within = [
        average_precision_score((labels == label)[labels // 5 == label // 5], row[labels // 5 == label // 5])
        for label, row in zip(own, cosines, strict=True)
    ]
    np.testing.assert_allclose(found["map/oracle"][:, 0], within, rtol=1e-5)
    k = int(found["neighbours"][0, 0])
    near = nearest(queries, bank, k)
    voted = vote(near[0], digits.train.labels[near[1]], (k,), 10, 0.05)[k]
    assert found["top1"][:, 0].tolist() == (voted == digits.val.labels).float().tolist()


def test_scores_of_other_coarse_classes_are_not_taken(digits: Data, tmp_path: Path, spy: Any) -> None:
    model = spy().eval()

    def oracle(of: Tensor) -> float:
        data = replace(digits, coarse=Coarse(of, ["one", "other"]))
        rows = evaluate(model, "retrieval", data, cache=tmp_path, batch_size=50, progress=False)
        return next(row.value for row in rows if row.metric == "map/oracle")

    by_size, by_parity = torch.arange(10) // 5, torch.arange(10) % 2
    assert oracle(by_size) != oracle(by_parity)
    seen = model.seen
    oracle(by_size)
    assert model.seen == seen


def test_a_class_must_be_in_the_database(digits: Data, score: Callable[..., dict[str, Any]]) -> None:
    some = replace(digits, train=digits.train.subset((digits.train.labels != 3).nonzero().flatten()))
    with pytest.raises(RecastError, match="class 3 has validation images but no training image"):
        score("retrieval", nn.Sequential(nn.Flatten(), nn.Linear(768, 10)), some)


def test_features_of_an_embedding_are_the_embedding() -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(48, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    images = torch.randn(2, 3, 4, 4)
    expected = features(plain, images, 3)
    add_embedding_(plain, EmbeddingConfig("linear", dim=5), 3)
    head = embedding_head(plain)
    assert head is not None
    torch.testing.assert_close(features(plain, images, 3), head.projector(expected).detach())


def train_on_parity(folder: Path, embedding: EmbeddingConfig) -> Path:
    """A recast network and its control, which learn odd and even."""
    lines = [f"{digit},{'odd' if digit % 2 else 'even'}" for digit in range(10)]
    (folder / "parity.csv").write_text("\n".join(["fine,coarse", *lines]), encoding="utf-8")
    told = {"labels": "coarse", "coarse_file": f"{folder}/parity.csv"}
    data = DataConfig("digits", img_size=16, num_train=60, num_val=30, batch_size=20, **told)  # type: ignore[arg-type]
    how = {"where": ["layer3.1.conv1"], "epochs": 1, "device": "cpu", "embedding": embedding}
    recipe = Recipe(ModelConfig("digits_resnet"), data, **how)  # type: ignore[arg-type]
    return train(recipe, folder / "run")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each an embedding."""
    return train_on_parity(tmp_path_factory.mktemp("coarse"), EmbeddingConfig("linear", 8, 16, views=2))


def test_a_run_is_measured_with_fine_labels(run: Path) -> None:
    found = evaluate_run(run, ["knn", "retrieval"], device="cpu", progress=False, options=Options(labels="fine"))
    rows = {(row.model, row.suite, row.metric): row.value for row in found.rows}
    for arm in ("parent", "finetuned", "recast"):
        assert 0 < rows[arm, "retrieval", "map"] < rows[arm, "retrieval", "map/oracle"] < 100
    again = evaluate_run(run, ["retrieval"], device="cpu", progress=False)
    coarse = {(row.model, row.suite, row.metric): row.value for row in again.rows}
    assert ("recast", "retrieval", "map/oracle") not in coarse
    assert coarse["recast", "retrieval", "top1"] > rows["recast", "retrieval", "top1"]
    with pytest.raises(RecastError, match="was trained with coarse labels: clean cannot be measured with labels=fine"):
        evaluate_run(run, ["clean"], device="cpu", progress=False, options=Options(labels="fine"))


def test_a_new_classifier_says_nothing_of_coarse_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, said = train_on_parity(tmp_path, EmbeddingConfig()), dict[str, bool]()

    def spied(batch: Batch, name: str, classes: int) -> Tensor | None:
        found = coarse_logits(batch, name, classes)
        said[name] = found is not None
        return found

    monkeypatch.setattr(retrieval, "coarse_logits", spied)
    evaluate_run(folder, ["retrieval"], device="cpu", progress=False, options=Options(labels="fine"))
    assert said == {"parent": False, "finetuned": True, "recast": True}


def test_a_run_keeps_its_coarse_classes(run: Path, tmp_path: Path) -> None:
    """Whatever becomes of the file, and wherever the run goes."""
    given, moved = run.parent / "parity.csv", tmp_path / "moved"
    text = given.read_text(encoding="utf-8")
    shutil.copytree(run, moved)
    try:
        given.write_text(text.replace("odd", "ODD").replace("3,ODD", "3,even"), encoding="utf-8")
        data = open_run(moved).data
        assert data.classes == ["even", "odd"]
        assert data.val.labels.equal(load_data(DataConfig("digits", num_val=30)).val.labels % 2)
    finally:
        given.write_text(text, encoding="utf-8")


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


def test_conditioning_multiplies_what_is_said_of_half_and_class() -> None:
    x = F.normalize(torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    labels = torch.arange(60) % 3
    halves = 2 * labels + random_halves(labels, 0)
    of_half, of_class = (fit_probe(2 * x, y, n, 1e-4)(2 * x).softmax(1) for y, n in ((halves, 6), (labels, 3)))
    said = [max(range(6), key=lambda k: float(of_half[i, k] * of_class[i, k // 2])) for i in range(60)]
    right = (torch.tensor(said) == halves).float().mean()
    assert halves_told(x, labels, 0) == pytest.approx(
        (float((of_half.argmax(1) == halves).float().mean()), float(right))
    )
    assert 1 / 6 < right < 1


def test_energy_is_that_of_scikit_learn() -> None:
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)) * torch.tensor([9.0, 5, 3, 1, 1, 0.1]) + 4
    np.testing.assert_allclose(energy(x), PCA().fit(x.double()).explained_variance_ratio_.cumsum(), rtol=1e-6)


def test_separability(digits: Data, spy: Any) -> None:
    rows = {row.metric: row.value for row in evaluate(spy().eval(), "separability", digits, progress=False)}
    energies = [value for metric, value in rows.items() if metric.startswith("energy@")]
    assert energies == sorted(energies)
    assert 50 <= rows["halves/conditioned"] <= 100
    assert energies[-1] <= 100 + 1e-9
    assert rows["halves"] <= rows["halves/conditioned"]


def test_tsne_puts_images_of_alike_features_side_by_side(digits: Data) -> None:
    pixels = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 10)).eval()
    context = open_context({"model": pixels}, digits, options=Options(num_images=50))
    table = retrieval.tabulate_tsne(context)
    assert table.columns == ("model", "image", "label", "x", "y")
    assert table == retrieval.tabulate_tsne(context)
    places = torch.tensor([row[3:] for row in table.rows], dtype=torch.double)
    labels = torch.tensor([row[2] for row in table.rows])
    nearest_one = (torch.cdist(places, places) + 1e9 * torch.eye(len(places))).argmin(1)
    assert (labels[nearest_one] == labels).double().mean() > 0.7  # of ten classes
    with pytest.raises(RecastError, match="tsne lays out 10 images or more"):
        retrieval.tabulate_tsne(open_context({"model": pixels}, digits, options=Options(num_images=9)))
