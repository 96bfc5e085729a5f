"""Suite `retrieval`: rank training images by their features (Grafit, section 2.6).

map     mean average precision: a query's average precision is the mean, over the images of its class, of the share of
        that class among the images ranked up to each. If classes have coarse classes c, two further rankings:

            conditioned   ψ(x', x) = cos(g(x'), g(x)) + log(p(c_x | x') / (1 − p(c_x | x')))
            oracle        images of the query's coarse class first, by cosine within

top1    k nearest neighbours vote with exp(cos/σ), σ = 0.05; k is chosen on held-out images of the database
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from recast.errors import RecastError
from recast.lab.data.seeding import choose_balanced, hold_out
from recast.lab.evaluation import knn
from recast.lab.evaluation.context import Batch, Score
from recast.lab.evaluation.evaluators import evaluates
from recast.lab.evaluation.stats import plain_mean

SIGMA = 0.05
NEIGHBOURS = (10, 15, 20, 25, 30)
"""Values of k to choose from."""
HELD_OUT = 5000
"""Largest number of images of the database that choose k."""
LEAST = 1e-6
"""Probabilities are clamped to [LEAST, 1 − LEAST]."""
PAIRS = 2**22
"""Number of similarities ranked at a time."""


def average_precision(relevant: Tensor) -> Tensor:
    """Return AP (B,) = mean over relevant ranks r of (relevant among the first r)/r.

    relevant: (B, N) bool in ranked order, at least one in every row.
    """
    ranks = torch.arange(1, relevant.shape[1] + 1, device=relevant.device)
    precision = relevant.cumsum(1).double() / ranks
    return (precision * relevant).sum(1) / relevant.sum(1)


def choose_k(bank: Tensor, labels: Tensor, num_classes: int) -> int:
    """Return the k that best classifies held-out rows of the bank (N, D) by the others; the first of equals."""
    database, held_out = hold_out(labels.cpu(), 0.1)
    held_out = held_out[choose_balanced(labels.cpu()[held_out], min(HELD_OUT, len(held_out)), "held-out images")]
    possible = [k for k in NEIGHBOURS if k <= len(database)] or [len(database)]
    correct = dict.fromkeys(possible, 0)
    for queries, targets in zip(bank[held_out].split(256), labels[held_out].split(256), strict=True):
        for k, predicted in knn.votes(queries, bank[database], labels[database], possible, num_classes, SIGMA):
            correct[k] += int((predicted == targets).sum())
    return max(possible, key=lambda k: correct[k])


def rankings(cosines: Tensor, coarse: tuple[Tensor, Tensor] | None) -> Iterator[tuple[str, Tensor]]:
    """Yield metrics and the scores (B, N) that rank the database.

    cosines: (B, N). coarse: (B, N) probabilities of a query to be of the coarse class of each image, and True where it
    is.
    """
    yield "map", cosines
    if coarse is not None:
        probabilities, same = coarse
        yield "map/conditioned", cosines + probabilities.logit(LEAST)
        yield "map/oracle", cosines + 4.0 * same  # cosines differ by 2 at most


@evaluates("retrieval", sources=knn.sources_knn, statistics={"neighbours": plain_mean}, takes_other_labels=True)
def score_retrieval(batch: Batch) -> Iterator[Score]:
    """Score top1, neighbours (the chosen k) and map; with coarse classes also map/conditioned and map/oracle."""
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
        predicted = knn.posterior(similarities, neighbours, len(data.classes), SIGMA).argmax(1)
        yield Score(name, "top1", (predicted == batch.labels).float())
        yield Score(name, "neighbours", torch.full((len(batch),), float(k)))
        if data.groups is not None:
            coarse_of, classes = data.groups.of.to(labels.device), len(data.groups.names)
            if (logits := coarse_logits(batch, name, classes)) is None:
                posterior = knn.posterior(similarities, coarse_of[neighbours], classes, SIGMA)
            else:
                posterior = logits.softmax(1)
        precisions: dict[str, list[Tensor]] = {}
        for part in torch.arange(len(batch), device=labels.device).split(max(1, PAIRS // len(bank))):
            coarse = None
            if data.groups is not None:
                coarse_labels = coarse_of[labels]
                coarse = posterior[part][:, coarse_labels], coarse_of[batch.labels[part, None]] == coarse_labels
            same = batch.labels[part, None] == labels
            for metric, scores in rankings(queries[part] @ bank.T, coarse):
                order = scores.argsort(dim=1, descending=True, stable=True)
                precisions.setdefault(metric, []).append(average_precision(same.gather(1, order)))
        yield from (Score(name, metric, torch.cat(values)) for metric, values in precisions.items())


@torch.no_grad()
def coarse_logits(batch: Batch, name: str, classes: int) -> Tensor | None:
    """Return logits (B, coarse classes) of a classifier trained on coarse labels; None for other networks."""
    model = batch.models[name]
    if name in batch.context.with_new_classifier or knn.embedder(model) is not None:
        return None
    logits = model(batch.images)
    return logits.float() if logits.shape == (len(batch), classes) else None
