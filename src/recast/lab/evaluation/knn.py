"""Suite `knn`: classification of features by nearest training images.

Features are the input of the classifier, averaged over positions and of length 1. The k training images with the
largest cosine similarity s vote with exp(s/0.07) each (Wu et al. 2018, arXiv:1805.01978, Sec. 3.4; DINO, Caron et al.
2021, arXiv:2104.14294). The bank is the training images without augmentation, 4·N·D bytes for each model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recast.errors import RecastError
from recast.lab.data import Data
from recast.lab.data.datasets import ImageFiles, ImageTensors, LabelledImages
from recast.lab.evaluation.context import Batch, Context, NotMeasured, PixelModel, Score, Source
from recast.lab.evaluation.derived_images import ResizedImages
from recast.lab.evaluation.evaluators import evaluates
from recast.models.adapt import classifiers
from recast.tracing.hooks import captured_inputs, named

TEMPERATURE = 0.07


class Embedder(nn.Module):
    """Classifier head that also computes an embedding, which replaces the features here."""

    def embedding(self, features: Tensor) -> Tensor:
        """Return the embeddings (B, D) of features (B, width), not yet of length 1."""
        raise NotImplementedError


def embedder(model: nn.Module) -> Embedder | None:
    """Return the head of a network that computes an embedding, or None."""
    return next((module for module in model.modules() if isinstance(module, Embedder)), None)


@torch.no_grad()
def features(model: nn.Module, images: Tensor, num_classes: int | None = None) -> Tensor:
    """Return the inputs of the classifier averaged over positions, (B, D) float32, or the embedding of an `Embedder`.

    For timm's networks this is forward_head(forward_features(x), pre_logits=True). With several classifiers (a
    distilled DeiT) it is the mean of their inputs. Raises RecastError if there is no known classifier
    (`recast.models.adapt.classifiers`), or the forward pass does not call it.
    """
    network = model.model if isinstance(model, PixelModel) else model
    layers = named(network, classifiers(network, num_classes))
    with captured_inputs(layers) as captured:
        model(images)
    inputs = [_vectors(x, not isinstance(layer, nn.Linear)) for name, layer in layers for x in captured.get(name, ())]
    if not inputs or any(x.shape != inputs[0].shape or len(x) != len(images) for x in inputs):
        raise RecastError(
            f"no features of {type(network).__name__}: its forward pass must call the classifier once with all images"
        )
    mean, head = torch.stack(inputs).mean(0), embedder(network)
    return mean if head is None else head.embedding(mean)


def _vectors(x: Tensor, channels_first: bool) -> Tensor:
    """Return means over positions (B, D) of (B, D, ...) if channels come first, else of (B, ..., D)."""
    x = x.float()
    if x.ndim == 2:
        return x
    return x.flatten(2).mean(2) if channels_first else x.flatten(1, -2).mean(1)


def nearest(queries: Tensor, bank: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return similarities (B, k), largest first, and indices (B, k) of the rows of `bank` (N, D) nearest to (B, D)."""
    best = (queries @ bank.T).topk(min(k, len(bank)), dim=1)
    return best.values, best.indices


def posterior(similarities: Tensor, labels: Tensor, num_classes: int, temperature: float) -> Tensor:
    """Return (B, classes) ∝ Σ exp(s/τ) over the neighbours of a class: similarities s and labels (B, k)."""
    weights = (similarities / temperature).softmax(1)
    shares = torch.zeros(len(labels), num_classes, dtype=weights.dtype, device=weights.device)
    return shares.scatter_add_(1, labels, weights)


def votes(
    queries: Tensor, bank: Tensor, labels: Tensor, ks: Sequence[int], num_classes: int, temperature: float
) -> Iterator[tuple[int, Tensor]]:
    """Yield every k and the classes (B,) that the k rows of `bank` nearest to the queries vote for."""
    similarities, indices = nearest(queries, bank, max(ks))
    for k in ks:
        yield k, posterior(similarities[:, :k], labels[indices[:, :k]], num_classes, temperature).argmax(1)


def sources_knn(context: Context) -> list[Source]:
    """Return the validation images. Raises NotMeasured without training images."""
    data = context.data
    if not len(data.train):
        raise NotMeasured(
            f"knn and retrieval require training images, {data.name} has none; use data with a training part"
        )
    return [replace(context.validation, depends=(bank_images(data),))]


@evaluates("knn", sources=sources_knn, uses=("neighbours",), takes_other_labels=True)
def score_knn(batch: Batch) -> Iterator[Score]:
    """Score top1@K for every k. Raises RecastError for a k above the number of training images."""
    ks, count = batch.options.neighbours, len(batch.source.depends[0])
    if max(ks) > count:
        raise RecastError(f"neighbours must be between 1 and {count} (training images), got {max(ks)}")
    bank_of = banks(batch)
    for name, model in batch.models.items():
        queries = unit_features(batch.context, model, batch.images)
        for k, predicted in votes(queries, *bank_of[name], ks, len(batch.context.data.classes), TEMPERATURE):
            yield Score(name, f"top1@{k}", (predicted == batch.labels).float())


def bank_images(data: Data) -> LabelledImages:
    """Return the training images without augmentation at the test size."""
    images = data.train.plain()
    if data.img_size == data.test_size or not isinstance(images, ImageFiles | ImageTensors):
        return images
    return ResizedImages(images, (data.test_size, data.test_size))


def unit_features(context: Context, model: nn.Module, images: Tensor) -> Tensor:
    """Return `features` of length 1."""
    # with groups of classes, or other labels than those of the training, the number of outputs is not known
    is_known = context.data.groups is None and not context.data.is_relabelled
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
