"""Suites `fgsm` and `pgd`: white-box L∞ attacks on pixels in [0, 1], the normalisation inside the model.

ε is in 1/255. FGSM: x' = clip(x + ε·sign ∇ₓL). PGD: that step with size η, `steps` times, each time projected on the
ε-ball around x and on [0, 1]. At ε = 0 both return x itself: the accuracy is the clean one.
Goodfellow et al. 2015 (arXiv:1412.6572); Madry et al. 2018 (arXiv:1706.06083). Defaults: T-CNN (d'Ascoli et al. 2021),
5 steps of 0.5 at ε = 1, no random start.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from recast.data.seeding import mix_seed
from recast.errors import RecastError
from recast.evaluation.bench import Batch, Bench, Options, Score, is_correct, loss_gradient


def fgsm(model: nn.Module, images: Tensor, labels: Tensor, eps: float, *, gradient: Tensor | None = None) -> Tensor:
    """One step of size ε (in 1/255). `model` takes pixels (B, C, H, W) in [0, 1] and should be in eval mode.

    gradient: ∇ₓ at the images, where it is known already.
    """
    if eps == 0:
        return images
    return _ascend(images, loss_gradient(model, images, labels) if gradient is None else gradient, eps / 255)


def pgd(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    eps: float,
    *,
    steps: int = Options.steps,
    step_size: float | None = None,
    noise: Tensor | None = None,
    gradient: Tensor | None = None,
) -> Tensor:
    """Projected gradient ascent in the ε-ball; ε and `step_size` are in 1/255, step_size None is 2.5·ε/steps.

    noise: (B, C, H, W) in [-1, 1], the start in the ball in units of ε; None starts at the images, where `gradient` is
    ∇ₓ if it is known already.
    """
    if steps < 1:
        raise RecastError(f"pgd needs at least 1 step, got steps={steps}")
    if eps == 0:
        return images
    radius, step = eps / 255, (2.5 * eps / steps if step_size is None else step_size) / 255
    low, high = (images - radius).clamp(min=0), (images + radius).clamp(max=1)
    attacked = images if noise is None else torch.clamp(images + radius * noise, low, high)
    for number in range(steps):
        known = gradient if number == 0 and noise is None else None
        uphill = loss_gradient(model, attacked, labels) if known is None else known
        attacked = torch.clamp(_ascend(attacked, uphill, step), low, high)
    return attacked


def _ascend(images: Tensor, gradient: Tensor, step: float) -> Tensor:
    return (images + step * gradient.sign()).clamp(0, 1)


def score_fgsm(bench: Bench, batch: Batch) -> Iterator[Score]:
    """top1@ε for every ε; no_gradient: where ∇ₓ is zero, an attack finds no way and robustness is not shown."""
    for name, model in bench.models.items():
        gradient = batch.gradient(name)
        for eps in bench.options.eps:
            attacked = fgsm(model, batch.images, batch.labels, eps, gradient=gradient)
            yield Score(name, f"top1@{eps:g}", _survived(bench, batch, name, attacked))
        yield Score(name, "no_gradient", (gradient.flatten(1) == 0).all(1).float())


def score_pgd(bench: Bench, batch: Batch) -> Iterator[Score]:
    """top1@ε for every ε: correct under every restart."""
    options = bench.options
    for name, model in bench.models.items():
        for eps in options.eps:
            survived = torch.ones(len(batch), device=batch.images.device)
            for start in range(options.restarts):
                is_random = options.random_start or start > 0
                attacked = pgd(
                    model,
                    batch.images,
                    batch.labels,
                    eps,
                    steps=options.steps,
                    step_size=options.step_size,
                    noise=_noise(batch, start, options.seed) if is_random else None,
                    gradient=None if is_random else batch.gradient(name),
                )
                survived *= _survived(bench, batch, name, attacked)
            yield Score(name, f"top1@{eps:g}", survived)


def _survived(bench: Bench, batch: Batch, name: str, attacked: Tensor) -> Tensor:
    """(B,) 1 where the prediction is still right; images that were left as they are have the clean logits."""
    logits = batch.logits(name) if attacked is batch.images else bench.logits(name, attacked)
    return is_correct(logits, batch.labels)


def _noise(batch: Batch, start: int, seed: int) -> Tensor:
    """Uniform in [-1, 1], the same for an image whatever else is in its batch."""
    drawn = [
        torch.rand(batch.images.shape[1:], generator=torch.Generator().manual_seed(mix_seed("pgd", seed, start, index)))
        for index in batch.indices
    ]
    return (2 * torch.stack(drawn) - 1).to(batch.images)
