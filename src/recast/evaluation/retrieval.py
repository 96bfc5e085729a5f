"""Suite `retrieval`: images of the same class among all training images, by cosine similarity (Grafit, section 2.6).

mAP: a query ranks the whole database; its average precision is the mean, over all images of its class, of the share of
that class down to each. Where the coarse class c of every class is known, two further rankings:

    conditioned   ψ(x', x) = cos(g(x'), g(x)) + log(p(c_x | x') / (1 − p(c_x | x')))
    oracle        the images of the query's own coarse class first, by cosine within

top1: nearest neighbours vote with exp(cos/σ), σ = 0.05, k of them; k is chosen on held-out images of the database.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recast.data.seeding import choose_balanced
from recast.errors import RecastError
from recast.evaluation.context import Batch, Score
from recast.evaluation.knn import banks, nearest, outputs_of, posterior, to_choose_on, unit_features, vote
from recast.models.embedding import embedding_head

SIGMA = 0.05
NEIGHBOURS = (10, 15, 20, 25, 30)
"""What k is chosen among."""
HELD_OUT = 5000
"""At most so many images of the database choose k."""
LEAST = 1e-6
"""Probabilities lie between this and 1 minus this."""
PAIRS = 2**22
"""Similarities that are ranked at a time."""


def average_precision(relevant: Tensor) -> Tensor:
    """AP (B,) = mean over the relevant ranks r of (relevant among the first r)/r, of (B, N) bool in ranked order.

    All relevant images count, and there is at least one in every row.
    """
    ranks = torch.arange(1, relevant.shape[1] + 1, device=relevant.device)
    precision = relevant.cumsum(1).double() / ranks
    return (precision * relevant).sum(1) / relevant.sum(1)


def choose_k(bank: Tensor, labels: Tensor, num_classes: int, ks: Sequence[int] = NEIGHBOURS) -> int:
    """The k with which held-out rows of the bank (N, D) are best classified by the others; the smallest of equals."""
    kept, held = to_choose_on(labels, "retrieval chooses k")
    held = held[choose_balanced(labels.cpu()[held], min(HELD_OUT, len(held)), "held-out images")]
    if not (possible := [k for k in ks if k <= len(kept)]):
        raise RecastError(
            f"retrieval chooses k from {', '.join(map(str, ks))} nearest images, and the database without its held-out "
            f"part has {len(kept)}: give it more training images"
        )
    right = dict.fromkeys(possible, 0)
    others, theirs = bank[kept], labels[kept]
    for queries, own in zip(bank[held].split(256), labels[held].split(256), strict=True):
        similarities, indices = nearest(queries, others, max(possible))
        for k, classes in vote(similarities, theirs[indices], possible, num_classes, SIGMA).items():
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
    context, found = batch.context, banks(batch)
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
        k, queries = chosen[name], unit_features(model, batch.images, outputs_of(context))
        similarities, indices = nearest(queries, bank, k)
        near = labels[indices]
        voted = vote(similarities, near, (k,), len(data.classes), SIGMA)[k]
        yield Score(name, "top1", (voted == batch.labels).float())
        yield Score(name, "neighbours", torch.full((len(batch),), float(k)))
        above = None
        if data.coarse is not None:
            of, classes = data.coarse.of.to(labels.device), len(data.coarse.names)
            given = coarse_logits(batch, name, classes)
            told = posterior(similarities, of[near], classes, SIGMA) if given is None else given.softmax(1)
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
    """(B, coarse classes) of a classifier that was trained on coarse labels; None of an embedding or another network,
    whose neighbours tell the coarse class."""
    model = batch.models[name]
    if embedding_head(model) is not None:
        return None
    with torch.no_grad():
        logits = model(batch.images)
    return logits.float() if logits.shape == (len(batch), classes) else None
