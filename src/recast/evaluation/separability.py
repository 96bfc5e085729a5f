"""Suite `separability`: what the features of the training images hold beside their classes (Grafit, sections 2.3, 2.6).

halves    every class is split into two random halves, and a linear classifier has to tell all halves apart: its
          accuracy on the very images it was fitted to, a mean over ten draws; `given` its class, it chooses between
          two halves: 50 % and a little more where images of a class have collapsed to a point
energy    share of the variance of the features in their first K principal components
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from recast.evaluation.context import Batch, Context
from recast.evaluation.knn import banks, fit_probe, sources_knn
from recast.tracing.hooks import in_eval

DRAWS = 10
DECAY = 1e-4
"""Of the linear classifier, on features of length √D."""


def measure_separability(context: Context) -> Iterator[tuple[str, str, float, int]]:
    """halves, halves/given and energy@K, in percent, K a power of two."""
    (source,) = sources_knn(context)
    with in_eval(*context.models.values()):
        found = banks(Batch(context, source, 0, torch.empty(0), torch.empty(0)))
    for name, (bank, labels) in found.items():
        draws = [halves_told(bank, labels, context.options.seed + draw) for draw in range(DRAWS)]
        for metric, values in zip(("halves", "halves/given"), zip(*draws, strict=True), strict=True):
            yield name, metric, 100 * sum(values) / DRAWS, len(bank)
        energies = energy(bank)
        for power in range(len(energies).bit_length()):
            yield name, f"energy@{2**power}", 100 * float(energies[2**power - 1]), len(bank)


def halves_told(bank: Tensor, labels: Tensor, seed: int) -> tuple[float, float]:
    """Shares of the rows (N, D) of a bank whose half is told among all halves, and among the two of its class."""
    classes = int(labels.max()) + 1
    halves = 2 * labels + random_halves(labels.cpu(), seed).to(labels.device)
    x = bank * bank.shape[1] ** 0.5
    logits = fit_probe(x, halves, 2 * classes, DECAY)(x)
    within = logits.view(len(x), classes, 2)[torch.arange(len(x), device=labels.device), labels].argmax(1)
    return float((logits.argmax(1) == halves).float().mean()), float((within == halves % 2).float().mean())


def random_halves(labels: Tensor, seed: int) -> Tensor:
    """(N,) 0 or 1: of every class a random half, the larger one 0 where the number is odd."""
    found = torch.zeros_like(labels)
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    for label in labels.unique():
        own = shuffled[labels[shuffled] == label]
        found[own[(len(own) + 1) // 2 :]] = 1
    return found


def energy(x: Tensor) -> Tensor:
    """(D,) cumulative shares of the variance of x (N, D) in its principal components, largest first."""
    variances = torch.linalg.eigvalsh(x.double().T.cov()).flip(0).clamp(min=0)
    return variances.cumsum(0) / variances.sum()
