"""Similarity of the layers of two networks: linear CKA over batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recast.errors import RecastError
from recast.lab.analysis.blocks import BlockSequence, ImageBatches, each_batch
from recast.lab.folder.records import SimilarityLine
from recast.lab.folder.tables import Table

MIN_IMAGES = 4
"""Smallest batch for which the unbiased estimate is defined."""


@dataclass(frozen=True)
class Similarity:
    """CKA of every layer of one model with every layer of another."""

    layers_a: tuple[str, ...]
    layers_b: tuple[str, ...]
    cka: Tensor
    """(layers of a, layers of b), float64: 0 unlike, 1 alike, NaN for a layer that is the same for all images."""
    n: int
    """Images behind it."""


def cka(
    model_a: nn.Module,
    model_b: nn.Module,
    images: ImageBatches,
    layers_a: Sequence[str] | None = None,
    layers_b: Sequence[str] | None = None,
) -> Similarity:
    """Compute linear CKA between layers of two models on the same images, in the mean over batches.

        CKA = Σ_i HSIC₁(K_i, L_i) / √(Σ_i HSIC₁(K_i, K_i) · Σ_i HSIC₁(L_i, L_i))      K_i = X_i X_iᵀ, L_i = Y_i Y_iᵀ

    X_i (n, features) are a layer's outputs for batch i, flattened; HSIC₁ is the unbiased estimate of Song et al. 2012,
    so the result does not depend on the size of the batches in the mean (Nguyen et al. 2021, Do Wide and Deep Networks
    Learn the Same Things?, Eq. 2-4; Kornblith et al. 2019). It does not change when features are rotated or scaled.
    Batches count by their pairs of images, n(n − 3), so that a small last one weighs little.

    Args:
        images: input of both models, a batch or an iterable of batches of at least 4 images, better of hundreds.
            Smaller batches are skipped. Only n×n matrices are stored, one per layer.
        layers_a, layers_b: module names; None: before the first block, and after each (`BlockSequence`).

    Raises:
        RecastError: for missing layers, and if no batch has four images.
    """
    models, layers = {"a": model_a, "b": model_b}, {"a": layers_a, "b": layers_b}
    return _similarities(models, layers, [("a", "b")], images)[0]


def tabulate_cka(models: Mapping[str, nn.Module], images: ImageBatches) -> Table:
    """Return RUN/analysis/cka.csv: the first model against itself and every other, a row per pair of layers.

    All models go over the images in one pass. Raises `RecastError` as `cka` does.
    """
    pairs = [(next(iter(models)), other) for other in models]
    lines = [
        SimilarityLine(a, layer_a, b, layer_b, None if math.isnan(value) else value, similarity.n)
        for (a, b), similarity in zip(pairs, _similarities(models, {}, pairs, images), strict=True)
        for layer_a, values in zip(similarity.layers_a, similarity.cka.tolist(), strict=True)
        for layer_b, value in zip(similarity.layers_b, values, strict=True)
    ]
    return Table.of("cka", SimilarityLine, lines)


def _similarities(
    models: Mapping[str, nn.Module],
    layers: Mapping[str, Sequence[str] | None],
    pairs: Sequence[tuple[str, str]],
    images: ImageBatches,
) -> list[Similarity]:
    """Compute the CKA of pairs of models in one pass over the images."""
    sequences = {name: BlockSequence(model, layers.get(name)) for name, model in models.items()}
    names: dict[str, tuple[str, ...]] = {}
    within: dict[str, Tensor] = {}
    between: dict[tuple[str, str], Tensor] = {}
    n = 0
    for batch in each_batch(images):
        if len(batch) < MIN_IMAGES:
            continue
        n += len(batch)
        grams: dict[str, Tensor] = {}
        # HSIC₁ = Σ_{i≠j} K̃_ij L̃_ij / (n(n−3)), times the batch's weight n(n−3)
        for name, sequence in sequences.items():
            names[name], grams[name] = _grams(name, sequence, batch)
            within[name] = within.get(name, 0) + grams[name].square().sum(1)
        for a, b in pairs:
            between[a, b] = between.get((a, b), 0) + grams[a] @ grams[b].T
    if not n:
        raise RecastError(f"CKA requires batches of at least {MIN_IMAGES} images, got none")
    norms = {(a, b): (within[a][:, None] * within[b][None]).sqrt() for a, b in pairs}
    return [
        Similarity(names[a], names[b], torch.where(norm > 0, between[a, b] / norm, torch.nan), n)
        for (a, b), norm in norms.items()
    ]


def _grams(name: str, sequence: BlockSequence, images: Tensor) -> tuple[tuple[str, ...], Tensor]:
    """Return the names of a model's layers, and the U-centred Gram matrix of each, (layers, n²)."""
    grams: dict[str, Tensor] = {}
    sequence.run(images, lambda at, x: grams.update({at: centred_gram(x).flatten()}))
    if not grams:
        raise RecastError(f"no layer of model {name!r} ran and returned a tensor: pass other layers")
    return tuple(grams), torch.stack(list(grams.values()))


def centred_gram(x: Tensor) -> Tensor:
    """Compute the U-centred Gram matrix of n outputs, (n, …) → (n, n) in float64 on the CPU:

        K̃_ij = K_ij − Σ_l K_il/(n−2) − Σ_l K_lj/(n−2) + Σ_kl K_kl/((n−1)(n−2)) for i ≠ j, else 0; K_ii = 0

    (Székely & Rizzo 2014), with Σ_ij K̃_ij L̃_ij / (n(n−3)) = HSIC₁(K, L).
    """
    features = x.flatten(1).to(torch.promote_types(x.dtype, torch.float32))
    # K̃ does not change with the features' mean, but its digits would be lost to it
    features = features - features.mean(0)
    gram = (features @ features.T).cpu().double().fill_diagonal_(0)
    n = len(gram)
    rows = gram.sum(1)
    gram = gram - (rows[:, None] + rows) / (n - 2) + rows.sum() / ((n - 1) * (n - 2))
    return gram.fill_diagonal_(0)
