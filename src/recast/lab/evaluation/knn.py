"""Suites `knn` and `linear`: classification of features by nearest training images and by a linear classifier.

Features are the input of the classifier, averaged over positions and of length 1. The k training images with the
largest cosine similarity s vote with exp(s/0.07) each (Wu et al. 2018, arXiv:1805.01978, Sec. 3.4; DINO, Caron et al.
2021, arXiv:2104.14294). The bank is the training images without augmentation, 4·N·D bytes for each model.

The linear classifier is multinomial logistic regression on the bank, min mean cross-entropy + λ/2·‖W‖², by L-BFGS. λ is
chosen by accuracy on held-out training images; the final fit uses all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recast.errors import RecastError
from recast.lab.data import Data
from recast.lab.data.datasets import ImageFiles, ImageTensors, LabelledImages
from recast.lab.data.seeding import hold_out
from recast.lab.evaluation.context import Batch, Context, NotMeasured, PixelModel, Score, Source
from recast.lab.evaluation.derived_images import ResizedImages
from recast.models.adapt import classifiers
from recast.tracing.hooks import captured_inputs, named

TEMPERATURE = 0.07
DECAYS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
"""Values of λ to choose from."""
CHUNK = 65_536
"""Number of images of the bank compared at a time."""


class Embedder(nn.Module):
    """Classifier head that also computes an embedding, which replaces the features here."""

    def embedding(self, features: Tensor) -> Tensor:
        """Return the embeddings (B, D) of features (B, width), not yet of length 1."""
        raise NotImplementedError


def embedder(model: nn.Module) -> Embedder | None:
    """Return the head of a network that computes an embedding, or None."""
    return next((module for module in model.modules() if isinstance(module, Embedder)), None)


def features(model: nn.Module, images: Tensor, num_classes: int | None = None) -> Tensor:
    """Return the inputs of the classifier averaged over positions, (B, D) float32, or the embedding of an `Embedder`.

    For timm's networks this is forward_head(forward_features(x), pre_logits=True). With several classifiers (a
    distilled DeiT) it is the mean of their inputs. Raises RecastError if there is no known classifier
    (`recast.models.adapt.classifiers`), or the forward pass does not call it.
    """
    network = model.model if isinstance(model, PixelModel) else model
    layers = named(network, classifiers(network, num_classes))
    with captured_inputs(layers) as captured, torch.no_grad():
        model(images)
    inputs = [_vectors(x, not isinstance(layer, nn.Linear)) for name, layer in layers for x in captured.get(name, ())]
    if not inputs or any(x.shape != inputs[0].shape or len(x) != len(images) for x in inputs):
        raise RecastError(
            f"no features of {type(network).__name__}: its forward pass must call the classifier once with all images"
        )
    mean = torch.stack(inputs).mean(0)
    if (head := embedder(network)) is None:
        return mean
    with torch.no_grad():
        return head.embedding(mean)


def _vectors(x: Tensor, channels_first: bool) -> Tensor:
    """Return means over positions (B, D) of (B, D, ...) if channels come first, else of (B, ..., D)."""
    x = x.float()
    if x.ndim == 2:
        return x
    return x.flatten(2).mean(2) if channels_first else x.flatten(1, -2).mean(1)


def nearest(queries: Tensor, bank: Tensor, k: int, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Return similarities (B, k), largest first, and indices (B, k) of the rows of `bank` (N, D) nearest to (B, D).

    All rows are unit vectors. Holds at most B·(chunk + k·N/chunk) similarities.
    """
    values, indices = [], []
    for begin, rows in zip(range(0, len(bank), chunk), bank.split(chunk), strict=True):
        top = (queries @ rows.T).topk(min(k, len(rows)), dim=1)
        values.append(top.values)
        indices.append(top.indices + begin)
    best, order = torch.cat(values, 1).topk(min(k, len(bank)), dim=1)
    return best, torch.cat(indices, 1).gather(1, order)


def posterior(similarities: Tensor, labels: Tensor, num_classes: int, temperature: float) -> Tensor:
    """Return (B, classes) ∝ Σ exp(s/τ) over the neighbours of a class: similarities s and labels (B, k)."""
    weights = (similarities / temperature).softmax(1)
    shares = torch.zeros(len(labels), num_classes, dtype=weights.dtype, device=weights.device)
    return shares.scatter_add_(1, labels, weights)


def vote(
    similarities: Tensor, labels: Tensor, ks: Sequence[int], num_classes: int, temperature: float = TEMPERATURE
) -> dict[int, Tensor]:
    """Return {k: likeliest classes (B,)} of similarities (B, K), largest first, and labels (B, K), K ≥ k."""
    return {k: posterior(similarities[:, :k], labels[:, :k], num_classes, temperature).argmax(1) for k in ks}


def sources_knn(context: Context) -> list[Source]:
    """Return the validation images. Raises NotMeasured without training images."""
    data = context.data
    if not len(data.train):
        raise NotMeasured(
            f"knn, retrieval and linear require training images, {data.name} has none; use data with a training part"
        )
    return [replace(context.validation, depends=(bank_images(data),))]


def score_knn(batch: Batch) -> Iterator[Score]:
    """Score top1@K for every k. Raises RecastError for a k above the number of training images."""
    ks, count = batch.options.neighbours, len(batch.source.depends[0])
    if max(ks) > count:
        raise RecastError(f"neighbours must be between 1 and {count} (training images), got {max(ks)}")
    bank_of = banks(batch)
    for name, model in batch.models.items():
        bank, bank_labels = bank_of[name]
        similarities, indices = nearest(unit_features(batch.context, model, batch.images), bank, max(ks))
        for k, classes in vote(similarities, bank_labels[indices], ks, len(batch.context.data.classes)).items():
            yield Score(name, f"top1@{k}", (classes == batch.labels).float())


def score_linear(batch: Batch) -> Iterator[Score]:
    """Score top1 of the linear classifier, and log10 of its weight decay."""
    probes, bank_of = batch.context.store.setdefault("linear", {}), banks(batch)
    for name, model in batch.models.items():
        if name not in probes:
            probes[name] = choose_probe(*bank_of[name], len(batch.context.data.classes))
        probe, decay = probes[name]
        correct = probe(unit_features(batch.context, model, batch.images)).argmax(1) == batch.labels
        yield Score(name, "top1", correct.float())
        yield Score(name, "weight_decay", torch.full((len(batch),), math.log10(decay)))


def choose_probe(bank: Tensor, labels: Tensor, num_classes: int) -> tuple[nn.Linear, float]:
    """Fit a classifier to all rows (N, D) of the bank, with the λ that is best on a held-out tenth (largest of equals).

    Rows of length 1 are scaled to √D, so that λ means the same for every width.
    """
    fitted, held_out = to_choose_on(labels, "linear chooses its weight decay")
    scale = bank.shape[1] ** 0.5
    x = bank * scale
    counts, probe = [], None
    for decay in DECAYS:
        probe = fit_probe(x[fitted], labels[fitted], num_classes, decay, probe)
        counts.append(int((probe(x[held_out]).argmax(1) == labels[held_out]).sum()))
    best = DECAYS[counts.index(max(counts))]
    probe = fit_probe(x, labels, num_classes, best)
    probe.weight.mul_(scale)
    return probe, best


def to_choose_on(labels: Tensor, purpose: str) -> tuple[Tensor, Tensor]:
    """Return indices of nine tenths and one tenth of every class. Raises RecastError if no class has two images."""
    if int(labels.bincount().max()) < 2:
        raise RecastError(f"{purpose} on held-out training images, but every class has a single one; add images")
    return hold_out(labels.cpu(), 0.1)


def fit_probe(x: Tensor, labels: Tensor, num_classes: int, decay: float, start: nn.Linear | None = None) -> nn.Linear:
    """Fit multinomial logistic regression to x (N, D). start: begin of the search for the minimum; None: at 0."""
    probe = nn.Linear(x.shape[1], num_classes, device=x.device, dtype=x.dtype)
    probe.load_state_dict(start.state_dict() if start else {k: v.zero_() for k, v in probe.state_dict().items()})
    optimizer = torch.optim.LBFGS(probe.parameters(), max_iter=200, tolerance_grad=1e-6, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(probe(x), labels) + decay / 2 * probe.weight.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    return probe.requires_grad_(False)


def bank_images(data: Data) -> LabelledImages:
    """Return the training images without augmentation at the test size."""
    images = data.train.plain()
    if data.img_size == data.test_size or not isinstance(images, ImageFiles | ImageTensors):
        return images
    return ResizedImages(images, (data.test_size, data.test_size))


def unit_features(context: Context, model: nn.Module, images: Tensor) -> Tensor:
    """Return `features` of length 1."""
    # with both coarse and fine classes, the number of outputs is not known
    is_known = context.options.labels is None and context.data.coarse is None
    return F.normalize(features(model, images, len(context.data.classes) if is_known else None), dim=1)


def banks(batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """Return unit features (N, D) and labels (N,) of the training images for each model, in one pass over them."""
    context = batch.context
    bank_of: dict[str, tuple[Tensor, Tensor]] = context.store.setdefault("knn", {})
    if vectors := {name: list[Tensor]() for name in batch.models if name not in bank_of}:
        labels = []
        for part in context.batches(Source(batch.source.depends[0])):
            labels.append(part.labels)
            for name, parts in vectors.items():
                parts.append(unit_features(context, context.models[name], part.images))
        bank_of |= {name: (torch.cat(parts), torch.cat(labels)) for name, parts in vectors.items()}
    return bank_of
