"""Losses of Grafit (Touvron et al. 2021, Grafit: Learning fine-grained image representations with coarse labels).

    L = w_knn · L_knn + w_inst · L_inst + w_label · L_label

g is the embedding of length 1 of an image, m_j that of training image j at its last visit (the memory), q the
predictor, ξ the weights' moving average (the target network), t_1 … t_T random views of the image.

    L_knn(i)  = −log Σ_{j≠i, y_j=y_i} p_ij,   p_ij = softmax over j ≠ i of ⟨g(t_1 x_i), m_j⟩/σ    (SNCA, Wu et al. 2018)
    L_inst(i) = −1/(T(T−1)) Σ_{a≠b} cos(q(g(t_a x_i)), g_ξ(t_b x_i))                              (as in BYOL)
    L_label   = the recipe's loss of labels, at t_1

L_inst may be a triplet loss instead (thesis, Tables 2.1 and 2.2), the mean over views a ≠ b and other images j of

    max(0, m + ⟨g(t_a x_i), g(t_b x_j)⟩ − ⟨g(t_a x_i), g(t_b x_i)⟩)

Without labels (DINO, Caron et al. 2021, arXiv:2104.14294), z the products with K prototypes, c the mean of z_ξ so far:

    L_dino(i) = −mean over b ≤ 2, a ≠ b of Σ_k softmax((z_ξ(t_b x_i) − c)/τ)_k · log softmax(z(t_a x_i)/0.1)_k
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn import functional as F

from recast.lab.data import Data
from recast.lab.task import Setting
from recast.lab.training.distill import widened
from recast.lab.training.distributed import gathered
from recast.lab.training.regularization import set_drop_path_, train_mode
from recast.papers.grafit.config import Dino, Neighbors
from recast.papers.grafit.views import WHOLE_VIEWS

STUDENT_TEMPERATURE, CENTER_MOMENTUM = 0.1, 0.9
"""DINO's."""
MARGIN = 0.2
"""m of the triplet loss, FaceNet's (Schroff et al. 2015); the thesis gives neither margin nor choice of triplets."""
FAR = -1e30
"""Stands for −∞ in an exponent; unlike it, with a gradient of 0."""


def neighbour_loss(embeddings: Tensor, indices: Tensor, memory: Tensor, labels: Tensor, sigma: float) -> Tensor:
    """Return L_knn (B,) of unit embeddings (B, D), images number `indices` (B,) of the memory (N, D) with labels (N,).

    The loss of an image that is alone in its class is 0. Computed in float32 or more, as
    L = log(1 + Σ_negatives/Σ_positives), which is exact near 0, unlike a difference of logarithms.
    """
    z = widened(embeddings)
    same = labels[indices][:, None] == labels
    is_self = indices[:, None] == torch.arange(len(memory), device=z.device)
    logits = (z @ memory.to(z.dtype).T / sigma).masked_fill(is_self, FAR)
    positives = logits.masked_fill(~same, FAR).logsumexp(1)
    negatives = logits.masked_fill(same, FAR).logsumexp(1)
    alone = ~(same & ~is_self).any(1)
    return F.softplus(negatives - positives).masked_fill(alone, 0.0)


def instance_loss(predictions: Tensor, targets: Tensor) -> Tensor:
    """Return L_inst (B,) ≥ −1 of q(g(t_a x)) and g_ξ(t_b x), both (B, T, D)."""
    q, g = F.normalize(widened(predictions), dim=-1), F.normalize(widened(targets), dim=-1)
    views = q.shape[1]
    pairs = (q.sum(1) * g.sum(1)).sum(-1) - (q * g).sum((1, 2))
    return -pairs / (views * (views - 1))


def triplet_loss(embeddings: Tensor) -> Tensor:
    """Return the triplet loss (B,) of unit embeddings g(t_a x), (B, T, D); 0 for an image alone in its batch."""
    z = widened(embeddings)
    products = torch.einsum("iad,jbd->ijab", z, z)
    same_image = products.diagonal().permute(2, 0, 1)[:, None]  # (B, 1, T, T)
    losses = F.relu(MARGIN + products - same_image)
    views = ~torch.eye(z.shape[1], dtype=torch.bool, device=z.device)
    others = ~torch.eye(len(z), dtype=torch.bool, device=z.device)
    counted = others[..., None, None] & views
    return losses.masked_fill(~counted, 0.0).sum((1, 2, 3)) / counted.sum((1, 2, 3)).clamp(min=1)


def dino_loss(student: Tensor, teacher: Tensor, center: Tensor, temperature: float) -> Tensor:
    """Return L_dino (B,) of products of the network (B, T, K) and its moving average (B, G, K), G first views."""
    logs = (widened(student) / STUDENT_TEMPERATURE).log_softmax(-1)
    targets = ((widened(teacher) - center) / temperature).softmax(-1)
    views, whole = student.shape[1], teacher.shape[1]
    pairs = torch.einsum("bgk,btk->b", targets, logs) - (targets * logs[:, :whole]).sum((1, 2))
    return -pairs / (whole * (views - 1))


@torch.no_grad()
def remember_(memory: Tensor, indices: Tensor, embeddings: Tensor) -> None:
    """Set m_i ← (m_i + g(x_i))/2, normalised to length 1. The first of several embeddings of an image counts."""
    order = indices.argsort(stable=True)
    is_first = torch.ones_like(order, dtype=torch.bool)
    is_first[1:] = indices[order][1:] != indices[order][:-1]
    chosen = order[is_first]
    memory[indices[chosen]] = F.normalize((memory[indices[chosen]] + embeddings[chosen]) / 2, dim=1)


class EmbeddingLoss(nn.Module):
    """L of the outputs of a network with an `EmbeddingHead`.

    Memory and target network are part of a run's state; every process has the same, whole memory. The mean is over all
    images, also those whose L_knn is 0, so that it does not depend on how a batch is shared out. The target uses the
    statistics of the batch, as in BYOL, and no stochastic depth; its decay τ rises to 1 by a cosine over the run. With
    DINO, the target is the network that is measured and saved, as in its paper.
    """

    memory: Tensor
    center: Tensor
    classes: Tensor

    def __init__(
        self,
        config: Neighbors | Dino,
        data: Data,
        student: nn.Module,
        label_loss: Callable[[Tensor, Tensor], Tensor],
        setting: Setting,
    ) -> None:
        super().__init__()
        self.config, self.label_loss, self.step = config, label_loss, 0
        self.steps, device, self.amp, self.freeze = setting
        self.is_dino = isinstance(self.config, Dino)
        remembered = 0 if self.is_dino else len(data.train)
        self.register_buffer("memory", torch.zeros(remembered, self.config.dim, device=device))
        self.register_buffer("center", torch.zeros(self.config.dim if self.is_dino else 0, device=device))
        self.register_buffer("classes", data.train.labels.to(device), persistent=False)
        self.target: ModelEmaV3 | None = None
        if isinstance(self.config, Dino) or (self.config.instance_weight and self.config.instance_loss == "byol"):
            self.target = ModelEmaV3(student, decay=self.config.target_decay).requires_grad_(False)
            train_mode(set_drop_path_(self.target.module, 0.0), self.freeze)
        self._embeddings: list[tuple[Tensor, Tensor]] = []
        self._centers: list[Tensor] = []

    @property
    def evaluated(self) -> nn.Module | None:
        """Return DINO's moving average."""
        return self.target.module if self.is_dino and self.target is not None else None

    def forward(self, outputs: tuple[Tensor, Tensor, Tensor], images: Tensor, indices: Tensor) -> Tensor:
        """Return the mean of L over a part: T views (B·T, …) of the training images number `indices` (B,)."""
        config, views = self.config, self.config.views
        if self.target is not None and not self.target.module.training:  # after a validation
            train_mode(self.target.module, self.freeze)
        logits, projected, predicted = outputs
        label_loss = self.label_loss(logits[::views], self.classes[indices])
        # without a weight the classifier learns as a probe, and its loss is not counted
        loss = config.label_weight * label_loss if config.label_weight else label_loss - label_loss.detach()
        if isinstance(config, Dino):
            return loss + self._dino(config, predicted, images)
        first = F.normalize(widened(projected[::views]), dim=1)
        if config.knn_weight:
            losses = neighbour_loss(first, indices, self.memory, self.classes, config.sigma)
            loss = loss + config.knn_weight * losses.mean()
        if self.target is not None:
            with torch.no_grad(), torch.autocast(images.device.type, self.amp, enabled=self.amp is not None):
                targets = self.target(images)[1].unflatten(0, (-1, views))
            losses = instance_loss(predicted.unflatten(0, (-1, views)), targets)
            loss = loss + config.instance_weight * losses.mean()
        elif config.instance_weight:
            of_views = F.normalize(widened(projected), dim=1).unflatten(0, (-1, views))
            loss = loss + config.instance_weight * triplet_loss(of_views).mean()
        self._embeddings.append((indices, first.detach()))
        return loss

    def _dino(self, config: Dino, predicted: Tensor, images: Tensor) -> Tensor:
        """Return the mean of L_dino over a part; the moving average gets the first two views of each image."""
        assert self.target is not None
        whole = images.unflatten(0, (-1, config.views))[:, :WHOLE_VIEWS].flatten(0, 1)
        with torch.no_grad(), torch.autocast(images.device.type, self.amp, enabled=self.amp is not None):
            targets = widened(self.target(whole)[2])
        self._centers.append(targets.mean(0))
        teacher, student = targets.unflatten(0, (-1, WHOLE_VIEWS)), predicted.unflatten(0, (-1, config.views))
        return dino_loss(student, teacher, self.center, config.teacher_temperature).mean()

    def after_step(self, model: nn.Module) -> None:
        """Store the embeddings of the whole batch, and update the target."""
        if self.is_dino:
            mean = gathered(torch.stack(self._centers)).mean(0)
            self._centers.clear()
            self.center.lerp_(mean, 1 - CENTER_MOMENTUM)
        else:
            indices, embeddings = (torch.cat(parts) for parts in zip(*self._embeddings, strict=True))
            self._embeddings.clear()
            remember_(self.memory, gathered(indices), gathered(embeddings))
        if self.target is not None:
            rest = (1 - self.config.target_decay) * (1 + math.cos(math.pi * self.step / max(1, self.steps))) / 2
            self.target.decay = 1 - rest
            self.target.update(model)
