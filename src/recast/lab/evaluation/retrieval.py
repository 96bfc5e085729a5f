"""Suites `retrieval` and `separability` on the features of training images (Grafit, sections 2.3 and 2.6), and t-SNE.

`retrieval` ranks all training images by cosine similarity to a query.

map     mean average precision: a query's average precision is the mean, over the images of its class, of the share of
        that class among the images ranked up to each. If classes have coarse classes c, two further rankings:

            conditioned   ψ(x', x) = cos(g(x'), g(x)) + log(p(c_x | x') / (1 − p(c_x | x')))
            oracle        images of the query's coarse class first, by cosine within

top1    k nearest neighbours vote with exp(cos/σ), σ = 0.05; k is chosen on held-out images of the database

`separability` measures what features hold beside classes.

halves  training accuracy of a linear classifier of random halves of every class, mean over ten draws: little above
        50 % if the images of a class have collapsed to a point. `conditioned` multiplies its probabilities by those of
        a linear classifier of classes
energy  share of the variance of the features in their first K principal components
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recast.errors import RecastError, optional_package
from recast.lab.data.seeding import choose_balanced, shuffled_classes
from recast.lab.evaluation import knn
from recast.lab.evaluation.context import Batch, Context, NotMeasured, Score, Source, sampled
from recast.lab.records import PlaneLine
from recast.tables import Table
from recast.tracing.hooks import in_eval

SIGMA = 0.05
NEIGHBOURS = (10, 15, 20, 25, 30)
"""Values of k to choose from."""
HELD_OUT = 5000
"""Largest number of images of the database that choose k."""
LEAST = 1e-6
"""Probabilities are clamped to [LEAST, 1 − LEAST]."""
PAIRS = 2**22
"""Number of similarities ranked at a time."""
ON_PLANE = 1000
"""Default number of images of t-SNE."""
DRAWS = 10
"""Number of draws of halves."""
DECAY = 1e-4
"""Weight decay of the linear classifiers of halves, on features of length √D."""


def average_precision(relevant: Tensor) -> Tensor:
    """Return AP (B,) = mean over relevant ranks r of (relevant among the first r)/r.

    relevant: (B, N) bool in ranked order, at least one in every row.
    """
    ranks = torch.arange(1, relevant.shape[1] + 1, device=relevant.device)
    precision = relevant.cumsum(1).double() / ranks
    return (precision * relevant).sum(1) / relevant.sum(1)


def choose_k(bank: Tensor, labels: Tensor, num_classes: int, ks: Sequence[int] = NEIGHBOURS) -> int:
    """Return the k that best classifies held-out rows of the bank (N, D) by the others; the first of equals."""
    database, held_out = knn.to_choose_on(labels, "retrieval chooses k")
    held_out = held_out[choose_balanced(labels.cpu()[held_out], min(HELD_OUT, len(held_out)), "held-out images")]
    if not (possible := [k for k in ks if k <= len(database)]):
        raise RecastError(
            f"retrieval chooses k from {', '.join(map(str, ks))} nearest images, but the database without its held-out "
            f"part has {len(database)}; use more training images"
        )
    correct = dict.fromkeys(possible, 0)
    for queries, targets in zip(bank[held_out].split(256), labels[held_out].split(256), strict=True):
        similarities, indices = knn.nearest(queries, bank[database], max(possible))
        for k, classes in knn.vote(similarities, labels[database][indices], possible, num_classes, SIGMA).items():
            correct[k] += int((classes == targets).sum())
    return max(possible, key=lambda k: correct[k])


class Above(NamedTuple):
    """The coarse classes of a batch and of the database."""

    queries: Tensor
    """(B,), known to the oracle."""
    bank: Tensor
    """(N,)"""
    posterior: Tensor
    """(B, coarse classes): probabilities of the queries according to the network."""


def rankings(cosines: Tensor, above: Above | None) -> Iterator[tuple[str, Tensor]]:
    """Yield metrics and the scores (B, N) that rank the database, from cosines (B, N)."""
    yield "map", cosines
    if above is not None:
        odds = above.posterior.clamp(LEAST, 1 - LEAST).logit()
        yield "map/conditioned", cosines + odds[:, above.bank]
        yield "map/oracle", cosines + 4.0 * (above.queries[:, None] == above.bank)  # cosines differ by 2 at most


def score_retrieval(batch: Batch) -> Iterator[Score]:
    """Score top1, neighbours (the chosen k) and map; with coarse classes map/conditioned and map/oracle too."""
    context, bank_of = batch.context, knn.banks(batch)
    data, best_k = context.data, context.store.setdefault("k", {})
    for name, model in batch.models.items():
        bank, labels = bank_of[name]
        absent = batch.labels[~torch.isin(batch.labels, labels)]
        if len(absent):
            raise RecastError(
                f"class {data.classes[int(absent[0])]} has validation images but no training image: retrieval requires "
                "every class in the database"
            )
        if name not in best_k:
            best_k[name] = choose_k(bank, labels, len(data.classes))
        k, queries = best_k[name], knn.unit_features(context, model, batch.images)
        similarities, indices = knn.nearest(queries, bank, k)
        neighbours = labels[indices]
        votes = knn.vote(similarities, neighbours, (k,), len(data.classes), SIGMA)[k]
        yield Score(name, "top1", (votes == batch.labels).float())
        yield Score(name, "neighbours", torch.full((len(batch),), float(k)))
        above = None
        if data.coarse is not None:
            of, classes = data.coarse.of.to(labels.device), len(data.coarse.names)
            logits = coarse_logits(batch, name, classes)
            posterior = (
                knn.posterior(similarities, of[neighbours], classes, SIGMA) if logits is None else logits.softmax(1)
            )
            above = Above(of[batch.labels], of[labels], posterior)
        precisions: dict[str, list[Tensor]] = {}
        for part in torch.arange(len(batch), device=labels.device).split(max(1, PAIRS // len(bank))):
            coarse = None if above is None else Above(above.queries[part], above.bank, above.posterior[part])
            same = batch.labels[part, None] == labels
            for metric, scores in rankings(queries[part] @ bank.T, coarse):
                order = scores.argsort(dim=1, descending=True, stable=True)
                precisions.setdefault(metric, []).append(average_precision(same.gather(1, order)))
        yield from (Score(name, metric, torch.cat(values)) for metric, values in precisions.items())


def coarse_logits(batch: Batch, name: str, classes: int) -> Tensor | None:
    """Return logits (B, coarse classes) of a classifier trained on coarse labels; None for other networks."""
    model = batch.models[name]
    if name in batch.context.untaught or knn.embedder(model) is not None:
        return None
    with torch.no_grad():
        logits = model(batch.images)
    return logits.float() if logits.shape == (len(batch), classes) else None


def measure_separability(context: Context) -> Iterator[tuple[str, str, float, int]]:
    """Measure halves, halves/conditioned and energy@K in percent, K a power of two."""
    (source,) = knn.sources_knn(context)
    with in_eval(*context.models.values()):
        bank_of = knn.banks(Batch(context, source, 0, torch.empty(0), torch.empty(0)))
    for name, (bank, labels) in bank_of.items():
        draws = [halves_accuracy(bank, labels, context.options.seed + draw) for draw in range(DRAWS)]
        for metric, values in zip(("halves", "halves/conditioned"), zip(*draws, strict=True), strict=True):
            yield name, metric, 100 * sum(values) / DRAWS, len(bank)
        energies = energy(bank)
        for power in range(len(energies).bit_length()):
            yield name, f"energy@{2**power}", 100 * float(energies[2**power - 1]), len(bank)


def tabulate_tsne(context: Context) -> Table:
    """Return the t-SNE (van der Maaten and Hinton 2008) of features of at most `ON_PLANE` validation images, by cosine.

    It starts from the principal components, with a perplexity of 30 or a third of the images.
    """
    manifold = optional_package("sklearn.manifold", "scikit-learn", "tsne requires scikit-learn", NotMeasured)
    images = sampled(context.data.val, context.options.num_images or ON_PLANE)
    if len(images) < 10:
        raise NotMeasured(f"tsne requires 10 images or more, {context.data.name} has {len(images)}")
    lines = []
    for name, model in context.models.items():
        batches = context.batches(Source(images))
        features = torch.cat([knn.unit_features(context, model, batch.images) for batch in batches])
        perplexity = min(30.0, (len(features) - 1) / 3)
        tsne = manifold.TSNE(init="pca", metric="cosine", perplexity=perplexity, random_state=context.options.seed)
        places = tsne.fit_transform(features.cpu().double().numpy())
        lines += [PlaneLine(name, i, int(images.labels[i]), *map(float, place)) for i, place in enumerate(places)]
    return Table.of("tsne", PlaneLine, lines)


def halves_accuracy(bank: Tensor, labels: Tensor, seed: int) -> tuple[float, float]:
    """Return the share of rows (N, D) of a bank whose half is classified correctly: alone, and given the class."""
    classes = int(labels.max()) + 1
    halves = 2 * labels + random_halves(labels.cpu(), seed).to(labels.device)
    x = bank * bank.shape[1] ** 0.5
    alone = knn.fit_probe(x, halves, 2 * classes, DECAY)(x).log_softmax(1)
    coarse = knn.fit_probe(x, labels, classes, DECAY)(x).log_softmax(1)
    conditioned = alone + coarse.repeat_interleave(2, 1)
    return float((alone.argmax(1) == halves).float().mean()), float((conditioned.argmax(1) == halves).float().mean())


def random_halves(labels: Tensor, seed: int) -> Tensor:
    """Return (N,) 0 or 1, a random half of every class each; 0 is larger if the number is odd."""
    halves = torch.zeros_like(labels)
    for members in shuffled_classes(labels, seed)[1]:
        halves[members[(len(members) + 1) // 2 :]] = 1
    return halves


def energy(x: Tensor) -> Tensor:
    """Return (D,) cumulative shares of the variance of x (N, D) in its principal components, largest first."""
    variances = torch.linalg.eigvalsh(x.double().T.cov()).flip(0).clamp(min=0)
    return variances.cumsum(0) / variances.sum()
