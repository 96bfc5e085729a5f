"""Suites `knn` and `linear`: how well the features tell the classes apart, by the nearest training images and by a
linear classifier.

Features are the input of the classifier, averaged over positions and of length 1. The k training images of largest
cosine similarity s vote with exp(s/0.07) each (Wu et al. 2018, arXiv:1805.01978, Sec. 3.4; DINO, Caron et al. 2021,
arXiv:2104.14294). The bank is the training images without augmentation, 4·N·D bytes for each model.

The linear classifier is multinomial logistic regression on the bank, min mean cross-entropy + λ/2·‖W‖², by L-BFGS; λ is
the one with which held-out training images are best classified, and all of them are fitted with it.
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
"""What λ is chosen among."""
CHUNK = 65_536
"""Images of the bank that are compared at a time."""


class Embedder(nn.Module):
    """In a classifier's place: a head that also makes an embedding of the features, which is compared instead."""

    def embedding(self, features: Tensor) -> Tensor:
        """Return the embeddings (B, D) of features (B, width), not yet of length 1."""
        raise NotImplementedError


def embedder(model: nn.Module) -> Embedder | None:
    """Return the head of a network that makes an embedding, where it has one."""
    return next((module for module in model.modules() if isinstance(module, Embedder)), None)


def features(model: nn.Module, images: Tensor, num_classes: int | None = None) -> Tensor:
    """(B, D) float32: what enters the classifier (`recast.models.adapt.classifiers`), averaged over positions; of a
    network that learnt an embedding, that.

    For timm's networks this is forward_head(forward_features(x), pre_logits=True). Where there are several classifiers
    (a distilled DeiT), the mean of their inputs. Raises RecastError if one cannot tell the classifier, or the forward
    pass does not call it.
    """
    network = model.model if isinstance(model, PixelModel) else model
    layers = named(network, classifiers(network, num_classes))
    with captured_inputs(layers) as seen, torch.no_grad():
        model(images)
    entered = [_vectors(x, not isinstance(layer, nn.Linear)) for name, layer in layers for x in seen.get(name, ())]
    if not entered or any(each.shape != entered[0].shape or len(each) != len(images) for each in entered):
        raise RecastError(
            f"no features of {type(network).__name__}: its forward pass must call the classifier once with all images"
        )
    found = torch.stack(entered).mean(0)
    if (head := embedder(network)) is None:
        return found
    with torch.no_grad():
        return head.embedding(found)


def _vectors(x: Tensor, channels_first: bool) -> Tensor:
    """Means over positions: (B, D) from (B, D, ...) if channels come first, else from (B, ..., D)."""
    x = x.float()
    if x.ndim == 2:
        return x
    return x.flatten(2).mean(2) if channels_first else x.flatten(1, -2).mean(1)


def nearest(queries: Tensor, bank: Tensor, k: int, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Similarities (B, k), largest first, and indices (B, k) of the k rows of `bank` (N, D) nearest to each of (B, D).

    Both are unit vectors. Never holds more than B·(chunk + k·N/chunk) similarities.
    """
    values, indices = [], []
    for begin, some in zip(range(0, len(bank), chunk), bank.split(chunk), strict=True):
        found = (queries @ some.T).topk(min(k, len(some)), dim=1)
        values.append(found.values)
        indices.append(found.indices + begin)
    best, order = torch.cat(values, 1).topk(min(k, len(bank)), dim=1)
    return best, torch.cat(indices, 1).gather(1, order)


def posterior(similarities: Tensor, labels: Tensor, num_classes: int, temperature: float) -> Tensor:
    """(B, classes) ∝ Σ exp(s/τ) over a class's images among the neighbours: similarities s and labels (B, k)."""
    weights = (similarities / temperature).softmax(1)
    shares = torch.zeros(len(labels), num_classes, dtype=weights.dtype, device=weights.device)
    return shares.scatter_add_(1, labels, weights)


def vote(
    similarities: Tensor, labels: Tensor, ks: Sequence[int], num_classes: int, temperature: float = TEMPERATURE
) -> dict[int, Tensor]:
    """{k: likeliest classes (B,)} from similarities (B, K), largest first, and the neighbours' labels, K ≥ k."""
    return {k: posterior(similarities[:, :k], labels[:, :k], num_classes, temperature).argmax(1) for k in ks}


def sources_knn(context: Context) -> list[Source]:
    """The validation images; NotMeasured without training images."""
    data = context.data
    if not len(data.train):
        raise NotMeasured(
            f"knn, retrieval and linear need training images, and {data.name} has none: use data with a training part"
        )
    return [replace(context.validation, depends=(bank_images(data),))]


def score_knn(batch: Batch) -> Iterator[Score]:
    """top1@K for every k; RecastError for a k that there cannot be."""
    ks, count = batch.options.neighbours, len(batch.source.depends[0])
    if max(ks) > count:
        raise RecastError(f"neighbours must be between 1 and {count} (the training images), got {max(ks)}")
    found = banks(batch)
    for name, model in batch.models.items():
        bank, bank_labels = found[name]
        similarities, indices = nearest(unit_features(batch.context, model, batch.images), bank, max(ks))
        for k, classes in vote(similarities, bank_labels[indices], ks, len(batch.context.data.classes)).items():
            yield Score(name, f"top1@{k}", (classes == batch.labels).float())


def score_linear(batch: Batch) -> Iterator[Score]:
    """top1 of the linear classifier, and log10 of the weight decay that was chosen."""
    known, found = batch.context.store.setdefault("linear", {}), banks(batch)
    for name, model in batch.models.items():
        if name not in known:
            known[name] = choose_probe(*found[name], len(batch.context.data.classes))
        probe, decay = known[name]
        right = probe(unit_features(batch.context, model, batch.images)).argmax(1) == batch.labels
        yield Score(name, "top1", right.float())
        yield Score(name, "weight_decay", torch.full((len(batch),), math.log10(decay)))


def choose_probe(bank: Tensor, labels: Tensor, num_classes: int) -> tuple[nn.Linear, float]:
    """The classifier of all rows (N, D) of the bank, and the λ that is best on a held-out tenth; the largest of equals.

    The rows have length 1; here they have √D, so that a λ means the same for every width.
    """
    kept, held = to_choose_on(labels, "linear chooses its weight decay")
    x, scale = bank * bank.shape[1] ** 0.5, bank.shape[1] ** 0.5
    right, probe = [], None
    for decay in DECAYS:
        probe = fit_probe(x[kept], labels[kept], num_classes, decay, probe)
        right.append(int((probe(x[held]).argmax(1) == labels[held]).sum()))
    chosen = DECAYS[right.index(max(right))]
    probe = fit_probe(x, labels, num_classes, chosen)
    probe.weight.mul_(scale)
    return probe, chosen


def to_choose_on(labels: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """Indices of nine tenths and one tenth of every class of the bank. RecastError where no class has two images."""
    if int(labels.bincount().max()) < 2:
        raise RecastError(f"{what} on held-out training images, and every class has a single one: add images")
    return hold_out(labels.cpu(), 0.1)


def fit_probe(x: Tensor, labels: Tensor, num_classes: int, decay: float, start: nn.Linear | None = None) -> nn.Linear:
    """Multinomial logistic regression of x (N, D). `start`: where the search for its one minimum begins; None: at 0."""
    probe = nn.Linear(x.shape[1], num_classes, device=x.device, dtype=x.dtype)
    probe.load_state_dict({name: torch.zeros_like(v) for name, v in probe.state_dict().items()})
    if start is not None:
        probe.load_state_dict(start.state_dict())
    optimizer = torch.optim.LBFGS(probe.parameters(), max_iter=200, tolerance_grad=1e-6, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        found = F.cross_entropy(probe(x), labels) + decay / 2 * probe.weight.square().sum()
        found.backward()
        return found

    with torch.enable_grad():
        optimizer.step(loss)
    return probe.requires_grad_(False)


def bank_images(data: Data) -> LabelledImages:
    """The training images as validation sees its own: without augmentation, at the test size.

    Shards cannot be opened again at another size: they come at the training size.
    """
    images = data.train.plain()
    if data.img_size == data.test_size or not isinstance(images, ImageFiles | ImageTensors):
        return images
    return ResizedImages(images, (data.test_size, data.test_size))


def unit_features(context: Context, model: nn.Module, images: Tensor) -> Tensor:
    """`features` of length 1. A network's outputs may be of coarse or of fine classes where data have both."""
    is_known = context.options.labels is None and context.data.coarse is None
    return F.normalize(features(model, images, len(context.data.classes) if is_known else None), dim=1)


def banks(batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """Unit features (N, D) and labels (N,) of the training images for each model, in one pass over them."""
    context = batch.context
    known: dict[str, tuple[Tensor, Tensor]] = context.store.setdefault("knn", {})
    if todo := [name for name in batch.models if name not in known]:
        found: dict[str, list[Tensor]] = {name: [] for name in todo}
        labels = []
        for part in context.batches(Source(batch.source.depends[0])):
            labels.append(part.labels)
            for name in todo:
                found[name].append(unit_features(context, context.models[name], part.images))
        known |= {name: (torch.cat(vectors), torch.cat(labels)) for name, vectors in found.items()}
    return known
