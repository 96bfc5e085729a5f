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

    def __init__(self, width: int, hidden: int, count: int, bottleneck: int = 256) -> None:
        super().__init__()
        first, second = nn.Linear(width, hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(first, nn.GELU(), second, nn.GELU(), nn.Linear(hidden, bottleneck))
        draw_(self.mlp, 0.02)  # as its code does
        self.last = weight_norm(nn.Linear(bottleneck, count, bias=False))
        self.last.parametrizations.weight.original0.data.fill_(1.0)
        self.last.parametrizations.weight.original0.requires_grad_(False)

    def forward(self, features: Tensor) -> Tensor:
        products: Tensor = self.last(F.normalize(self.mlp(features), dim=-1))
        return products


class EmbeddingHead(Embedder):
    """In a classifier's place: features f (B, D) → in evaluation logits, as before; in training logits, P(f), q(P(f)).

    P is linear or D → hidden → dim with a ReLU, q (only where there is an instance loss) dim → hidden → dim with
    BatchNorm and a ReLU, as in BYOL (Grill et al. 2020). With dino P is the identity and q `Prototypes`. The embedding
    of an image is P(f) of length 1. Where labels have no part in the loss the classifier sees features without a
    gradient: it is a probe that moves nothing else.
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
        elif config.instance_weight:
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
    """Put an `EmbeddingHead` in the place of the classifier, in place. RecastError unless that is one nn.Linear."""
    names = classifiers(model, num_classes)
    found = model.get_submodule(names[0])
    if len(names) > 1 or not isinstance(found, nn.Linear):
        raise RecastError(
            f"an embedding takes the place of one linear classifier, {type(model).__name__} has "
            f"{' and '.join(names)} ({type(found).__name__}): choose another network"
        )
    model.set_submodule(names[0], EmbeddingHead(found, config).train(found.training))
    return model


def without_embedding(model: nn.Module) -> nn.Module:
    """A copy with the classifier itself in its place."""
    copied = copy.deepcopy(model)
    for name, module in model.named_modules():
        if isinstance(module, EmbeddingHead):
            copied.set_submodule(name, copied.get_submodule(f"{name}.classifier"))
    return copied


def without_probe(model: nn.Module) -> list[nn.Parameter]:
    """The parameters, but for those of a classifier that learns beside: its gradient is not to shorten the others'."""
    head = embedding_head(model)
    beside = set() if head is None or head.teaches else {*head.classifier.parameters()}
    return [parameter for parameter in model.parameters() if parameter not in beside]


def embedding_head(model: nn.Module) -> EmbeddingHead | None:
    """The head that makes the embedding of a network, where it has one."""
    return next((module for module in model.modules() if isinstance(module, EmbeddingHead)), None)
