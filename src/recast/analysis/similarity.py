"""How alike the layers of two networks are: linear CKA, over batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recast.analysis.batches import Batches, Images, each_batch
from recast.analysis.blocks import BlockSequence, device_of
from recast.errors import RecastError
from recast.run.records import SimilarityLine, Table
from recast.tracing.hooks import in_eval

MIN_IMAGES = 4
"""The unbiased estimate needs so many in a batch."""


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
    images: Images,
    layers_a: Sequence[str] | None = None,
    layers_b: Sequence[str] | None = None,
) -> Similarity:
    """Linear CKA between layers of two models on the same images, in the mean over batches.

        CKA = Σ_i HSIC₁(K_i, L_i) / √(Σ_i HSIC₁(K_i, K_i) · Σ_i HSIC₁(L_i, L_i))      K_i = X_i X_iᵀ, L_i = Y_i Y_iᵀ

    X_i (n, features) are a layer's outputs for batch i, flattened; HSIC₁ is the unbiased estimate of Song et al. 2012,
    so the result does not depend on the size of the batches in the mean (Nguyen et al. 2021, Do Wide and Deep Networks
    Learn the Same Things?, Eq. 2-4; Kornblith et al. 2019). It does not change when features are rotated or scaled.
    Batches count by their pairs of images, n(n − 3), so that a small last one weighs little.

    images: what both models take, a batch or an iterable of batches of at least 4 images, of hundreds better; a
    smaller last one is left out. Only n×n matrices are kept, one a layer.
    layers_a, layers_b: module names; None: before the first block, and after each (`BlockSequence`).

    Raises `RecastError` for layers that are not there and where no batch has four images.
    """
    both = _Pass({"a": model_a, "b": model_b}, {"a": layers_a, "b": layers_b}, [("a", "b")])
    for batch in each_batch(images):
        both.add(batch)
    return both.similarity("a", "b")


def tabulate_cka(models: Mapping[str, nn.Module], batches: Batches) -> Table:
    """CKA between all layers of the first model and itself, and of the first with every other, as
    RUN/analysis/cka.csv: a row a pair of layers, in one pass over the images. Raises `RecastError` as `cka` does."""
    first = next(iter(models))
    pairs = [(first, other) for other in models]
    one_pass = _Pass(models, dict.fromkeys(models), pairs)
    for batch in each_batch(batches()):
        one_pass.add(batch)
    rows: list[SimilarityLine] = []
    for a, b in pairs:
        found = one_pass.similarity(a, b)
        for layer_a, values in zip(found.layers_a, found.cka.tolist(), strict=True):
            for layer_b, value in zip(found.layers_b, values, strict=True):
                rows.append(SimilarityLine(a, layer_a, b, layer_b, value if value == value else None, found.n))
    return Table.of("cka", SimilarityLine, rows)


class _Pass:
    """Sums of HSIC₁ between layers of pairs of models."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        layers: Mapping[str, Sequence[str] | None],
        pairs: Sequence[tuple[str, str]],
    ) -> None:
        self._sequences = {name: BlockSequence(model, layers[name]) for name, model in models.items()}
        self._names: dict[str, tuple[str, ...]] = {}
        self._pairs = pairs
        self._between: dict[tuple[str, str], Tensor] = {}
        self._within: dict[str, Tensor] = {}
        self._n = 0

    @torch.no_grad()
    def add(self, images: Tensor) -> None:
        n = len(images)
        if n < MIN_IMAGES:
            return
        grams = {name: self._grams(name, images) for name in self._sequences}
        # HSIC₁ = Σ_{i≠j} K̃_ij L̃_ij / (n(n−3)), times the batch's weight n(n−3)
        for name, flat in grams.items():
            own = flat.square().sum(1)
            self._within[name] = self._within[name] + own if name in self._within else own
        for a, b in self._pairs:
            shared = grams[a] @ grams[b].T
            self._between[a, b] = self._between[a, b] + shared if (a, b) in self._between else shared
        self._n += n

    def _grams(self, name: str, images: Tensor) -> Tensor:
        """(layers, n²): the U-centred Gram matrix of every layer."""
        found: dict[str, Tensor] = {}
        sequence = self._sequences[name]
        with in_eval(sequence.model), sequence.watched(lambda at, x: found.update({at: centred_gram(x)})):
            sequence.model(images.to(device_of(sequence.model)))
        if not found:
            raise RecastError(f"none of the layers of model {name!r} ran, or none gave a tensor")
        self._names[name] = tuple(found)
        return torch.stack([gram.flatten() for gram in found.values()])

    def similarity(self, a: str, b: str) -> Similarity:
        if not self._n:
            raise RecastError(f"CKA needs batches of at least {MIN_IMAGES} images, of hundreds better: got none")
        norm = (self._within[a][:, None] * self._within[b][None]).sqrt()
        values = torch.where(norm > 0, self._between[a, b] / norm, torch.nan)
        return Similarity(self._names[a], self._names[b], values, self._n)


def centred_gram(x: Tensor) -> Tensor:
    """The U-centred Gram matrix of n outputs, (n, …) → (n, n) in float64 on the CPU:

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
