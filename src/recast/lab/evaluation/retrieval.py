"""What the features of the training images hold (Grafit, sections 2.3 and 2.6): suites `retrieval` and `separability`.

`retrieval`: images of the same class among all training images, by cosine similarity.

mAP: a query ranks the whole database; its average precision is the mean, over all images of its class, of the share of
that class down to each. Where the coarse class c of every class is known, two further rankings:

    conditioned   ψ(x', x) = cos(g(x'), g(x)) + log(p(c_x | x') / (1 − p(c_x | x')))
    oracle        the images of the query's own coarse class first, by cosine within

top1: nearest neighbours vote with exp(cos/σ), σ = 0.05, k of them; k is chosen on held-out images of the database.

`separability`: what they hold beside their classes.

halves    every class is split into two random halves, and a linear classifier has to tell all halves apart: its
          accuracy on the very images it was fitted to, a mean over ten draws, 50 % and a little more where images of a
          class have collapsed to a point; `conditioned` on the class, what it says of a half is multiplied by what a
          linear classifier of the classes says of the half's class
energy    share of the variance of the features in their first K principal components
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
"""What k is chosen among."""
HELD_OUT = 5000
"""At most so many images of the database choose k."""
LEAST = 1e-6
"""Probabilities lie between this and 1 minus this."""
PAIRS = 2**22
"""Similarities that are ranked at a time."""
ON_PLANE = 1000
DRAWS = 10
"""Of halves."""
DECAY = 1e-4
"""Of the linear classifier of halves, on features of length √D."""


def average_precision(relevant: Tensor) -> Tensor:
    """AP (B,) = mean over the relevant ranks r of (relevant among the first r)/r, of (B, N) bool in ranked order.

    All relevant images count, and there is at least one in every row.
    """
    ranks = torch.arange(1, relevant.shape[1] + 1, device=relevant.device)
    precision = relevant.cumsum(1).double() / ranks
    return (precision * relevant).sum(1) / relevant.sum(1)


def choose_k(bank: Tensor, labels: Tensor, num_classes: int, ks: Sequence[int] = NEIGHBOURS) -> int:
    """The k with which held-out rows of the bank (N, D) are best classified by the others; the smallest of equals."""
    kept, held = knn.to_choose_on(labels, "retrieval chooses k")
    held = held[choose_balanced(labels.cpu()[held], min(HELD_OUT, len(held)), "held-out images")]
    if not (possible := [k for k in ks if k <= len(kept)]):
        raise RecastError(
            f"retrieval chooses k from {', '.join(map(str, ks))} nearest images, and the database without its held-out "
            f"part has {len(kept)}: give it more training images"
        )
    right = dict.fromkeys(possible, 0)
    others, theirs = bank[kept], labels[kept]
    for queries, own in zip(bank[held].split(256), labels[held].split(256), strict=True):
        similarities, indices = knn.nearest(queries, others, max(possible))
        for k, classes in knn.vote(similarities, theirs[indices], possible, num_classes, SIGMA).items():
            right[k] += int((classes == own).sum())
    return max(possible, key=lambda k: right[k])


class Above(NamedTuple):
    """The coarse classes of a batch and of the database."""

    own: Tensor
    """(B,): those of the queries, which the oracle is told."""
    bank: Tensor
    """(N,)"""
    posterior: Tensor
    """(B, coarse classes): what the network makes of the queries."""


def rankings(cosines: Tensor, above: Above | None) -> Iterator[tuple[str, Tensor]]:
    """Metric and scores (B, N) by which the database is ranked, of cosines (B, N)."""
    yield "map", cosines
    if above is not None:
        odds = above.posterior.clamp(LEAST, 1 - LEAST).logit()
        yield "map/conditioned", cosines + odds[:, above.bank]
        yield "map/oracle", cosines + 4.0 * (above.own[:, None] == above.bank)  # cosines differ by 2 at most


def score_retrieval(batch: Batch) -> Iterator[Score]:
    """map and top1; map/conditioned and map/oracle where the coarse classes are known; the k that was chosen."""
    context, found = batch.context, knn.banks(batch)
    data, chosen = context.data, context.store.setdefault("k", {})
    for name, model in batch.models.items():
        bank, labels = found[name]
        absent = batch.labels[~torch.isin(batch.labels, labels)]
        if len(absent):
            raise RecastError(
                f"class {data.classes[int(absent[0])]} has validation images but no training image: retrieval finds "
                "images of a query's class, so every class must be in the database"
            )
        if name not in chosen:
            chosen[name] = choose_k(bank, labels, len(data.classes))
        k, queries = chosen[name], knn.unit_features(context, model, batch.images)
        similarities, indices = knn.nearest(queries, bank, k)
        near = labels[indices]
        voted = knn.vote(similarities, near, (k,), len(data.classes), SIGMA)[k]
        yield Score(name, "top1", (voted == batch.labels).float())
        yield Score(name, "neighbours", torch.full((len(batch),), float(k)))
        above = None
        if data.coarse is not None:
            of, classes = data.coarse.of.to(labels.device), len(data.coarse.names)
            given = coarse_logits(batch, name, classes)
            told = knn.posterior(similarities, of[near], classes, SIGMA) if given is None else given.softmax(1)
            above = Above(of[batch.labels], of[labels], told)
        precisions: dict[str, list[Tensor]] = {}
        for part in torch.arange(len(batch), device=labels.device).split(max(1, PAIRS // len(bank))):
            some = None if above is None else Above(above.own[part], above.bank, above.posterior[part])
            same = batch.labels[part, None] == labels
            for metric, scores in rankings(queries[part] @ bank.T, some):
                order = scores.argsort(dim=1, descending=True, stable=True)
                precisions.setdefault(metric, []).append(average_precision(same.gather(1, order)))
        yield from (Score(name, metric, torch.cat(values)) for metric, values in precisions.items())


def coarse_logits(batch: Batch, name: str, classes: int) -> Tensor | None:
    """(B, coarse classes) of a classifier that was trained on coarse labels; None of an embedding, a new classifier or
    another network, whose neighbours tell the coarse class."""
    model = batch.models[name]
    if name in batch.context.untaught or knn.embedder(model) is not None:
        return None
    with torch.no_grad():
        logits = model(batch.images)
    return logits.float() if logits.shape == (len(batch), classes) else None


def measure_separability(context: Context) -> Iterator[tuple[str, str, float, int]]:
    """halves, halves/conditioned and energy@K, in percent, K a power of two."""
    (source,) = knn.sources_knn(context)
    with in_eval(*context.models.values()):
        found = knn.banks(Batch(context, source, 0, torch.empty(0), torch.empty(0)))
    for name, (bank, labels) in found.items():
        draws = [halves_told(bank, labels, context.options.seed + draw) for draw in range(DRAWS)]
        for metric, values in zip(("halves", "halves/conditioned"), zip(*draws, strict=True), strict=True):
            yield name, metric, 100 * sum(values) / DRAWS, len(bank)
        energies = energy(bank)
        for power in range(len(energies).bit_length()):
            yield name, f"energy@{2**power}", 100 * float(energies[2**power - 1]), len(bank)


def tabulate_tsne(context: Context) -> Table:
    """t-SNE (van der Maaten and Hinton 2008) of the features of at most `ON_PLANE` validation images, by cosine.

    scikit-learn's, from the principal components, with a perplexity of 30 or a third of the images.
    """
    manifold = optional_package("sklearn.manifold", "scikit-learn", "tsne needs scikit-learn", NotMeasured)
    images = sampled(context.data.val, context.options.num_images or ON_PLANE)
    if len(images) < 10:
        raise NotMeasured(f"tsne lays out 10 images or more, {context.data.name} has {len(images)}")
    lines = []
    for name, model in context.models.items():
        batches = context.batches(Source(images))
        found = torch.cat([knn.unit_features(context, model, batch.images) for batch in batches])
        tsne = manifold.TSNE(
            init="pca", metric="cosine", perplexity=min(30.0, (len(found) - 1) / 3), random_state=context.options.seed
        )
        places = tsne.fit_transform(found.cpu().double().numpy())
        lines += [PlaneLine(name, i, int(images.labels[i]), *map(float, place)) for i, place in enumerate(places)]
    return Table.of("tsne", PlaneLine, lines)


def halves_told(bank: Tensor, labels: Tensor, seed: int) -> tuple[float, float]:
    """Shares of the rows (N, D) of a bank whose half is told among all halves: alone, and conditioned on the class."""
    classes = int(labels.max()) + 1
    halves = 2 * labels + random_halves(labels.cpu(), seed).to(labels.device)
    x = bank * bank.shape[1] ** 0.5
    alone = knn.fit_probe(x, halves, 2 * classes, DECAY)(x).log_softmax(1)
    coarse = knn.fit_probe(x, labels, classes, DECAY)(x).log_softmax(1)
    conditioned = alone + coarse.repeat_interleave(2, 1)
    return float((alone.argmax(1) == halves).float().mean()), float((conditioned.argmax(1) == halves).float().mean())


def random_halves(labels: Tensor, seed: int) -> Tensor:
    """(N,) 0 or 1: of every class a random half, the larger one 0 where the number is odd."""
    found = torch.zeros_like(labels)
    for own in shuffled_classes(labels, seed)[1]:
        found[own[(len(own) + 1) // 2 :]] = 1
    return found


def energy(x: Tensor) -> Tensor:
    """(D,) cumulative shares of the variance of x (N, D) in its principal components, largest first."""
    variances = torch.linalg.eigvalsh(x.double().T.cov()).flip(0).clamp(min=0)
    return variances.cumsum(0) / variances.sum()
