"""Suites `fgsm` and `pgd`: white-box L∞ attacks on pixels in [0, 1], the normalisation inside the model.

ε is in 1/255. FGSM: x' = clip(x + ε·sign ∇ₓL). PGD: that step with size η, `steps` times, each time projected on the
ε-ball around x and on [0, 1]. At ε = 0 both return x itself: the accuracy is the clean one.
Goodfellow et al. 2015 (arXiv:1412.6572); Madry et al. 2018 (arXiv:1706.06083). Defaults: T-CNN (d'Ascoli et al. 2021),
5 steps of 0.5 at ε = 1, no random start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recast.errors import RecastError
from recast.evaluation.bench import Bench, Measurement, PixelModel, count_correct

PGD_STEPS = 5


def fgsm(model: nn.Module, images: Tensor, labels: Tensor, eps: float) -> Tensor:
    """One step of size ε (in 1/255). `model` takes pixels (B, C, H, W) in [0, 1] and should be in eval mode."""
    if eps == 0:
        return images
    return _ascend(images, _loss_gradient(model, images, labels), eps / 255)


def pgd(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    eps: float,
    *,
    steps: int = PGD_STEPS,
    step_size: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Projected gradient ascent in the ε-ball; ε and `step_size` are in 1/255, step_size None is 2.5·ε/steps.

    generator: a CPU generator starts the attack at a uniformly random point of the ball; None starts at the image.
    """
    if steps < 1:
        raise RecastError(f"pgd needs at least 1 step, got steps={steps}")
    if eps == 0:
        return images
    radius, step = eps / 255, (2.5 * eps / steps if step_size is None else step_size) / 255
    low, high = (images - radius).clamp(min=0), (images + radius).clamp(max=1)
    attacked = images
    if generator is not None:
        noise = 2 * torch.rand(images.shape, generator=generator) - 1
        attacked = torch.clamp(images + radius * noise.to(images), low, high)
    for _ in range(steps):
        attacked = torch.clamp(_ascend(attacked, _loss_gradient(model, attacked, labels), step), low, high)
    return attacked


def _loss_gradient(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """∇ₓ of the summed cross-entropy: no image's gradient depends on its batch, none is left in the parameters."""
    with torch.enable_grad():
        pixels = images.detach().clone().requires_grad_()
        loss = F.cross_entropy(model(pixels).float(), labels, reduction="sum")
        return torch.autograd.grad(loss, pixels)[0]


def _ascend(images: Tensor, gradient: Tensor, step: float) -> Tensor:
    return (images + step * gradient.sign()).clamp(0, 1)


def measure_fgsm(bench: Bench) -> Iterator[Measurement]:
    """top1@ε for every ε."""
    return _measure(bench, fgsm)


def measure_pgd(bench: Bench) -> Iterator[Measurement]:
    """top1@ε for every ε."""
    return _measure(bench, pgd)


def _measure(bench: Bench, attack: Callable[[PixelModel, Tensor, Tensor, float], Tensor]) -> Iterator[Measurement]:
    correct: Counter[tuple[str, float]] = Counter()
    for _, images, labels in bench.batches():
        for name, model in bench.models.items():
            for eps in bench.eps:
                attacked = attack(model, images, labels, eps)
                correct[name, eps] += count_correct(bench.logits(name, attacked), labels)
                bench.advance(len(labels))
    n = len(bench.data.val)
    for name in bench.models:
        for eps in bench.eps:
            yield Measurement(name, f"top1@{eps:g}", 100 * correct[name, eps] / n, n)
