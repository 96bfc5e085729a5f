"""The head of a network that learns an embedding: a projector beside the classifier (Grafit, Touvron et al. 2021)."""

from __future__ import annotations

import copy

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from recast.errors import RecastError
from recast.lab.evaluation.knn import Embedder
from recast.models.adapt import classifiers
from recast.papers.first_weights import draw_
from recast.papers.grafit.config import Dino, Neighbors


class Prototypes(nn.Module):
    """DINO's head: an MLP with two GELUs, D → hidden → hidden → 256, cut to length 1, and its products with K unit
    vectors (Caron et al. 2021, arXiv:2104.14294, section 3)."""

    def __init__(self, width: int, hidden: int, count: int) -> None:
        super().__init__()
        first, second = nn.Linear(width, hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(first, nn.GELU(), second, nn.GELU(), nn.Linear(hidden, 256))
        draw_(self.mlp, 0.02)  # as its code does
        self.last = weight_norm(nn.Linear(256, count, bias=False))
        self.last.parametrizations.weight.original0.data.fill_(1.0)
        self.last.parametrizations.weight.original0.requires_grad_(False)

    def forward(self, features: Tensor) -> Tensor:
        products: Tensor = self.last(F.normalize(self.mlp(features), dim=-1))
        return products


class EmbeddingHead(Embedder):
    """Replacement of a classifier: features f (B, D) → logits in evaluation; logits, P(f), q(P(f)) in training.

    P is linear or D → hidden → dim with a ReLU, q (only with the instance loss byol) dim → hidden → dim with BatchNorm
    and a ReLU, as in BYOL (Grill et al. 2020). With dino P is the identity and q `Prototypes`. The embedding of an
    image is P(f) of length 1. Without a loss of labels the classifier is a probe: features get no gradient from it.
    """

    def __init__(self, classifier: nn.Linear, config: Neighbors | Dino) -> None:
        super().__init__()
        width, dim = classifier.in_features, config.dim
        self.projector: nn.Module = nn.Linear(width, dim)
        if config.kind == "mlp":
            self.projector = nn.Sequential(nn.Linear(width, config.hidden), nn.ReLU(), nn.Linear(config.hidden, dim))
        self.predictor: nn.Module | None = None
        if isinstance(config, Dino):
            self.projector, self.predictor = nn.Identity(), Prototypes(width, config.hidden, dim)
        elif config.instance_weight and config.instance_loss == "byol":
            normed = nn.BatchNorm1d(config.hidden), nn.ReLU()
            self.predictor = nn.Sequential(nn.Linear(dim, config.hidden), *normed, nn.Linear(config.hidden, dim))
        self.classifier, self.teaches = classifier, config.label_weight > 0

    def embedding(self, features: Tensor) -> Tensor:
        embedded: Tensor = self.projector(features)
        return embedded

    def forward(self, features: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        if not self.training:
            logits: Tensor = self.classifier(features)
            return logits
        projected = self.projector(features)
        predicted = projected if self.predictor is None else self.predictor(projected)
        return self.classifier(features if self.teaches else features.detach()), projected, predicted


def add_embedding_(model: nn.Module, config: Neighbors | Dino, num_classes: int) -> nn.Module:
    """Replace the classifier by an `EmbeddingHead`, in place. Raises RecastError unless it is one nn.Linear."""
    names = classifiers(model, num_classes)
    classifier = model.get_submodule(names[0])
    if len(names) > 1 or not isinstance(classifier, nn.Linear):
        raise RecastError(
            f"an embedding requires one linear classifier, {type(model).__name__} has {' and '.join(names)} "
            f"({type(classifier).__name__}): choose another network"
        )
    model.set_submodule(names[0], EmbeddingHead(classifier, config).train(classifier.training))
    return model


def without_embedding(model: nn.Module) -> nn.Module:
    """Return a copy with the plain classifier instead of the `EmbeddingHead`."""
    copied = copy.deepcopy(model)
    for name, module in model.named_modules():
        if isinstance(module, EmbeddingHead):
            copied.set_submodule(name, copied.get_submodule(f"{name}.classifier"))
    return copied


def without_probe(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters without those of a probe, whose gradient must not count in the norm that is clipped."""
    head = embedding_head(model)
    probe = set() if head is None or head.teaches else {*head.classifier.parameters()}
    return [parameter for parameter in model.parameters() if parameter not in probe]


def embedding_head(model: nn.Module) -> EmbeddingHead | None:
    """Return the embedding head of a network, or None."""
    return next((module for module in model.modules() if isinstance(module, EmbeddingHead)), None)
