"""Suites `fgsm` and `pgd`: white-box L∞ attacks on pixels in [0, 1], the normalisation inside the model.

ε is in 1/255. FGSM: x' = clip(x + ε·sign ∇ₓL). PGD: `steps` such steps of size η, each projected on the ε-ball around x
and on [0, 1]. At ε = 0 both return x: the accuracy is the clean one.
Goodfellow et al. 2015 (arXiv:1412.6572); Madry et al. 2018 (arXiv:1706.06083). Defaults: T-CNN (d'Ascoli et al. 2021),
5 steps of 0.5 at ε = 1, no random start.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from recast.errors import RecastError
from recast.lab.config.evaluation import Options
from recast.lab.evaluation.context import Batch, Score, loss_gradient
from recast.lab.evaluation.evaluators import evaluates


def pgd(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    eps: float,
    *,
    steps: int = 5,
    step_size: float | None = None,
    gradient: Tensor | None = None,
) -> Tensor:
    """Return images after projected gradient ascent in the ε-ball. One step of size ε is FGSM.

    Args:
        model: maps pixels (B, C, H, W) in [0, 1] to logits; should be in eval mode.
        images: (B, C, H, W) in [0, 1].
        labels: (B,).
        eps: radius in 1/255.
        steps: number of steps.
        step_size: in 1/255; None: 2.5·ε/steps.
        gradient: ∇ₓ at the images, if computed before.

    Raises:
        RecastError: if steps < 1.

    Example:
        >>> model, images = nn.Sequential(nn.Flatten(), nn.Linear(48, 3)), torch.rand(2, 3, 4, 4)
        >>> attacked = recast.lab.evaluation.attacks.pgd(model, images, torch.tensor([0, 2]), eps=4.0)
        >>> bool(((attacked - images).abs() <= 4 / 255 + 1e-6).all())
        True
    """
    if steps < 1:
        raise RecastError(f"pgd requires at least 1 step, got steps={steps}")
    if eps == 0:
        return images
    radius, step = eps / 255, (2.5 * eps / steps if step_size is None else step_size) / 255
    low, high = (images - radius).clamp(min=0), (images + radius).clamp(max=1)
    attacked = images
    for number in range(steps):
        if gradient is None or number > 0:
            gradient = loss_gradient(model, attacked, labels)
        attacked = torch.clamp(attacked + step * gradient.sign(), low, high)
    return attacked


@evaluates("fgsm", uses=("eps",))
def score_fgsm(batch: Batch) -> Iterator[Score]:
    """Score top1@ε for every ε, and no_gradient: where ∇ₓ is zero, a failed attack does not show robustness."""
    yield from score_pgd(batch, Options(eps=batch.options.eps, steps=1))
    for name in batch.models:
        yield Score(name, "no_gradient", (batch.gradient(name).flatten(1) == 0).all(1).float())


@evaluates("pgd", uses=("eps", "steps"))
def score_pgd(batch: Batch, options: Options | None = None) -> Iterator[Score]:
    """Score top1@ε for every ε. options: None takes those of the batch."""
    options = options or batch.options
    for name, model in batch.models.items():
        for eps in options.eps:
            attacked = pgd(model, batch.images, batch.labels, eps, steps=options.steps, gradient=batch.gradient(name))
            yield Score(name, f"top1@{eps:g}", batch.is_correct(name, attacked))
